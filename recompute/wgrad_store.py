"""Weight gradients of an external module, one that has a queue of its own for those that are put off.

Such a module (Transformer Engine's) drains its queue first in, first out and writes `.grad` itself, over what was
there. With several microbatches in flight, or a weight with hooks, that is not what a W slot means. So each call gets
a store of its own in the queue's place, and sees its weight through stand-ins: what it puts into the store is computed
or put off like any other weight gradient here, and reaches the weight through autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recompute.errors import RecomputeError
from recompute.wgrad import Add, is_left_out, late_weight_gradient, weight_gradient


class Job(NamedTuple):
    """A weight gradient as the module asked for it, in plain tensors."""

    compute: Callable[..., Tensor]
    """compute(*tensors) gives the gradient, of the weight's shape and dtype."""
    tensors: tuple[Tensor | None, ...]
    add: Add | None = None
    """See recompute.wgrad."""


Pack = Callable[[Sequence[Any], Callable[..., Any]], Job]
"""pack(objects, function) makes a job of what a module puts into its queue."""


class GradientStore:
    """What an external module finds in the place of its queue, for one call.

    Args:
        weight: The weight, or a value that stands for a shared one.
        pack: Makes jobs.
    """

    __slots__ = ("_computed", "_late", "_pack", "_weight")

    def __init__(self, weight: Tensor, pack: Pack) -> None:
        self._weight = weight
        self._pack = pack
        self._late = is_left_out(weight)
        self._computed: list[Tensor] = []

    def delay_wgrad_compute(self) -> bool:
        """The module always hands its weight gradients over."""
        return True

    def put(self, objects: Sequence[Any], function: Callable[..., Any]) -> None:
        """Compute a weight gradient, or put it off where the stage's backward collects them."""
        job = self._pack(objects, function)
        tensors: tuple[Any, ...] = job.tensors
        if self._late:
            late_weight_gradient(self._weight, job.compute, *tensors, add=job.add)
            return
        if self._weight.is_leaf:
            gradient = weight_gradient(self._weight, job.compute, *tensors, add=job.add)
        else:
            gradient = job.compute(*tensors)
        if gradient is not None:
            self._computed.append(gradient)

    def take(self) -> Tensor | None:
        """The gradient computed meanwhile, if any; forgets it."""
        gradient = self._computed.pop() if self._computed else None
        if self._computed:
            raise RecomputeError("a module put more than one gradient of one weight into the store of one call")
        return gradient


class NoStore:
    """In the queue's place where no weight gradient is wanted."""

    def delay_wgrad_compute(self) -> bool:
        """Nothing is put off."""
        return False


NO_STORE = NoStore()


def stand_ins(weight: Tensor, pack: Pack, *, split: bool = False) -> tuple[tuple[Tensor, ...], GradientStore | NoStore]:
    """What an external module is called with in place of `weight`, and the store for this call.

    Args:
        weight: The weight; [E, ...] with `split`.
        pack: Makes jobs of what the module puts into the store.
        split: One stand-in per entry of the first dimension, instead of a single one.

    Returns:
        Tensors with the weight's memory. They need a gradient where the weight does, and the module must not give
        them any itself: the store does, or the W slot where weights are left out of the graph.
    """
    if not torch.is_grad_enabled() or not weight.requires_grad:
        plain = weight.detach()
        return (plain.unbind(0) if split else (plain,)), NO_STORE
    store = GradientStore(weight, pack)
    late = is_left_out(weight)
    # A leaf that needs a gradient keeps the stand-ins in the graph where the weight is left out.
    anchor = torch.empty(0, device=weight.device, requires_grad=True) if late else None
    seen = weight.detach() if late else weight
    result = _StandIns.apply(seen, anchor, store, split)  # type: ignore[no-untyped-call]  # torch's
    return (result if split else (result,)), store


class _StandIns(torch.autograd.Function):
    """Aliases of a weight whose gradient comes from the store: this node's backward runs after the module's."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, anchor: Tensor | None, store: GradientStore, split: bool) -> Any:
        ctx.store = store
        ctx.set_materialize_grads(False)
        return weight.unbind(0) if split else weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        if any(gradient is not None for gradient in gradients):
            raise RecomputeError("a module computed a weight gradient past its store")
        return ctx.store.take(), None, None, None
