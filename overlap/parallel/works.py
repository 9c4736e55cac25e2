"""Works: collectives under way. Whoever launches one hands it over here, and it is waited for at the right moment.

On a device a launched collective is queued, and waiting orders the current stream behind it without holding the host
(by NCCL; gloo holds it on device tensors too): so it is done at once, on the stream of the communication lane. On a
CPU waiting holds the host, so under WorkLanes it is put off to the first slot that needs the result. Everywhere else
(the reference, the check of the stages) a collective is waited for where it is launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor


class Launched(NamedTuple):
    """A collective and the tensors that it reads and writes, which must live until it is done."""

    work: dist.Work
    tensors: Sequence[Tensor]


class Works:
    """Takes launched collectives: waits for them, or collects them while someone asks for that."""

    def __init__(self) -> None:
        self._collecting = False
        self._launched: list[Launched] = []

    def add(self, work: dist.Work, tensors: Sequence[Tensor]) -> None:
        """Take a launched collective."""
        if self._collecting:
            self._launched.append(Launched(work, tensors))
        else:
            work.wait()

    def start(self) -> None:
        """Collect from now on."""
        self._collecting = True

    def stop(self) -> list[Launched]:
        """Collect no more; what was collected."""
        launched, self._launched, self._collecting = self._launched, [], False
        return launched
