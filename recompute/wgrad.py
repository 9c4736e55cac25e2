"""Weight gradients that can be put off: a custom backward asks here whether to compute its weight gradient now.

Owns the collector that is active while one stage's backward runs. Who drains it, and when, is the scheduler's
decision (a W slot); a plain backward finds no collector and computes at once, with the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from recompute.errors import RecomputeError
from recompute.grad_nodes import node_is_held, run_node

Add = Callable[..., None]
"""add(into, *tensors) adds a weight's gradient to `into`, rounding as `into += compute(*tensors)` would."""


@dataclass(frozen=True, slots=True)
class PendingGradient:
    """One weight gradient still to be computed: `compute(*tensors)` for `weight`."""

    weight: Tensor
    compute: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]
    add: Add | None = None
    """Adds it piece by piece, where the whole would be too large beside the activations."""


class WeightGradients:
    """The weight gradients that one stage's backward put off, in the order it met them."""

    __slots__ = ("pending",)

    def __init__(self) -> None:
        self.pending: list[PendingGradient] = []

    def drain(self) -> list[tuple[Tensor, Tensor]]:
        """Compute all that is pending and forget it; see drain_each."""
        return list(self.drain_each())

    def drain_each(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Compute what is pending, weight by weight, and forget each when it is computed.

        One at a time: the gradient of a layer's experts can be larger than all its activations.

        Yields:
            (weight, gradient) pairs, a weight used twice summed in the order of use in backward, as autograd does.
            Weights whose gradient was added in place are not among them.
        """
        while self.pending:
            weight = self.pending[0].weight
            uses = [item for item in self.pending if item.weight is weight]
            self.pending = [item for item in self.pending if item.weight is not weight]
            if not _add_in_place(uses):
                yield weight, _sum_of(uses)


@torch.no_grad()
def _add_in_place(uses: list[PendingGradient]) -> bool:
    """Add the gradients of one weight to its `.grad` in order, if that may be done; whether it was."""
    weight = uses[0].weight
    if not all(use.add is not None for use in uses) or not _adds_in_place(weight):
        return False
    while uses:
        use = uses.pop(0)
        if use.add is not None and weight.grad is not None:
            use.add(weight.grad, *use.tensors)
    if weight not in _held:
        _held[weight] = node_is_held(weight)
    if _held[weight]:
        run_node(weight)
    return True


@torch.no_grad()
def _sum_of(uses: list[PendingGradient]) -> Tensor:
    """The gradients of one weight, added in order; each use is let go when it is computed."""
    total = uses[0].compute(*uses.pop(0).tensors)
    while uses:
        total = total + uses[0].compute(*uses.pop(0).tensors)
    return total


_collectors: list[WeightGradients] = []
_left_out = 0
"""How many `weights_left_out()` are open."""
_in_place = 0
"""How many `adding_in_place()` are open."""
_held: dict[Tensor, bool] = {}
"""Whose AccumulateGrad nodes somebody holds, looked up once per weight while `adding_in_place()` is open."""


@contextmanager
def adding_in_place() -> Iterator[None]:
    """Let the backward run inside add large weight gradients to `.grad` piece by piece.

    For whoever knows that backward accumulates into `.grad`; `torch.autograd.grad` would find no gradient. A weight
    with hooks, or without a `.grad`, gets its gradient whole, from autograd. Hooks of its AccumulateGrad node are
    called when all is added; those registered after the block's first use of the weight, from the next block on.
    """
    global _in_place
    _in_place += 1
    try:
        yield
    finally:
        _in_place -= 1
        if not _in_place:
            _held.clear()


def _adds_in_place(weight: Tensor) -> bool:
    hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks
    return _in_place > 0 and weight.is_leaf and weight.grad is not None and not hooks


@contextmanager
def weights_left_out() -> Iterator[None]:
    """Run a forward whose weight gradients will be put off: its weights stay outside the graph.

    An edge to a weight would call the weight's hooks when backward passes it, before its gradient is there.
    """
    global _left_out
    _left_out += 1
    try:
        yield
    finally:
        _left_out -= 1


def is_left_out(weight: Tensor) -> bool:
    """Whether a forward should leave this weight out of its graph. A weight computed in the stage stays in it."""
    return _left_out > 0 and torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf


def puts_off(weight: Tensor) -> bool:
    """Whether weight_gradient() would put this weight's gradient off, in the backward that runs."""
    return bool(_collectors) and weight.is_leaf and weight.requires_grad


def late_weight_gradient(
    weight: Tensor, compute: Callable[..., Tensor], *tensors: Tensor, add: Add | None = None
) -> None:
    """Put off the gradient of a weight that was left out of the graph; arguments as for weight_gradient().

    Raises:
        RecomputeError: Nobody collects: the gradient would be lost.
    """
    if not _collectors:
        raise RecomputeError("a weight gradient was to be put off, but the backward that ran collects none")
    _put_off(weight, compute, tensors, add)


def _put_off(weight: Tensor, compute: Callable[..., Tensor], tensors: tuple[Tensor, ...], add: Add | None) -> None:
    # without their graph: a saved input's would keep the stage's own inputs alive until the W slot; a quantised tensor
    # comes as its parts, of which some are None
    detached = tuple(tensor.detach() if torch.is_tensor(tensor) else tensor for tensor in tensors)
    _collectors[-1].pending.append(PendingGradient(_original(weight), compute, detached, add))


def _original(weight: Tensor) -> Tensor:
    """The weight itself: what a backward takes out of saved tensors, where hooks are set, is another object.

    Its gradient, its hooks and whoever looks for the weight know the original only.
    """
    if isinstance(weight, nn.Parameter) or not (weight.is_leaf and weight.requires_grad):
        return weight
    original: Tensor = get_gradient_edge(weight).node.variable  # type: ignore[attr-defined]  # a leaf's node has it
    return original


@contextmanager
def collect_weight_gradients(into: WeightGradients) -> Iterator[None]:
    """Put off the weight gradients of the backward run inside, into `into`."""
    _collectors.append(into)
    try:
        yield
    finally:
        _collectors.pop()


def weight_gradient(
    weight: Tensor, compute: Callable[..., Tensor], *tensors: Tensor, add: Add | None = None
) -> Tensor | None:
    """Weight gradient for a custom backward to return: computed now, or put off (or added in place) and None.

    Only a leaf's gradient can be put off: that of a weight computed in the stage flows on in this very backward. A
    frozen weight gets none.

    Args:
        weight: The weight, as the forward received it.
        compute: Function of `tensors` giving the gradient, of the weight's shape and dtype.
        tensors: What `compute` needs (input and output gradient); kept until the W slot.
        add: Adds the gradient to a tensor piece by piece; used where adding_in_place() allows it.
    """
    if not weight.requires_grad:
        return None
    weight = _original(weight)
    if puts_off(weight):
        _put_off(weight, compute, tensors, add)
        return None
    if add is not None and weight.grad is not None and _adds_in_place(weight):
        add(weight.grad, *tensors)
        return None
    return compute(*tensors)
