"""Rows that are not one full sequence: padding at their ends, several sequences packed into one.

Legend: B rows, S positions.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from overlap.model.config import ModelConfig
from overlap.model.head import IGNORED


def cut_rows(feeds: dict[str, Tensor], config: ModelConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """Add the feeds that `padding` and `packed` ask for, at random, each row its own.

    Args:
        feeds: `ids` and `labels`, int64 [B, S].
        config: Says which feeds the model reads.
        generator: Where the cuts come from; nothing is drawn if the model asks for neither.

    Returns:
        The feeds with labels IGNORED where no token of the same sequence follows, and with `padding_mask` (at most
        half of each row), `cu_seqlens` (one to three sequences a row) and `positions` (from 0 in each sequence).
    """
    ids, labels = feeds["ids"], feeds["labels"].clone()
    cut = dict(feeds)
    if config.packed:
        ends = _pack(ids.shape[0], ids.shape[1], generator)
        labels.view(-1)[torch.tensor(ends[1:]) - 1] = IGNORED
        cut["cu_seqlens"] = torch.tensor(ends)
        cut["positions"] = torch.cat([torch.arange(last - first) for first, last in pairwise(ends)]).view_as(ids)
    if config.padding:
        kept = ids.shape[1] - torch.randint(ids.shape[1] // 2 + 1, (ids.shape[0], 1), generator=generator)
        place = torch.arange(ids.shape[1])
        cut["padding_mask"] = place >= kept
        labels.masked_fill_(place >= kept - 1, IGNORED)
    return {**cut, "labels": labels}


def _pack(rows: int, length: int, generator: torch.Generator) -> list[int]:
    """Ends of the sequences among rows*length tokens, from 0; every row ends one."""
    cuts = torch.randint(length, (rows, 2), generator=generator).tolist()
    return sorted({row * length + cut for row, pair in enumerate(cuts) for cut in (0, *pair)} | {rows * length})
