"""TEBackend: products, norms and attention of the model by Transformer Engine, in its own type or in 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from overlap.backends.te_attention import TECoreAttention
from overlap.backends.te_layers import TEExperts, TELinear, TEModuleLinear, from_torch_experts
from overlap.backends.te_linear_pair import TELinearPair
from overlap.backends.te_norm import TENorm
from overlap.backends.te_norm_linear import TENormThenLinear
from overlap.backends.te_permute import TEPermutation
from overlap.backends.te_router import TERouter, offers
from overlap.backends.te_scaling import DelayedState, advance, make_recipe, precision
from overlap.ir import StepState
from overlap.model.attention import CoreAttention
from overlap.model.backend import Context
from overlap.model.config import ModelConfig
from overlap.model.decoder import Decoder
from overlap.model.experts import GroupedExperts
from overlap.model.fp8 import ROW_MULTIPLE, Fp8Config
from overlap.model.linear import Linear, LinearPair
from overlap.model.norm import NormThenLinear, RMSNorm
from overlap.model.permute import Permutation
from overlap.model.router import Router
from recompute.errors import ConfigError


class TEBackend:
    """Transformer Engine, for one model; see overlap.model.backend.

    It takes what is gained by: attention and norms everywhere, and products of layers in 8 bits, by its kernels. In
    bfloat16 products stay the model's own, which are the same library's.
    The router and the loss stay the model's: they compute in float32, and without logits. Backend te-modules puts in
    its modules, its permutation and its choice of experts, whatever the precision.

    Args:
        fp8: Recipe and layers of low precision; None: none.
        amax_group: Ranks with the same weights: maxima of recipe `delayed` are reduced over it, once per step.
        expert_amax_group: The same for experts.
        modules: Products by Transformer Engine's own modules (backend te-modules), in every precision.

    Raises:
        ConfigError: The device cannot run the recipe.
    """

    def __init__(
        self,
        fp8: Fp8Config | None = None,
        amax_group: ProcessGroup | None = None,
        expert_amax_group: ProcessGroup | None = None,
        *,
        modules: bool = False,
    ) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(field="backend", value="te", rule="needs an NVIDIA GPU: Transformer Engine has no others")
        self.fp8 = fp8
        self.modules = modules
        self._group = amax_group
        self._expert_group = expert_amax_group
        self._recipe = None if fp8 is None else make_recipe(fp8)

    def __deepcopy__(self, memo: dict[int, Any]) -> TEBackend:
        """Copies of a model share it: it holds settings, and a process group cannot be copied."""
        return self

    def convert(self, model: Decoder) -> Decoder:
        """Put the modules in place; the model must be on its device.

        Raises:
            ConfigError: float64, or widths that 8 bits cannot do.
        """
        config = model.config
        if config.dtype == "float64":
            raise ConfigError(field="dtype", value="float64", rule="Transformer Engine computes in bfloat16 or float32")
        if model.embedding.device.type != "cuda":
            raise ConfigError(field="backend", value="te", rule="needs the model on a GPU before it is converted")
        for number, layer in enumerate([*model.layers, *model.mtp]):
            self._convert(layer, config, self._recipe_of(number, config.layers), f"layer {number}")
        # The output matrix stays: the loss is computed without logits.
        model.head.norm = self._replacement(model.head.norm, config, None, "head")  # type: ignore[assignment]
        model.backend = self
        return model

    def context(self, layer: int, layers: int) -> Context | None:
        """The context of Transformer Engine's modules in 8 bits; None elsewhere: its kernels know their recipe."""
        recipe = self._recipe_of(layer, layers)
        return None if recipe is None or not self.modules else precision(recipe, self._group)

    def step_states(self, model: Decoder) -> tuple[StepState, ...]:
        """The maxima of delayed scaling."""
        experts = [layer for layer in model.modules() if isinstance(layer, TEExperts)]
        theirs = [state for layer in experts for state in layer.modules() if isinstance(state, DelayedState)]
        known = {id(state) for state in theirs}
        others = [state for state in model.modules() if isinstance(state, DelayedState) and id(state) not in known]
        return tuple(
            StepState(
                buffers=tuple(state.part("amax", mode) for state in states for mode in ("forward", "backward")),
                advance=partial(advance, states, self._recipe, group),
            )
            for states, group in ((others, self._group), (theirs, self._expert_group))
            if states
        )

    def check_feeds(self, feeds: Mapping[str, Any]) -> None:
        """Products in 8 bits want a multiple of tokens."""
        if self.fp8 is None:
            return
        tokens, multiple = feeds["ids"].numel(), ROW_MULTIPLE[self.fp8.recipe]
        if tokens % multiple:
            rule = f"must hold a multiple of {multiple} tokens with fp8 {self.fp8.recipe}"
            raise ConfigError(field="ids", value=tokens, rule=rule)

    def _recipe_of(self, layer: int, layers: int) -> Any:
        return self._recipe if self.fp8 is not None and self.fp8.covers(layer, layers) else None

    def _convert(self, module: nn.Module, config: ModelConfig, recipe: Any, where: str) -> None:
        for name, child in list(module.named_children()):
            path = f"{where}.{name}"
            found = self._replacement(child, config, recipe, path)
            if found is child:
                self._convert(child, config, recipe, path)
            else:
                found.train(child.training)
                setattr(module, name, found)

    def _replacement(self, module: nn.Module, config: ModelConfig, recipe: Any, where: str) -> nn.Module:
        products = self.modules or recipe is not None
        if type(module) is Linear and products:
            self._check_widths(recipe, where, *module.weight.shape)
            return (TEModuleLinear if self.modules else TELinear)(module.weight, recipe)
        if type(module) is RMSNorm:
            return TENorm(module.weight, module.eps)
        if type(module) is LinearPair and recipe is not None and not self.modules:
            return TELinearPair()
        if type(module) is NormThenLinear and self.modules:
            return TENormThenLinear()
        if type(module) is Permutation and self.modules:
            return TEPermutation()
        if type(module) is Router and self.modules and offers(config):
            return TERouter(module)
        if type(module) is CoreAttention:
            return TECoreAttention(config, self.modules)
        if type(module) is GroupedExperts and products:
            self._check_widths(recipe, where, *module.gate_up.shape[1:], *module.down.shape[1:])
            multiple = 1 if recipe is None or self.fp8 is None else ROW_MULTIPLE[self.fp8.recipe]
            return from_torch_experts(module, recipe, multiple, self.modules)
        return module

    def _check_widths(self, recipe: Any, where: str, *widths: int) -> None:
        if recipe is None or self.fp8 is None:
            return
        multiple = ROW_MULTIPLE[self.fp8.recipe]
        if any(width % multiple for width in widths):
            rule = f"needs widths that are multiples of {multiple}, and {where} has {widths}"
            raise ConfigError(field="fp8", value=str(self.fp8.recipe), rule=rule)
