"""Text as training data: bytes are the tokens, a step's microbatches are a function of the seed and the step."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from overlap.engine import Feeds
from overlap.training.seeds import data_seed
from recompute.config import check_count
from recompute.errors import ConfigError

VOCAB = 256


def default_text() -> Path:
    """English text that every CPython ships: the language reference topics of `help()`.

    Raises:
        ConfigError: This Python comes without it.
    """
    spec = find_spec("pydoc_data.topics")
    if spec is None or spec.origin is None:
        raise ConfigError(field="text", value=None, rule="this Python has no pydoc_data: name a text file")
    return Path(spec.origin)


class ByteText:
    """Text files joined to one line of byte tokens.

    Args:
        paths: Files to read, in order.
        seq: Tokens of a training sequence.

    Raises:
        ConfigError: There are no files, or one is missing, empty or shorter than one sequence (and the byte to predict
            after it); `seq` is no positive integer.
    """

    def __init__(self, paths: Sequence[Path | str], seq: int) -> None:
        check_count("seq", seq, at_least=1)
        if type(paths) not in (list, tuple) or not paths:
            raise ConfigError(field="text", value=paths, rule="must be a list of at least one file")
        self.seq = seq
        self.tokens = torch.cat([_read(Path(path), seq) for path in paths])
        """All bytes, uint8."""

    def microbatches(self, seed: int, step: int, num_microbatches: int, batch: int, data_rank: int = 0) -> list[Feeds]:
        """The microbatches of one step: random windows, the same for the same seed, step and rank.

        Returns:
            Feeds with ids and labels, int64 [batch, seq].
        """
        generator = torch.Generator().manual_seed(data_seed(seed, step, data_rank))
        starts = torch.randint(len(self.tokens) - self.seq, (num_microbatches, batch), generator=generator)
        return [self._feeds(row) for row in starts]

    def _feeds(self, starts: Tensor) -> Feeds:
        windows = self.tokens[starts[:, None] + torch.arange(self.seq + 1)].long()
        return {"ids": windows[:, :-1].contiguous(), "labels": windows[:, 1:].contiguous()}


def _read(path: Path, seq: int) -> Tensor:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(field="text", value=str(path), rule=f"must be a readable file ({error.strerror})") from error
    if not data:
        raise ConfigError(field="text", value=str(path), rule="must not be empty")
    if len(data) < seq + 1:
        rule = f"must hold at least one sequence of {seq} bytes and the byte after it; it holds {len(data)}"
        raise ConfigError(field="text", value=str(path), rule=rule)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
