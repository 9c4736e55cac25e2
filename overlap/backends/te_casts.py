"""Casts of a product's operands to 8 bits, and products of what they give, by Transformer Engine's kernels.

Its modules take 0.7 to 1.4 ms of host time for forward and backward of one product, several times what the kernels'
launches take, and keep two layouts of a quantised weight. Called directly, an operand is cast where it is used, in the
layout that the product reads, and let go with it.
Legend: a quantised tensor has rows (as it is) and columns (transposed, with scales of their own).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from torch import Tensor, nn
from transformer_engine.pytorch.constants import TE_DType
from transformer_engine.pytorch.quantization import RecipeState

from overlap.backends.te_scaling import MODES, DelayedState

FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "TN", "NN", "NT"
"""Layouts of the three products: weight and input, weight and output gradient, input and output gradient."""
_WORKSPACE_BYTES = 8 * 2**20
_WORKSPACE_ALIGNMENT = 1024
_BIAS = TE_DType[torch.bfloat16]
"""The type of a bias that is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Casts:
    """Quantizers of a group of products, one each per matrix."""

    inputs: tuple[Any, ...]
    weights: tuple[Any, ...]
    gradients: tuple[Any, ...]
    from_rows: bool
    """Inputs and gradients get columns only beside rows: scales per tensor."""
    accurate_forward: bool
    """Whether forward's products add up in steps, as backward's always do."""
    blocks: bool
    """Whether scales are of blocks: a weight's of 128 x 128, others' of 128 columns of a row, or rows of a column."""


def make_casts(recipe: Any, states: nn.ModuleList, products: int, device: torch.device) -> Casts:
    """Quantizers as Transformer Engine's modules would make them.

    Args:
        recipe: Its recipe.
        states: What te_scaling.make_state() gave: delayed scaling casts by these scales.
        products: Matrices.
        device: Where they are.
    """
    made: dict[str, list[Any]] = {}
    for mode, tensors in MODES:
        count = products * tensors
        delayed = [state for state in states if isinstance(state, DelayedState)]
        made[mode] = (
            delayed[0].quantizers(mode, recipe)
            if delayed
            else RecipeState.create(recipe, mode=mode, num_quantizers=count, device=device).make_quantizers()
        )
    (_, in_forward), (_, in_backward) = MODES
    # Input, weight and output, output gradient and input gradient; outputs are not cast.
    inputs, weights = (tuple(made["forward"][place::in_forward]) for place in (0, 1))
    gradients = tuple(made["backward"][::in_backward])
    for quantizer in (*inputs, *weights, *gradients):
        quantizer.internal = True
    return Casts(
        inputs=inputs,
        weights=weights,
        gradients=gradients,
        from_rows=recipe.delayed() or recipe.float8_current_scaling(),
        accurate_forward=recipe.float8_block_scaling(),
        blocks=recipe.float8_block_scaling(),
    )


def cast(x: Tensor, quantizer: Any, *, rows: bool, columns: bool, from_rows: bool) -> Any:
    """Quantise [N, I], contiguous; kernels that make columns beside rows only (`from_rows`) let rows go after."""
    quantizer.set_usage(rowwise=rows or from_rows, columnwise=columns)
    result = tex.quantize(x, quantizer)
    if from_rows and not rows:
        keep_columns([result])
    return result


def cast_split(
    x: Tensor,
    splits: Sequence[int],
    quantizers: Sequence[Any],
    *,
    rows: bool,
    columns: bool,
    from_rows: bool,
    together: bool = True,
) -> list[Any]:
    """cast() of the parts of [N, I], `splits` rows each, by one call; `together`: in one allocation."""
    for quantizer in quantizers:
        quantizer.set_usage(rowwise=rows or from_rows, columnwise=columns)
    results = list(tex.split_quantize(x, list(splits), list(quantizers), disable_bulk_allocation=not together))
    if from_rows and not rows:
        keep_columns(results)
    return results


def again(tensor: Any) -> Any:
    """The same quantised tensor, in the same memory, as an object of its own: each may let parts go."""
    return type(tensor)(**tensor.get_metadata())


def keep_columns(tensors: Sequence[Any]) -> None:
    """Let the rows of quantised tensors go."""
    for tensor in tensors:
        tensor.update_usage(rowwise_usage=False, columnwise_usage=True)


def keep_rows(tensors: Sequence[Any]) -> None:
    """Let the columns of quantised tensors go."""
    for tensor in tensors:
        tensor.update_usage(rowwise_usage=True, columnwise_usage=False)


def multiply(first: Any, second: Any, layout: str, dtype: torch.dtype, *, accurate: bool = True) -> Tensor:
    """One product of quantised matrices."""
    workspace = _workspace(torch.cuda.current_device())
    result: Tensor = tex.generic_gemm(
        first, layout[0] == "T", second, layout[1] == "T", None, None, TE_DType[dtype], None, _BIAS, False, None,
        layout != FORWARD, workspace, workspace.shape[0], False, accurate,
        comm_overlap=None, comm_type=None, extra_output=None, bulk_overlap=False, alpha=1.0, beta=0.0,
    )[0]  # fmt: skip
    return result


def multiply_each(
    firsts: Sequence[Any],
    seconds: Sequence[Any],
    outs: Sequence[Tensor],
    splits: Sequence[int],
    layout: str,
    *,
    accurate: bool = True,
) -> None:
    """Products of pairs of quantised matrices, into one tensor [sum of splits, ...] or one each."""
    workspaces, nothing = _workspaces(torch.cuda.current_device())
    empty = [nothing] * len(firsts)
    tex.te_general_grouped_gemm(
        list(firsts), layout[0] == "T", list(seconds), layout[1] == "T", list(outs), TE_DType[outs[0].dtype],
        list(splits), empty, _BIAS, layout != WEIGHT_GRADIENT, empty, layout != FORWARD,
        list(workspaces), workspaces[0].shape[0], False, accurate, 0,
    )  # fmt: skip


@cache
def _workspace(device: int) -> Tensor:
    """Of all products: they are launched from one stream. Transformer Engine would take five of 32 MiB, for good."""
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=torch.device("cuda", device))


@cache
def _workspaces(device: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """The same, cut into one for each stream that a group runs on, and an empty tensor; the caller's stream waits."""
    whole, streams = _workspace(device), tex.get_num_cublas_streams()
    size = whole.numel() // streams // _WORKSPACE_ALIGNMENT * _WORKSPACE_ALIGNMENT
    parts = tuple(whole[place * size : (place + 1) * size] for place in range(streams))
    return parts, whole.new_empty(0, dtype=torch.bfloat16)


def flat(objects: Sequence[Any]) -> tuple[tuple[Any, ...], Callable[..., list[Any]]]:
    """Quantised tensors as plain ones, and what puts them together again."""
    tensors, shells = te.prepare_for_saving(*objects)

    def restore(*plain: Tensor | None) -> list[Any]:
        whole: list[Any] = te.restore_from_saved(shells, list(plain))
        return whole

    return tuple(tensors), restore
