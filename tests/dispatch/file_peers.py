"""Peers on a CPU: buffers are files that every rank maps, the barrier is the process group's."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor


class FilePeers:
    """What MappedPeers is on GPUs; collective.

    Args:
        group: The ranks.
        nbytes: Of each buffer.
    """

    def __init__(self, group: dist.ProcessGroup, nbytes: int) -> None:
        self._group = group
        self._rank = group.rank()
        with tempfile.TemporaryDirectory() as own:
            names: list[str] = [""] * group.size()
            dist.all_gather_object(names, own, group=group)
            path = Path(own, "buffer")
            # what nobody has written must not look right
            path.write_bytes(b"\xff" * nbytes)
            dist.barrier(group)
            self._buffers = [
                torch.from_file(str(Path(name, "buffer")), shared=True, size=nbytes, dtype=torch.uint8)
                for name in names
            ]
            dist.barrier(group)

    def put(self, rank: int, at: int, source: Tensor) -> None:
        self._buffers[rank][at : at + source.numel()].copy_(source)

    def take(self, at: int, target: Tensor) -> None:
        target.copy_(self._buffers[self._rank][at : at + target.numel()])

    def barrier(self) -> None:
        dist.barrier(self._group)

    def settle(self) -> None:
        pass
