"""Products by Transformer Engine's modules (backend te-modules): one matrix, one behind its norm, or a group of them.

Transformer Engine's modules hold no weight here (theirs are on the meta device): every call sees the weight through
stand-ins, and hands its weight gradient to a store of its own (recompute.wgrad_store). There is no queue of a module to
drain in order, and shared weights are values as everywhere.

NOTE [ Weights in 8 bits are not kept ]
A graph would hold its own copy of every quantised weight, in two layouts: as many bytes as the weight itself, per layer
and microbatch in flight. Transformer Engine knows weights that are gathered anew for backward (its contract for
distributed weights); the stand-ins answer to it, and backward quantises again what is in the parameter. The weight has
not changed, scales are constant within a step, so the numbers are the same.
Legend: E experts, I and O inner and outer width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from overlap.backends.te_casts import flat
from overlap.backends.te_scaling import DelayedState, keep_out_of_process_lists
from recompute.wgrad_store import NO_STORE, Job, stand_ins

_PIECE_BYTES = 64 * 2**20
"""Largest piece of a weight gradient that is added in pieces."""


class Product:
    """x weight^T by te.Linear.

    Args:
        weight: [O, I]; tells shape, type and device.
        recipe: Transformer Engine's recipe, or None.
        states: What make_state() gave for it.
    """

    def __init__(self, weight: Tensor, recipe: Any, states: nn.ModuleList) -> None:
        outer, inner = weight.shape
        self._module: Any = te.Linear(inner, outer, bias=False, params_dtype=weight.dtype, device="meta")
        self._shape = weight.shape
        _prepare(self._module, recipe, states, 1)
        self._placeholder = self._module.weight

    def __call__(self, weight: Tensor, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        module = self._module
        (seen,), store = stand_ins(weight, partial(_linear_job, weight.dtype))
        if store is not NO_STORE and FP8GlobalStateManager.is_fp8_enabled():
            # Quantised again by the module itself.
            _rebuild_for_backward((seen,), weight.detach(), _as_it_is, weight.detach())
        module._parameters["weight"] = seen
        module.__dict__["wgrad_store"] = store
        try:
            result: Tensor = module(x)
        finally:
            # Nothing of the call stays in the module: it would keep a graph alive.
            module._parameters["weight"] = self._placeholder
            module.__dict__["wgrad_store"] = NO_STORE
        return result


class NormProduct:
    """rmsnorm(x) weight^T by te.LayerNormLinear. The norm's weight is seen as it is: its gradient is autograd's.

    Args:
        weight: [O, I]; tells shape, type and device.
        eps: Added to the mean square.
        recipe: Transformer Engine's recipe, or None.
        states: What make_state() gave for it.
    """

    def __init__(self, weight: Tensor, eps: float, recipe: Any, states: nn.ModuleList) -> None:
        outer, inner = weight.shape
        self._module: Any = te.LayerNormLinear(
            inner, outer, eps=eps, bias=False, normalization="RMSNorm", params_dtype=weight.dtype, device="meta"
        )
        _prepare(self._module, recipe, states, 1)
        self._placeholders = dict(self._module._parameters)

    def __call__(self, weight: Tensor, norm_weight: Tensor, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]; the norm's weight is [I]."""
        module = self._module
        (seen,), store = stand_ins(weight, partial(_linear_job, weight.dtype))
        if store is not NO_STORE and FP8GlobalStateManager.is_fp8_enabled():
            # This module would take what it is given for quantised; told of nothing, it quantises what it saved.
            _rebuild_for_backward((seen,), weight.detach(), _nothing, weight.detach())
        module._parameters.update(weight=seen, layer_norm_weight=norm_weight)
        module.__dict__["wgrad_store"] = store
        try:
            result: Tensor = module(x)
        finally:
            module._parameters.update(self._placeholders)
            module.__dict__["wgrad_store"] = NO_STORE
        return result


class GroupedProduct:
    """One product per expert over rows sorted by expert, by te.GroupedLinear.

    Args:
        weight: [E, O, I]; tells shape, type and device.
        recipe: Transformer Engine's recipe, or None.
        states: What make_state() gave for it.
    """

    def __init__(self, weight: Tensor, recipe: Any, states: nn.ModuleList) -> None:
        experts, outer, inner = weight.shape
        self._module: Any = te.GroupedLinear(
            experts, inner, outer, bias=False, params_dtype=weight.dtype, device="meta",
            fuse_wgrad_accumulation=True, use_grouped_tensor=False,
        )  # fmt: skip
        self._names = [f"weight{expert}" for expert in range(experts)]
        empty = weight.new_empty(0)
        for expert in range(experts):
            setattr(self._module, f"bias{expert}", empty)
        _prepare(self._module, recipe, states, experts)
        self._placeholders = [self._module._parameters[name] for name in self._names]
        # With fused accumulation the module allocates no gradients; it wants to see where they would go.
        self._nowhere = weight.new_empty(0)

    def __call__(self, weight: Tensor, x: Tensor, splits: Sequence[int]) -> Tensor:
        """[P, I] -> [P, O], `splits` [E] rows per expert on the host."""
        module = self._module
        seen, store = stand_ins(weight, partial(_grouped_job, weight), split=True)
        for name, matrix in zip(self._names, seen, strict=True):
            matrix.main_grad = self._nowhere  # type: ignore[attr-defined]  # Transformer Engine's
            module._parameters[name] = matrix
        if store is not NO_STORE and FP8GlobalStateManager.is_fp8_enabled():
            _rebuild_for_backward(seen, weight.detach(), partial(_quantised, module), self._nowhere)
        module.__dict__["wgrad_store"] = store
        try:
            result: Tensor = module(x, list(splits))
        finally:
            module._parameters.update(zip(self._names, self._placeholders, strict=True))
            module.__dict__["wgrad_store"] = NO_STORE
        return result


