"""HostLoopback: one rank owns every expert, but rows make a round trip through pinned host memory.

A stand-in for a network card on a machine with one GPU: the copy engines move the bytes (about 55 GB/s each way on
an H200's link, what one 400 Gb/s card gives), no multiprocessor is used, and results are the arguments bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overlap.dispatch.round_trip import RoundTrip
from recompute.checks import check_positive


class HostLoopback(RoundTrip):
    """A transport that takes time.

    The pinned buffer serves one trip after another: trips are ordered on the communication lane.

    Args:
        scale: Share of the rows' bytes that make the trip; above 1 they make it more than once.

    Raises:
        ConfigError: `scale` is no finite number above 0.
    """

    def __init__(self, scale: float = 1.0) -> None:
        check_positive("loopback_scale", scale)
        self.scale = scale
        self._host = torch.empty(0, dtype=torch.uint8)

    def round_trip(self, rows: Tensor) -> Tensor:
        """A copy of `rows` that came back from the host."""
        rows = rows.contiguous()
        source = rows.flatten().view(torch.uint8)
        result = torch.empty_like(rows)
        target = result.flatten().view(torch.uint8)
        moved = int(source.numel() * min(self.scale, 1.0))
        host = self._pinned(source.numel(), rows.device)[:moved]
        left = self.scale * source.numel()
        while left > 0 and moved:
            host.copy_(source[:moved], non_blocking=True)
            target[:moved].copy_(host, non_blocking=True)
            left -= moved
            moved = min(moved, int(left))
            host = host[:moved]
        first = int(source.numel() * min(self.scale, 1.0))
        if first < source.numel():
            target[first:].copy_(source[first:])
        return result

    def _pinned(self, nbytes: int, device: torch.device) -> Tensor:
        if self._host.numel() < nbytes:
            self._host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
        return self._host
