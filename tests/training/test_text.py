"""Text as training data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from overlap.training.text import VOCAB, ByteText, default_text
from recompute import ConfigError


def make(tmp_path: Path, *contents: bytes, seq: int = 4) -> ByteText:
    paths = []
    for number, content in enumerate(contents):
        paths.append(tmp_path / f"{number}.txt")
        paths[-1].write_bytes(content)
    return ByteText(paths, seq)


def test_bytes_are_the_tokens_files_joined_in_order(tmp_path: Path) -> None:
    text = make(tmp_path, "caf\u00e9 ".encode(), bytes(range(250, 256)))
    assert text.tokens.dtype is torch.uint8
    assert bytes(text.tokens.tolist()) == b"caf\xc3\xa9 \xfa\xfb\xfc\xfd\xfe\xff"
    assert int(text.tokens.max()) < VOCAB


def test_labels_are_the_next_bytes(tmp_path: Path) -> None:
    text = make(tmp_path, bytes(range(100)))
    for mb in text.microbatches(seed=0, step=3, num_microbatches=5, batch=2):
        assert mb["ids"].shape == mb["labels"].shape == (2, 4)
        assert mb["ids"].dtype is torch.int64
        assert torch.equal(mb["ids"] + 1, mb["labels"])
        assert torch.equal(mb["ids"][:, 1:], mb["labels"][:, :-1])
        assert mb["ids"].is_contiguous()
        assert mb["labels"].is_contiguous()


def test_a_step_is_a_function_of_seed_and_step(tmp_path: Path) -> None:
    text = make(tmp_path, bytes(range(250)))
    before = torch.get_rng_state()

    def ids(seed: int, step: int) -> torch.Tensor:
        return torch.stack([mb["ids"] for mb in text.microbatches(seed, step, 3, 2)])

    assert torch.equal(ids(0, 0), ids(0, 0))
    assert not torch.equal(ids(0, 0), ids(0, 1))
    assert not torch.equal(ids(0, 0), ids(1, 0))
    assert torch.equal(torch.get_rng_state(), before)


def test_every_window_can_be_drawn(tmp_path: Path) -> None:
    """The first and the last window included; none runs past the end."""
    text = make(tmp_path, bytes(range(8)))
    starts = {int(mb["ids"][0, 0]) for step in range(40) for mb in text.microbatches(0, step, 2, 1)}
    assert starts == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("content", "rule"),
    [(b"", "must not be empty"), (b"abcd", "must hold at least one sequence of 4 bytes and the byte after it")],
)
def test_a_file_that_is_too_short(content: bytes, rule: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        make(tmp_path, b"long enough", content)
    assert caught.value.field == "text"
    assert caught.value.value == str(tmp_path / "1.txt")
    assert len(make(tmp_path, b"abcde").tokens) == 5


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a readable file"):
        ByteText([tmp_path / "missing.txt"], 4)


def test_default_text_is_english() -> None:
    data = default_text().read_bytes()
    assert len(data) > 100_000
    assert b"The following" in data or b"the following" in data


def test_paths_are_a_list(tmp_path: Path) -> None:
    text: Any = make(tmp_path, b"abcdefgh")
    assert ByteText([str(tmp_path / "0.txt")], 4).tokens.equal(text.tokens)
    bad: list[Any] = [[], None, "0.txt", tmp_path / "0.txt"]
    for paths in bad:
        with pytest.raises(ConfigError, match=r"^text=.*: must be a list of at least one file"):
            ByteText(paths, 4)
    lengths: list[Any] = [0, None, 4.0]
    for seq in lengths:
        with pytest.raises(ConfigError, match=r"^seq=.*: must be an integer of at least 1"):
            ByteText([tmp_path / "0.txt"], seq)
