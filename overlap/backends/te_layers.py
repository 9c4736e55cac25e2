"""Layers of the model by Transformer Engine: they take over the parameters of torch's, under the same names.

A copy of a layer makes products of its own: Transformer Engine's modules hold nothing but shapes.
Legend: N rows sorted by expert, C hidden, E experts, W inner width.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.weak import WeakTensorKeyDictionary

from overlap.backends.te_grouped import Fp8GroupedProduct
from overlap.backends.te_linear import Fp8Product
from overlap.backends.te_products import GroupedProduct, NormProduct, Product
from overlap.backends.te_scaling import make_state
from overlap.dispatch import Arrival, Routing
from overlap.model.experts import GroupedExperts, activate
from overlap.model.graph_only import GraphOnly
from overlap.model.init import Sliced
from overlap.model.row_padding import make_padding
from recompute.inner import rebuild
from recompute.modules import RecomputeModule

_PRODUCTS = ("_normed", "_product", "_products")
"""Attributes that are made, not copied."""


class TELayer(GraphOnly):
    """Makes its products from its parameters, and again for a copy, another device, or state put in place."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_load_state_dict_post_hook(_bind_again)  # type: ignore[no-untyped-call]  # torch's

    def bind(self) -> None:
        """Make the products."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's
        self.bind()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Leave the products out."""
        return {name: value for name, value in self.__dict__.items() if name not in _PRODUCTS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's
        self.bind()


def _bind_again(layer: nn.Module, keys: object) -> None:
    if isinstance(layer, TELayer):
        layer.bind()


def is_plain(layer: nn.Module) -> bool:
    """Whether a call of it is its class's forward and nothing else, so that what does the same may stand for it."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    seen = any(hooks) or bool(_has_any_global_hook())  # type: ignore[no-untyped-call]  # torch's
    return not seen and "forward" not in vars(layer)


class TELinear(TELayer):
    """In the place of model.linear.Linear.

    Args:
        weight: Its parameter, [O, I].
        recipe: Transformer Engine's recipe.
    """

    fresh = True

    def __init__(self, weight: nn.Parameter, recipe: Any) -> None:
        super().__init__()
        self.weight = weight
        self.recipe = recipe
        self.scaling = make_state(recipe, 1, weight.device)
        self.bind()

    def bind(self) -> None:
        """Make the product."""
        self._product: Any = Fp8Product(self.weight, self.recipe, self.scaling)

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        result: Tensor = self._product(self.weight, x)
        return result

    def shares_casts(self, other: TELinear) -> bool:
        """Whether both cast an input alike: by one recipe, and by no scales of their own."""
        return self.recipe is other.recipe and not (len(self.scaling) or len(other.scaling))

    def both(self, other: TELinear, x: Tensor) -> tuple[Tensor, Tensor]:
        """[..., I] -> [..., O] of this and another that shares casts, of one cast of x."""
        result: tuple[Tensor, Tensor] = self._product.both(self.weight, other._product, other.weight, x)
        return result


class TEModuleLinear(TELinear):
    """The same by Transformer Engine's module; its recipe may be None."""

    fresh = True

    def bind(self) -> None:
        """Make the product; one behind a norm is made when a norm is there."""
        self._product = Product(self.weight, self.recipe, self.scaling)
        self._normed: dict[float, NormProduct] = {}

    def behind_norm(self, norm_weight: Tensor, eps: float, x: Tensor) -> Tensor:
        """[..., I] -> [..., O] of x's RMSNorm, by one module for both."""
        product = self._normed.get(eps)
        if product is None:
            product = self._normed[eps] = NormProduct(self.weight, eps, self.recipe, self.scaling)
        return product(self.weight, norm_weight, x)


class TEExperts(TELayer, Sliced):
    """In the place of model.experts.GroupedExperts, whose matrices are [E, I, O]; these are [E, O, I].

    Args:
        whole: Experts of the layer, over all ranks.
        held: Those whose weights are here; E of them.
        gate_up: [E, 2*W, C].
        down: [E, C, W].
        recipe: Transformer Engine's recipe.
        multiple: What the rows of an expert are padded to a multiple of.
    """

    def __init__(
        self, whole: int, held: range, gate_up: nn.Parameter, down: nn.Parameter, recipe: Any, multiple: int
    ) -> None:
        super().__init__(whole, held)
        self.gate_up = gate_up
        self.down = down
        self.recipe = recipe
        self.multiple = multiple
        self.gate_up_scaling = make_state(recipe, len(gate_up), gate_up.device)
        self.down_scaling = make_state(recipe, len(down), down.device)
        self.bind()

    @property
    def sheds(self) -> tuple[int, ...]:
        """The rows: of them columns in 8 bits are kept."""
        return (0,)

    def bind(self) -> None:
        """Make both products."""
        self._products: Any = tuple(
            Fp8GroupedProduct(weight, self.recipe, state, self.multiple)
            for weight, state in ((self.gate_up, self.gate_up_scaling), (self.down, self.down_scaling))
        )

    def forward(self, rows: Tensor, probs: Tensor, routing: Routing | Arrival, *, graph_only: bool = False) -> Tensor:
        """Apply each row's expert; arguments and result as GroupedExperts'."""
        first, second = self._products
        splits = host_counts(routing.counts)
        result: Tensor
        if torch.is_grad_enabled():
            inner = first(self.gate_up, rows, splits)
            result = second.activated(self.down, inner, probs, splits, graph_only=self.leaves_out(graph_only))
        else:  # the same numbers; SwiGLU's input, the largest tensor, goes before the second product
            result = second(self.down, activate(rows.dtype, first(self.gate_up, rows, splits), probs), splits)
        return result


class TEModuleExperts(TEExperts):
    """The same by Transformer Engine's module; its recipe may be None."""

    @property
    def sheds(self) -> tuple[int, ...]:
        """The rows, unless they are kept as they are."""
        return () if self.recipe is None else (0,)

    def bind(self) -> None:
        """Make both products."""
        self._products = tuple(
            GroupedProduct(weight, self.recipe, state)
            for weight, state in ((self.gate_up, self.gate_up_scaling), (self.down, self.down_scaling))
        )

    def forward(  # type: ignore[override]  # it leaves nothing out
        self, rows: Tensor, probs: Tensor, routing: Routing | Arrival
    ) -> Tensor:
        """Apply each row's expert; arguments and result as GroupedExperts'."""
        first, second = self._products
        padding = make_padding(routing.counts, host_counts(routing.counts), rows.shape[0], self.multiple)
        inner = first(self.gate_up, padding.pad(rows), padding.splits)
        weighted = rebuild(RecomputeModule.MOE_ACT, partial(activate, rows.dtype), inner, padding.pad(probs))
        return padding.unpad(second(self.down, weighted, padding.splits))


_ON_HOST: MutableMapping[Tensor, list[int]] = WeakTensorKeyDictionary()
"""Counts that were read once; an entry goes with its tensor."""


def host_counts(counts: Tensor) -> list[int]:
    """Rows of each expert, on the host.

    The host waits for the device once: a replay and the backward get the arrival that the first pass pinned, with the
    very tensor that was read there (R7).
    """
    known = _ON_HOST.get(counts)
    if known is None:
        known = _ON_HOST[counts] = counts.tolist()
    return known


def from_torch_experts(experts: GroupedExperts, recipe: Any, multiple: int, modules: bool) -> TEExperts:
    """The same experts: [E, I, O] -> [E, O, I], each matrix contiguous."""
    with torch.no_grad():
        gate_up, down = (
            nn.Parameter(weight.transpose(1, 2).contiguous(), requires_grad=weight.requires_grad)
            for weight in (experts.gate_up, experts.down)
        )
    made = TEModuleExperts if modules else TEExperts
    return made(experts.whole, experts.held, gate_up, down, recipe, multiple)
