"""Sequences: what a stage knows of its tokens beside their values: padding, packing, positions.

Computed where it is read, from what was fed: a replay sees what its first pass saw, and only the feeds are kept.
Legend: B rows, S positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from overlap.model.config import ModelConfig


class Sequences(NamedTuple):
    """The feeds that describe a microbatch's tokens; None where a model does not ask for one."""

    padding_mask: Tensor | None = None
    """[B, S] bool, True where a token is padding."""
    cu_seqlens: Tensor | None = None
    """[sequences + 1] int32 or int64: ends of the packed sequences among the B*S tokens, row by row, from 0."""
    positions: Tensor | None = None
    """[B, S] int64: place of each token for the rotary embedding; None: 0 to S-1."""

    def mask(self, x: Tensor) -> Tensor | None:
        """Who may attend to whom, for x [B, S, ...]: bool [B, 1, S, S], True where allowed; None: plain causal.

        Causal, within one sequence, never to padding; every token may attend to itself, so that no row is empty.
        """
        if self.padding_mask is None and self.cu_seqlens is None:
            return None
        length = x.shape[1]
        allowed = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        if self.cu_seqlens is not None:
            number = _numbers(self.cu_seqlens, x)
            allowed = allowed & (number.unsqueeze(-1) == number.unsqueeze(-2))
        if self.padding_mask is not None:
            own = torch.eye(length, dtype=torch.bool, device=x.device)
            allowed = allowed & (~self.padding_mask.unsqueeze(-2) | own)
        return allowed.expand(x.shape[0], length, length).unsqueeze(1)

    def ahead(self, x: Tensor, steps: int, fill: int) -> Tensor:
        """Each token's value `steps` places ahead, `fill` where its sequence has none: [B, S] -> [B, S].

        Args:
            x: [B, S], integer or bool.
            steps: From 0 up to S.
            fill: Written where the sequence has ended.
        """
        moved = _shift(x, steps, fill)
        if self.cu_seqlens is None:
            return moved
        number = _numbers(self.cu_seqlens, x)
        return torch.where(_shift(number, steps, 0) == number, moved, torch.full_like(x, fill))

    def at_depth(self, depth: int) -> Sequences:
        """As an MTP depth sees it, whose tokens are those `depth` places ahead: past the end all is padding.

        Positions stay: only the rotary embedding reads them, and the distance of two slots does not change.
        """
        if self.padding_mask is None:
            return self
        return self._replace(padding_mask=self.ahead(self.padding_mask, depth, fill=True))


def sequence_feeds(config: ModelConfig) -> tuple[str, ...]:
    """Names of the feeds that a model asks for; they are fields of Sequences."""
    return (("padding_mask",) if config.padding else ()) + (("cu_seqlens", "positions") if config.packed else ())


def as_sequences(names: Sequence[str], tensors: Sequence[Tensor]) -> Sequences:
    """Sequences from feeds in the order of `names`."""
    return Sequences(**dict(zip(names, tensors, strict=True)))


def _numbers(cu_seqlens: Tensor, x: Tensor) -> Tensor:
    """Which sequence each token of x [B, S, ...] belongs to, from 1 up: [B, S] int64."""
    batch, length = x.shape[:2]
    place = torch.arange(batch * length, dtype=cu_seqlens.dtype, device=x.device)
    return torch.searchsorted(cu_seqlens.to(x.device), place, right=True).view(batch, length)


def _shift(x: Tensor, steps: int, fill: int) -> Tensor:
    return F.pad(x[:, steps:], (0, steps), value=fill)
