"""Recipes of Transformer Engine, and the state of delayed scaling.

NOTE [ Delayed scaling under replay ]
Transformer Engine keeps, per process, lists of all modules' histories, and moves all of them on whenever a context
ends or a first module's backward does: a replay, or another stage's context, would move them too. Here its modules
are kept out of those lists, and the state belongs to the model:
1. Scales are constant within a step, so a replay sees those of the first pass, whoever runs in between.
2. Every cast takes the maximum of its tensor into `amax`. A maximum has no order, and a replay adds what is there.
3. When a step succeeds, and only then, `amax` of all its microbatches becomes one entry of the history and new scales
   are computed, after one reduction over the group. So a step with recompute and overlap equals one without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformer_engine.common import recipe as te_recipe
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, get_fp8_te_dtype

from overlap.model.backend import Context
from overlap.model.fp8 import Fp8Config, Recipe
from overlap.model.precision import WideBuffers
from recompute.errors import ConfigError

MODES = (("forward", 3), ("backward", 2))
"""Direction, and the tensors of one product that are scaled in it."""


def make_recipe(config: Fp8Config) -> Any:
    """Transformer Engine's recipe.

    Raises:
        ConfigError: This machine cannot run it.
    """
    makers: dict[Recipe, Callable[[], Any]] = {
        Recipe.BLOCK: te_recipe.Float8BlockScaling,
        Recipe.CURRENT: te_recipe.Float8CurrentScaling,
        Recipe.DELAYED: partial(te_recipe.DelayedScaling, amax_history_len=config.amax_history),
        Recipe.MXFP8: te_recipe.MXFP8BlockScaling,
    }
    checks = {Recipe.BLOCK: te.is_fp8_block_scaling_available, Recipe.MXFP8: te.is_mxfp8_available}
    available, reason = checks.get(config.recipe, te.is_fp8_available)(return_reason=True)
    if not available:
        name = torch.cuda.get_device_name()
        raise ConfigError(field="fp8", value=str(config.recipe), rule=f"cannot run on this {name}: {reason}")
    return makers[config.recipe]()


def precision(recipe: Any, group: ProcessGroup | None) -> Context:
    """A factory of contexts in which products run in 8 bits."""
    return partial(te.autocast, enabled=True, recipe=recipe, amax_reduction_group=group)


def keep_out_of_process_lists(module: Any) -> None:
    """Have a module of Transformer Engine register no history: see the note above."""
    module.fp8_meta[FP8GlobalStateManager.get_buffer_info()] = []


class DelayedState(WideBuffers):
    """Scales, histories and running maxima of the products of one module.

    Args:
        recipe: A DelayedScaling.
        products: Matrices, one product each.
        device: Where they are.
    """

    def __init__(self, recipe: Any, products: int, device: torch.device) -> None:
        super().__init__()
        for mode, tensors in MODES:
            count = products * tensors
            self.register_buffer(f"scale_{mode}", torch.ones(count, dtype=torch.float32, device=device))
            length = recipe.amax_history_len
            self.register_buffer(f"history_{mode}", torch.zeros(length, count, dtype=torch.float32, device=device))
            self.register_buffer(f"amax_{mode}", torch.zeros(count, dtype=torch.float32, device=device))

    def part(self, name: str, mode: str) -> Tensor:
        """One of `scale`, `history`, `amax` of a direction."""
        return self.get_buffer(f"{name}_{mode}")

    def bind(self, inner: Any, recipe: Any, products: int) -> None:
        """Have a module of Transformer Engine read these scales and write these maxima."""
        with te.autocast(enabled=True, recipe=recipe):
            inner.init_fp8_metadata(num_gemms=products)
        for mode, _ in MODES:
            key = FP8GlobalStateManager.get_meta_tensor_key(forward=mode == "forward")
            state = inner.fp8_meta[key]
            state.scale, state.amax_history = self.part("scale", mode), self.part("history", mode)
            inner.quantizers[key] = self.quantizers(mode, recipe)

    def quantizers(self, mode: str, recipe: Any) -> list[Any]:
        """Casts of a direction's tensors, in order, by these scales and into these maxima."""
        scale, amax = self.part("scale", mode), self.part("amax", mode)
        dtype = get_fp8_te_dtype(recipe, mode == "forward")
        return [te.Float8Quantizer(scale[place], amax[place : place + 1], dtype) for place in range(len(scale))]


@torch.no_grad()
def advance(states: Sequence[DelayedState], recipe: Any, group: ProcessGroup | None) -> None:
    """Make the maxima of a step an entry of every history, and compute the next step's scales."""
    for mode, _ in MODES:
        maxima = [state.part("amax", mode) for state in states]
        together = torch.cat(maxima)
        if recipe.reduce_amax and group is not None:
            torch.distributed.all_reduce(together, op=torch.distributed.ReduceOp.MAX, group=group)
        tex.fused_amax_and_scale_update_after_reduction(
            together,
            [state.part("history", mode) for state in states],
            [state.part("scale", mode) for state in states],
            recipe.amax_compute_algo,
            get_fp8_te_dtype(recipe, mode == "forward"),
            recipe.margin,
        )
        torch._foreach_zero_(maxima)


def make_state(recipe: Any, products: int, device: torch.device) -> nn.ModuleList:
    """The state that a recipe needs: a list of one, or none."""
    needed = recipe is not None and recipe.delayed()
    return nn.ModuleList([DelayedState(recipe, products, device)] if needed else [])