def _prepare(module: Any, recipe: Any, states: nn.ModuleList, products: int) -> None:
    module.__dict__["wgrad_store"] = NO_STORE
    keep_out_of_process_lists(module)
    for state in states:
        if isinstance(state, DelayedState):
            state.bind(module, recipe, products)


def _rebuild_for_backward(
    seen: Sequence[Tensor], weight: Tensor, rebuild: Callable[[list[Tensor]], list[Any]], nowhere: Tensor
) -> None:
    """Have the module drop what it made of a weight after its forward, and ask for it again in backward.

    The functions hold the weight, not the stand-ins: those would hold themselves.
    """
    leader: Any = seen[0]
    split = weight.ndim > leader.ndim

    def matrices() -> list[Tensor]:
        return list(weight.unbind(0)) if split else [weight]

    leader.is_distributed_weight = True
    leader.materialize_group_for_forward = lambda: [matrix.detach().requires_grad_() for matrix in matrices()]
    leader.materialize_group_for_backward = lambda: rebuild(matrices())
    leader.finalize_group_grads = _no_gradients
    for matrix in seen:
        matrix.grad_buffer = partial(_itself, nowhere)  # type: ignore[attr-defined]  # Transformer Engine's


def _as_it_is(matrices: list[Tensor]) -> list[Any]:
    return matrices


def _nothing(matrices: list[Tensor]) -> list[Any]:
    return [None] * len(matrices)


def _quantised(module: Any, matrices: list[Tensor]) -> list[Any]:
    """Weights of a grouped product as its input gradient needs them: by columns only."""
    first, stride = module._offsets["weight"], module._num_fp8_tensors_per_gemm["fwd"]
    quantisers = module.quantizers["scaling_fwd"][first::stride]
    results: list[Any] = []
    for matrix, quantiser in zip(matrices, quantisers, strict=True):
        quantiser.internal = True
        # Kernels make columns beside rows; the rows of one matrix are let go before the next.
        quantiser.set_usage(rowwise=True, columnwise=True)
        result = quantiser(matrix)
        result.update_usage(rowwise_usage=False, columnwise_usage=True)
        results.append(result)
    return results


def _no_gradients(gradients: Any) -> Any:
    """The store has them."""
    return [None] * len(gradients) if type(gradients) is list else None


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _linear_job(dtype: torch.dtype, objects: Sequence[Any], function: Callable[..., Any]) -> Job:
    """A module of one matrix puts [input, output gradient] and a function of both that returns (gradient, None)."""
    tensors, restore = flat(objects)

    def compute(*plain: Tensor | None) -> Tensor:
        gradient: Tensor = function(*restore(*plain))[0]
        return gradient.to(dtype)

    return Job(compute, tensors)


def _grouped_job(weight: Tensor, objects: Sequence[Any], function: Callable[..., Any]) -> Job:
    """te.GroupedLinear puts [inputs, output gradients, outputs], one each per expert, and a function that fills those.

    The outputs are its weights' `main_grad`: others are put in their place.
    """
    inputs, gradients, _ = objects
    experts, dtype = len(inputs), weight.dtype
    splits: list[int] = function.keywords["m_splits"]  # type: ignore[attr-defined]  # it is a partial
    compute_dtype: torch.dtype = function.keywords["out_dtype"]  # type: ignore[attr-defined]
    tensors, restore = flat([*inputs, *gradients])
    step = max(_PIECE_BYTES // (weight[0].numel() * weight.element_size()), 1)

    def fill(out: Tensor, whole: list[Any], first: int) -> Tensor:
        chosen = slice(first, first + len(out))
        matrices = list(out.unbind(0))
        for matrix, rows in zip(matrices, splits[chosen], strict=True):
            if rows == 0:
                matrix.zero_()
        xs, grads = whole[:experts][chosen], whole[experts:][chosen]
        function(xs, grads, matrices, accumulate=False, m_splits=splits[chosen])
        return out

    def compute(*plain: Tensor | None) -> Tensor:
        out = torch.empty(weight.shape, dtype=compute_dtype, device=weight.device)
        return fill(out, restore(*plain), 0).to(dtype)

    def add(into: Tensor, *plain: Tensor | None) -> None:
        whole = restore(*plain)
        for first in range(0, experts, step):
            part = into[first : first + step]
            out = torch.empty(part.shape, dtype=compute_dtype, device=weight.device)
            part += fill(out, whole, first).to(dtype)

    return Job(compute, tensors, add)
