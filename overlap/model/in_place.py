"""ChangesInPlace: modules that write to buffers of their own in forward (running statistics, scales, histories)."""

from __future__ import annotations

from torch import Tensor, nn


class ChangesInPlace(nn.Module):
    """The stages that use such a module declare its buffers: a replay then sees what the first pass saw (R5)."""

    @property
    def state(self) -> tuple[Tensor, ...]:
        """The buffers that forward changes, in a fixed order."""
        raise NotImplementedError
