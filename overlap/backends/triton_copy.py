"""A copy kernel on few multiprocessors, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 16384


@triton.jit  # type: ignore[untyped-decorator]  # no stubs
def _copy_kernel(source, target, length, rounds, stride: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program copies every `stride`-th block of bytes, `rounds` times over."""
    for _ in range(rounds):
        for start in range(tl.program_id(0) * block, length, stride * block):
            offsets = start + tl.arange(0, block)
            inside = offsets < length
            tl.store(target + offsets, tl.load(source + offsets, mask=inside), mask=inside)


def copy_bytes(source: Tensor, target: Tensor, programs: int, rounds: int) -> None:
    """Copy `source` to `target`, both flat uint8, with `programs` thread blocks, `rounds` times."""
    _copy_kernel[(programs,)](source, target, source.numel(), rounds, programs, _BLOCK)
