"""Grouped matrix products: one matrix per expert, over rows sorted by expert.

Custom operators, because the sizes of the groups are data while the sizes of the results are not: fake tensors pass
through and only the kernel itself looks at where they end.
Legend: N rows, E experts, I and O inner and outer width.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from overlap.model.fused import fused, kernels

_ALIGNMENT = 16
"""Bytes that row strides must be a multiple of in the device kernel."""


def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor, covers: bool) -> Tensor:
    """Multiply each row with the matrix of its expert.

    Args:
        x: [N, I], sorted by expert.
        weight: [E, I, O], of x's type; any strides.
        ends: [E] int32, where each expert's rows end: the sums of the rows per expert, as the device kernel takes them.
        covers: Whether the last one is N; if not, the rows behind it belong to no expert.

    Returns:
        [N, O]; zeros in the rows of no expert.

    Raises:
        ValueError: The ends fall, do not reach N, or exceed it (checked where the host has to read them).
    """
    work = _grouped_mm if _direct(x) else _grouped_mm_op
    product: Tensor = work(x, weight, ends, covers)
    return product


def _grouped_mm(x: Tensor, weight: Tensor, ends: Tensor, covers: bool) -> Tensor:
    if _device_kernel(x, weight.shape[1], weight.shape[2]):
        out = F.grouped_mm(x, weight, offs=ends)
        if covers:
            return out
        rows = torch.arange(x.shape[0], device=x.device).unsqueeze(-1)
        return out.masked_fill_(rows >= ends[-1], 0)
    out = x.new_empty(x.shape[0], weight.shape[2])
    spans = _spans(ends, x.shape[0], covers)
    for expert, (start, end) in enumerate(spans):
        torch.mm(x[start:end], weight[expert], out=out[start:end])
    out[spans[-1][1] :] = 0
    return out


def grouped_mm_wgrad(x: Tensor, grad: Tensor, ends: Tensor, covers: bool) -> Tensor:
    """Gradient of grouped_mm's weight: x^T grad over the rows of each expert, exact zeros where it has none.

    One kernel of our own makes it for bfloat16 on a CUDA device with Triton, and needs no sizes on the host. Elsewhere
    it is made expert by expert, which reads them there: CUDA without Triton too.

    Args:
        x: [N, I], sorted by expert.
        grad: [N, O].
        ends: [E] int32, as for grouped_mm.
        covers: As for grouped_mm.

    Returns:
        [E, I, O].

    Raises:
        ValueError: As for grouped_mm.
    """
    work = _grouped_mm_wgrad if _direct(x) else _grouped_mm_wgrad_op
    gradient: Tensor = work(x, grad, ends, covers)
    return gradient


def _grouped_mm_wgrad(x: Tensor, grad: Tensor, ends: Tensor, covers: bool) -> Tensor:
    out = x.new_empty(ends.shape[0], x.shape[1], grad.shape[1])
    if _own_wgrad(x):
        kernels("triton_grouped").write(out, x, grad, ends)
        return out
    for expert, (start, end) in enumerate(_spans(ends, x.shape[0], covers)):
        torch.mm(x[start:end].t(), grad[start:end], out=out[expert])
    return out


def grouped_mm_wgrad_add(into: Tensor, x: Tensor, grad: Tensor, ends: Tensor, covers: bool) -> None:
    """Add the gradient of grouped_mm's weight to `into`, never whole: it can exceed a layer's activations.

    The bits are those of `into += grouped_mm_wgrad(...)`, and so is the way: our kernel adds tile by tile and allocates
    nothing; where it does not apply one expert is made and added at a time.

    Args:
        into: [E, I, O], of x's type or wider.
        x: [N, I], sorted by expert.
        grad: [N, O].
        ends: [E] int32, as for grouped_mm.
        covers: As for grouped_mm.

    Raises:
        ValueError: As for grouped_mm.
    """
    work = _grouped_mm_wgrad_add if _direct(x) else _grouped_mm_wgrad_add_op
    work(into, x, grad, ends, covers)


def _grouped_mm_wgrad_add(into: Tensor, x: Tensor, grad: Tensor, ends: Tensor, covers: bool) -> None:
    if not _own_wgrad(x):
        for expert, (start, end) in enumerate(_spans(ends, x.shape[0], covers)):
            into[expert] += torch.mm(x[start:end].t(), grad[start:end])
    elif fused(into):
        kernels("triton_grouped").add(into, x, grad, ends)
    else:
        into += _grouped_mm_wgrad(x, grad, ends, covers)


def one_expert_bytes(into: Tensor, x: Tensor) -> int:
    """Bytes of an expert's matrix in x's type: what grouped_mm_wgrad_add allocates where our kernel does not apply."""
    return into[0].numel() * x.element_size()


_grouped_mm_op = torch.library.custom_op("overlap::grouped_mm", _grouped_mm, mutates_args=())
_grouped_mm_wgrad_op = torch.library.custom_op("overlap::grouped_mm_wgrad", _grouped_mm_wgrad, mutates_args=())
_grouped_mm_wgrad_add_op = torch.library.custom_op(
    "overlap::grouped_mm_wgrad_add", _grouped_mm_wgrad_add, mutates_args=("into",)
)


@_grouped_mm_op.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor, covers: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@_grouped_mm_wgrad_op.register_fake
def _(x: Tensor, grad: Tensor, ends: Tensor, covers: bool) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], grad.shape[1])


@_grouped_mm_wgrad_add_op.register_fake
def _(into: Tensor, x: Tensor, grad: Tensor, ends: Tensor, covers: bool) -> None:
    return None


def _direct(x: Tensor) -> bool:
    """Whether to pass the dispatcher by: a custom operator's Python part takes as long as ten launches."""
    return x.is_cuda and type(x) is Tensor


def _own_wgrad(x: Tensor) -> bool:
    """Whether weight gradients come from our own kernel: whole or added, so that both have the same bits."""
    return x.dtype == torch.bfloat16 and fused(x)


def _device_kernel(x: Tensor, *widths: int) -> bool:
    """Whether one kernel does all experts without the host knowing the counts."""
    aligned = all(width * x.element_size() % _ALIGNMENT == 0 for width in widths)
    return x.is_cuda and x.dtype == torch.bfloat16 and aligned and x.shape[0] > 0


def _spans(ends: Tensor, rows: int, covers: bool) -> list[tuple[int, int]]:
    spans = list(pairwise([0, *ends.tolist()]))
    last = spans[-1][1]
    if last > rows or (covers and last != rows) or any(start > end for start, end in spans):
        raise ValueError(f"grouped product: rows of experts end at {ends.tolist()}, for {rows} rows")
    return spans
