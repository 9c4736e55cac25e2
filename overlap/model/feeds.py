"""check_feeds: refuse a microbatch that does not fit the model, before any stage runs, naming the feed.

Types and shapes are checked everywhere, contents only where they are on the host: a look at a device would wait.
Legend: B rows, S positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from overlap.model.config import ModelConfig
from overlap.model.head import IGNORED
from recompute.errors import ConfigError

_INTEGERS = (torch.int32, torch.int64)


def check_feeds(config: ModelConfig, feeds: Mapping[str, Any]) -> None:
    """Check the feeds of one microbatch against each other and the config.

    Raises:
        ConfigError: Names the feed and the rule.
    """
    ids = feeds["ids"]
    if not torch.is_tensor(ids) or ids.dim() != 2 or ids.dtype is not torch.int64:
        raise ConfigError(field="ids", value=_kind(ids), rule="must be int64 of shape [rows, positions]")
    if ids.numel() == 0:
        raise ConfigError(field="ids", value=_kind(ids), rule="must hold at least one row and one position")
    if _on_host(ids):
        _check_within("ids", _contents(ids), "vocab", config.vocab)
    length = ids.shape[1]
    if length > config.max_seq:
        rule = f"must be at least the sequence length ({length})"
        raise ConfigError(field="max_seq", value=config.max_seq, rule=rule)
    if length <= config.mtp:
        raise ConfigError(field="mtp", value=config.mtp, rule=f"must be below the sequence length ({length})")
    if config.labels:
        _check_tensor("labels", feeds["labels"], ids, torch.int64)
        _check_labels(feeds["labels"], config.vocab)
    if config.padding:
        _check_padding(config, feeds, ids)
    if config.packed:
        _check_tensor("positions", feeds["positions"], ids, torch.int64)
        _check_packing(feeds["cu_seqlens"], ids)
        _check_positions(feeds["positions"], config.max_seq)


def _check_tensor(name: str, value: Any, ids: Tensor, dtype: torch.dtype) -> None:
    if not torch.is_tensor(value) or value.shape != ids.shape or value.dtype is not dtype:
        rule = f"must be {dtype} of the shape of ids, {tuple(ids.shape)}"
        raise ConfigError(field=name, value=_kind(value), rule=rule)


def _check_labels(labels: Tensor, vocab: int) -> None:
    """On a device a label outside the vocabulary makes the loss NaN instead."""
    if not _on_host(labels):
        return
    given = [label for label in _contents(labels) if label != IGNORED]
    _check_within("labels", given, "vocab", vocab, f"must be {IGNORED} (no loss) or")


def _check_within(name: str, contents: Sequence[int], size: str, count: int, rule: str = "must") -> None:
    outside = [entry for entry in contents if not 0 <= entry < count]
    if outside:
        rule = f"{rule} lie in 0 to {size} - 1 ({count - 1})"
        raise ConfigError(field=name, value=[min(outside), max(outside)], rule=rule)


def _check_padding(config: ModelConfig, feeds: Mapping[str, Any], ids: Tensor) -> None:
    mask = feeds["padding_mask"]
    _check_tensor("padding_mask", mask, ids, torch.bool)
    if not config.labels or not _on_host(mask) or not _on_host(feeds["labels"]):
        return
    pairs = zip(_contents(feeds["labels"]), _contents(mask), strict=True)
    if any(padded and label != IGNORED for label, padded in pairs):
        rule = f"must be {IGNORED} (no loss) where padding_mask says that a token is padding"
        raise ConfigError(field="labels", value=_kind(feeds["labels"]), rule=rule)


def _check_packing(ends: Any, ids: Tensor) -> None:
    batch, length = ids.shape
    if not torch.is_tensor(ends) or ends.dim() != 1 or ends.dtype not in _INTEGERS or len(ends) < 2:
        rule = "must be int32 or int64 of shape [sequences + 1]"
        raise ConfigError(field="cu_seqlens", value=_kind(ends), rule=rule)
    if not _on_host(ends):
        return
    values = ends.tolist()
    if values[0] != 0 or values[-1] != ids.numel():
        rule = f"must run from 0 to the number of tokens ({ids.numel()}): packed lengths sum to it"
        raise ConfigError(field="cu_seqlens", value=values, rule=rule)
    if any(later <= earlier for earlier, later in pairwise(values)):
        raise ConfigError(field="cu_seqlens", value=values, rule="must increase: no sequence is empty")
    if not set(range(0, batch * length + 1, length)) <= set(values):
        rule = f"must end a sequence at each row's end (every {length} tokens): attention never crosses rows"
        raise ConfigError(field="cu_seqlens", value=values, rule=rule)


def _check_positions(positions: Tensor, max_seq: int) -> None:
    if _on_host(positions):
        _check_within("positions", _contents(positions), "max_seq", max_seq)


def _on_host(tensor: Tensor) -> bool:
    """Whether there are contents to look at."""
    return type(tensor) is Tensor and tensor.device.type == "cpu"


def _contents(tensor: Tensor) -> list[int]:
    """All elements. Not by tensor operations: feeds are also checked under a mode that would make them fake."""
    return [entry for row in tensor.tolist() for entry in row]


def _kind(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if torch.is_tensor(value) else type(value).__name__
