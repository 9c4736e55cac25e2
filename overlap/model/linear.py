"""Linear maps whose weight gradient can be put off (recompute.wgrad), with one arithmetic for now and later.

Legend: T rows, I and O inner and outer width, E experts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from overlap.model.custom import apply
from overlap.model.graph_only import GraphOnly, placeholder
from overlap.model.grouped import grouped_mm, grouped_mm_wgrad, grouped_mm_wgrad_add
from recompute.wgrad import Add, is_left_out, late_weight_gradient, weight_gradient


def linear(x: Tensor, weight: Tensor, *, graph_only: bool = False) -> Tensor:
    """Matrix product x weight^T.

    Args:
        x: [..., I].
        weight: [O, I]; inside autocast both are cast to its type, and gradients have the types of the arguments.
        graph_only: Leave the product out: the graph is the same, what is returned holds no numbers.

    Returns:
        [..., O].
    """
    return apply(_Linear, x, *graph_inputs(x, weight), graph_only)


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, *, covers: bool = True, graph_only: bool = False) -> Tensor:
    """Multiply each row with the matrix of its expert.

    Args:
        x: [T, I], sorted by expert; T may be 0.
        weight: [E, I, O]; an expert without rows gets a gradient of exact zeros.
        ends: [E] int32, where each expert's rows end; the last is T.
        covers: False: the last may be less; the rows behind it belong to no expert.
        graph_only: As for linear().

    Returns:
        [T, O]; zeros in the rows of no expert.
    """
    return apply(_GroupedLinear, x, *graph_inputs(x, weight), ends, covers, graph_only)


class Linear(GraphOnly):
    """linear() with its weight, left uninitialised for model.init_weights. No bias."""

    fresh = True

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outer, inner))

    def forward(self, x: Tensor, *, graph_only: bool = False) -> Tensor:
        """[..., inner] -> [..., outer]."""
        return linear(x, self.weight, graph_only=self.leaves_out(graph_only))


class LinearPair(nn.Module):
    """Two products of one input; a backend may put what prepares the input once in its place.

    It holds neither: parameters stay where they are.
    """

    def forward(self, first: nn.Module, second: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """[..., I] -> [..., O] of each, in this order."""
        return first(x), second(x)


class LateWeight:
    """A weight outside the graph: Function.apply does not look inside."""

    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, late: LateWeight | None, anchor: Tensor | None, graph_only: bool
    ) -> Tensor:
        x = autocast_like(x)
        _save(ctx, x, weight, late)
        return placeholder(x, *x.shape[:-1], weight.shape[0]) if graph_only else F.linear(x, autocast_like(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        grad_x = grad.matmul(weight.to(grad.dtype)) if ctx.needs_input_grad[0] else None
        return grad_x, gradient_of_weight(ctx, _linear_wgrad, x, grad), None, None, None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        late: LateWeight | None,
        anchor: Tensor | None,
        ends: Tensor,
        covers: bool,
        graph_only: bool,
    ) -> Tensor:
        x = autocast_like(x)
        _save(ctx, x, weight, late, ends)
        ctx.covers = covers
        if graph_only:
            return placeholder(x, x.shape[0], weight.shape[2])
        product: Tensor = grouped_mm(x, autocast_like(weight), ends, covers)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        x, weight, ends = ctx.saved_tensors
        transposed = weight.to(grad.dtype).transpose(1, 2)
        grad_x = grouped_mm(grad, transposed, ends, ctx.covers) if ctx.needs_input_grad[0] else None
        compute = partial(_grouped_wgrad, covers=ctx.covers)
        add = partial(grouped_mm_wgrad_add, covers=ctx.covers)
        return grad_x, gradient_of_weight(ctx, compute, x, grad, ends, add=add), None, None, None, None, None


def graph_inputs(x: Tensor, weight: Tensor) -> tuple[Tensor, LateWeight | None, Tensor | None]:
    """The weight as the graph sees it; where it is left out, itself, and what ties the product to the graph."""
    if not is_left_out(weight):
        return weight, None, None
    anchor = None if x.requires_grad else torch.empty(0, device=x.device, requires_grad=True)
    return weight.detach(), LateWeight(weight), anchor


def autocast_like(x: Tensor) -> Tensor:
    """What autocast does to the arguments of a matrix product; nothing outside it."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device))


def _save(ctx: Any, x: Tensor, weight: Tensor, late: LateWeight | None, *rest: Tensor) -> None:
    # the input is kept only for a weight that trains: frozen weights under adapters hold no activation
    ctx.save_for_backward(x if ctx.needs_input_grad[1] or late is not None else None, weight, *rest)
    keep_weight(ctx, weight, late)


def keep_weight(ctx: Any, weight: Tensor, late: LateWeight | None) -> None:
    """Keep the weight itself: saved-tensor hooks may hand back a copy, and a put-off gradient must find it."""
    ctx.weight = weight if late is None else late.weight
    ctx.late = late is not None


def gradient_of_weight(ctx: Any, compute: Any, *tensors: Tensor, add: Add | None = None) -> Tensor | None:
    """The weight's gradient, its Function's second argument's: now, or None and put off.

    Args:
        ctx: Of the Function, with `weight` and `late` as keep_weight() set them.
        compute: compute(*tensors, dtype=) gives the gradient.
        tensors: Kept while it is put off.
        add: add(into, *tensors) adds it piece by piece.
    """
    if not ctx.needs_input_grad[1] and not ctx.late:
        return None
    compute = partial(compute, dtype=ctx.weight.dtype)
    if ctx.late:
        late_weight_gradient(ctx.weight, compute, *tensors, add=add)
        return None
    # a weight computed inside the stage (a base weight plus its adapter) has its own backward waiting for it
    return weight_gradient(ctx.weight, compute, *tensors, add=add) if ctx.weight.is_leaf else compute(*tensors)


def _linear_wgrad(x: Tensor, grad: Tensor, *, dtype: torch.dtype) -> Tensor:
    return grad.flatten(0, -2).t().mm(x.flatten(0, -2)).to(dtype)


def _grouped_wgrad(x: Tensor, grad: Tensor, ends: Tensor, *, covers: bool, dtype: torch.dtype) -> Tensor:
    gradient: Tensor = grouped_mm_wgrad(x, grad, ends, covers)
    return gradient.to(dtype)
