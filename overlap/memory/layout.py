"""Layout: what a tensor looks like in memory, without the tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from recompute.keep import copied_feed, lead_in, span


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor lies in memory; stands for it where its data and its storage must not be kept."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    skip: int
    """Elements between an aligned address and its first; see recompute.keep."""

    @classmethod
    def of_tensor(cls, tensor: Tensor) -> Self:
        """The layout of one tensor."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, lead_in(tensor))

    @classmethod
    def of(cls, value: Any) -> Any:
        """A value with its tensors replaced by their layouts."""
        return tree_map_only(Tensor, cls.of_tensor, value)

    def make(self) -> Tensor:
        """A tensor of this layout in a storage of its own."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def copied(self) -> Tensor:
        """A copy of a tensor of this layout, as a step makes it of what is fed."""
        size = self.skip + span(tuple(self.shape), self.stride)
        flat = torch.empty(size, dtype=self.dtype, device=self.device)
        return copied_feed(flat.as_strided(self.shape, self.stride, self.skip))


def fresh(layouts: Any) -> Any:
    """A value as `Layout.of` saw it, all its tensors new."""
    return tree_map_only(Layout, Layout.make, layouts)
