"""Attention kernels at the proxies' shape: forward and backward of each backend that takes it.

`python -m benchmarks.memory.attention` prints milliseconds, and whether two backward passes give the same bits.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.memory.cases import PROXIES, SEQ
from benchmarks.memory.measure import DEVICE, timed

BACKENDS = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
CHOICES = {"torch's own choice": BACKENDS, **{backend.name: (backend,) for backend in BACKENDS}}


def main() -> int:
    """Time every backend; one that refuses says why."""
    config = PROXIES["proxy-8"]
    wide = config.nope_dim + config.rope_dim
    for padded in (False, True):
        value_width = wide if padded else config.value_dim
        shapes = [(1, config.heads, SEQ, width) for width in (wide, wide, value_width)]
        leaves = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        for name, backends in CHOICES.items():
            try:
                print(f"{name:22s} values {value_width} wide: {_measure(backends, leaves)}", flush=True)
            except RuntimeError as error:
                print(f"{name:22s} values {value_width} wide: refuses ({str(error).splitlines()[0]})")
    return 0


def _measure(backends: Sequence[SDPBackend], leaves: list[Tensor]) -> str:
    grad = torch.ones_like(leaves[2])

    def forward() -> Tensor:
        with sdpa_kernel(list(backends)):
            return F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=True)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), leaves, grad)

    first, second = backward(), backward()
    same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    ahead = median(timed(forward) for _ in range(9))
    both = median(timed(backward) for _ in range(9))
    return f"forward {ahead:.2f} ms, backward {both - ahead:.2f} ms, reproduces itself: {same}"


if __name__ == "__main__":
    sys.exit(main())
