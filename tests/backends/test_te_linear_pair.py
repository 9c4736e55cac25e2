"""Two products in 8 bits of one cast, with a stand-in for the package: the same bits, one cast and one copy fewer."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from overlap.model import Decoder, ModelConfig
from overlap.model.attention import CoreAttention
from overlap.model.linear import Linear, LinearPair
from recompute.inner import rebuilding
from recompute.modules import RecomputeModule
from recompute.wgrad import WeightGradients, collect_weight_gradients, weights_left_out
from tests.backends.te_stand_in import Quantised, Torch, install, recipe, stand_in
from tests.backends.test_te_norm_linear import Norm

RECIPES = {"block": recipe(block=True), "current": recipe(current=True), "mxfp8": recipe()}
ROWS, INNER = 8, 5
COLUMNS = 4 * (ROWS * INNER + ROWS)
"""Bytes of an input in columns, with a scale for each of them, of the stand-in."""
WAYS = ["now", "late", "first frozen", "second frozen", "both frozen", "input frozen"]


class Parts:
    """The stand-in, our modules on it, and a pair of layers."""

    def __init__(self, installed: tuple[Torch, Callable[[str], Any]], kind: str) -> None:
        self.engine, load = installed
        self.layers = load("te_layers")
        self.pair: LinearPair = load("te_linear_pair").TELinearPair()
        generator = torch.Generator().manual_seed(0)
        self.first, self.second = (
            self.layers.TELinear(nn.Parameter(torch.randn(outer, INNER, generator=generator)), RECIPES[kind])
            for outer in (6, 7)
        )
        self.x = torch.randn(2, ROWS // 2, INNER, generator=generator)

    def casts(self, pair: LinearPair) -> int:
        """How many a forward of the pair takes."""
        before = self.engine.casts
        pair(self.first, self.second, self.x)
        return self.engine.casts - before


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    engine, load = install(monkeypatch)
    products = stand_in(GroupedProduct=MagicMock, NormProduct=MagicMock, Product=MagicMock)
    monkeypatch.setitem(sys.modules, "overlap.backends.te_products", products)
    for name in ("te_layers", "te_linear_pair"):
        monkeypatch.setitem(sys.modules, f"overlap.backends.{name}", products)
        del sys.modules[f"overlap.backends.{name}"]
    return engine, load


@pytest.fixture(params=RECIPES)
def parts(request: pytest.FixtureRequest, load: Any) -> Parts:
    return Parts(load, request.param)


def run(parts: Parts, pair: LinearPair, how: str) -> list[Any]:
    """Both results, and the gradients of input and weights."""
    weights = [parts.first.weight, parts.second.weight]
    for weight, name in zip(weights, ("first", "second"), strict=True):
        weight.grad = None
        weight.requires_grad_(how not in (f"{name} frozen", "both frozen"))
    leaf = parts.x.clone().requires_grad_(how != "input frozen")
    pending = WeightGradients()
    with ExitStack() as stack:
        if how == "late":
            stack.enter_context(weights_left_out())
        outputs = pair(parts.first, parts.second, leaf)
    seeds = [torch.linspace(-2, 2, y.numel()).view_as(y) for y in outputs]
    with ExitStack() as stack:
        if how == "late":
            stack.enter_context(collect_weight_gradients(pending))
        torch.autograd.backward(outputs, seeds)
    late = {id(weight): gradient for weight, gradient in pending.drain()}
    assert len(late) == (2 if how == "late" else 0)
    gradients = [late.get(id(weight), weight.grad) for weight in weights]
    assert [gradient is None for gradient in gradients] == [not weight.requires_grad for weight in weights]
    return [*(y.detach() for y in outputs), leaf.grad, *gradients]


def same(found: list[Any], want: list[Any]) -> bool:
    return all(
        ours is theirs if ours is None or theirs is None else torch.equal(ours, theirs)
        for ours, theirs in zip(found, want, strict=True)
    )


@pytest.mark.parametrize("how", WAYS)
def test_the_same_bits(parts, how):
    want = run(parts, LinearPair(), how)
    assert same(run(parts, parts.pair, how), want)
    parts.x = parts.x.roll(1, 1)
    for ours, theirs in zip(run(parts, parts.pair, how)[:2], want[:2], strict=True):
        assert not torch.equal(ours, theirs), "control: the cast of another input"


def test_one_cast_fewer(parts):
    """Of the input one, of each weight one; backward casts the two gradients and the weights again."""
    assert (parts.casts(parts.pair), parts.casts(LinearPair())) == (3, 4)
    with torch.no_grad():
        assert (parts.casts(parts.pair), parts.casts(LinearPair())) == (3, 4)
    counts = []
    for pair in (parts.pair, LinearPair()):
        before = parts.engine.casts
        run(parts, pair, "now")
        counts.append(parts.engine.casts - before)
    assert counts == [3 + 4, 4 + 4]


def kept(parts: Parts, pair: LinearPair, how: str) -> tuple[list[Tensor], Any]:
    """What two graphs save, weights aside, and the graphs."""
    for name, layer in (("first", parts.first), ("second", parts.second)):
        layer.weight.requires_grad_(how not in (f"{name} frozen", "both frozen"))
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor), ExitStack() as stack:
        if how == "late":
            stack.enter_context(weights_left_out())
        outputs = pair(parts.first, parts.second, parts.x.clone().requires_grad_())
    places = {layer.weight.data_ptr() for layer in (parts.first, parts.second)}
    return [tensor for tensor in saved if tensor.data_ptr() not in places], outputs


def nbytes(tensors: list[Tensor]) -> int:
    """Of the memory behind them."""
    return sum({tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def in_columns(tensors: list[Tensor]) -> int:
    """Bytes of columns and their scales alone; rows would be shaped otherwise."""
    assert {tuple(tensor.shape) for tensor in tensors} <= {(INNER, ROWS), (1, ROWS)}
    return nbytes(tensors)


@pytest.mark.parametrize(
    ("how", "graphs", "apart"),
    [("now", 2, 2), ("late", 2, 2), ("first frozen", 1, 1), ("second frozen", 1, 1), ("both frozen", 0, 0)],
)
def test_both_graphs_keep_the_same_columns(parts, how, graphs, apart):
    saved, outputs = kept(parts, parts.pair, how)
    assert len(saved) == 2 * graphs
    assert in_columns(saved) == (COLUMNS if graphs else 0)
    separate, others = kept(parts, LinearPair(), how)
    assert in_columns(separate) == apart * COLUMNS, "control: each casts for itself"
    del outputs, others


@pytest.mark.parametrize("how", ["now", "first frozen", "second frozen"])
def test_rows_go_with_the_second_product(parts, how, monkeypatch):
    """Before it ends there is one copy of them, after it none; and no whole cast outlives a first pass."""
    gc.collect()
    Quantised.alive.clear()
    seen: list[int] = []
    multiply = parts.engine.generic_gemm

    def watch(*args: Any, **names: Any) -> Any:
        inputs = [one for one in Quantised.alive if one.rows is not None and one.rows.shape == (ROWS, INNER)]
        seen.append(len({one.rows.data_ptr() for one in inputs if one.rows is not None}))
        return multiply(*args, **names)

    monkeypatch.setattr(parts.engine, "generic_gemm", watch)
    _, outputs = kept(parts, parts.pair, how)
    assert seen == [1, 1]
    assert [one for one in Quantised.alive if one.rows is not None] == []
    del outputs
    with torch.no_grad():
        parts.pair(parts.first, parts.second, parts.x)
    assert list(Quantised.alive) == []


def test_columns_are_made_for_a_weight_gradient_only(parts, monkeypatch):
    made: list[bool] = []
    quantize = parts.engine.quantize

    def watch(x: Tensor, quantizer: Any) -> Any:
        made.extend([quantizer.columns] if x.shape == (ROWS, INNER) else [])
        return quantize(x, quantizer)

    monkeypatch.setattr(parts.engine, "quantize", watch)
    for how in ("now", "first frozen", "second frozen", "both frozen"):
        kept(parts, parts.pair, how)
    with torch.no_grad():
        kept(parts, parts.pair, "now")
    assert made == [True, True, True, False, False]


def test_weight_gradients_that_wait_hold_one_input(parts):
    """The inputs of both are the same memory; each is drained with its own numbers, in any order."""
    want = run(parts, LinearPair(), "now")
    held = []
    for pair in (parts.pair, LinearPair()):
        pending = WeightGradients()
        with weights_left_out():
            outputs = pair(parts.first, parts.second, parts.x.clone().requires_grad_())
        with collect_weight_gradients(pending):
            torch.autograd.backward(outputs, [torch.linspace(-2, 2, y.numel()).view_as(y) for y in outputs])
        del outputs
        pending.pending.reverse()
        tensors = [tensor for item in pending.pending for tensor in item.tensors if torch.is_tensor(tensor)]
        held.append(nbytes(tensors))
        found = {id(weight): gradient for weight, gradient in pending.drain_each()}
        assert all(torch.equal(found[id(layer.weight)], gradient) for layer, gradient in
                   ((parts.first, want[3]), (parts.second, want[4])))  # fmt: skip
    assert held[1] - held[0] == COLUMNS


def test_a_graph_that_is_kept_gives_the_same_again(parts):
    leaf = parts.x.clone().requires_grad_()
    outputs = parts.pair(parts.first, parts.second, leaf)
    inputs = (leaf, parts.first.weight, parts.second.weight)
    seeds = [torch.ones_like(y) for y in outputs]
    once = torch.autograd.grad(outputs, inputs, seeds, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(once, torch.autograd.grad(outputs, inputs, seeds), strict=True))


def test_columns_go_with_the_weight_gradient(parts):
    """Though the graph is still there, as that of a stage is until all of its backward is done."""
    gc.collect()
    Quantised.alive.clear()
    outputs = parts.pair(parts.first, parts.second, parts.x.clone().requires_grad_())
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    assert len(Quantised.alive) == 2
    assert [one for one in Quantised.alive if one.columns is not None] == []


def test_under_autocast(parts):
    """The input's gradients have its type when they are added, as apart."""
    for layer in (parts.first, parts.second):
        layer.to(torch.bfloat16)
    found = []
    for pair in (parts.pair, LinearPair()):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            leaf = parts.x.clone().requires_grad_()
            outputs = pair(parts.first, parts.second, leaf)
        assert {y.dtype for y in outputs} == {torch.bfloat16}
        torch.autograd.backward(outputs, [torch.linspace(-2, 2, y.numel()).view_as(y).to(y.dtype) for y in outputs])
        assert leaf.grad is not None
        assert leaf.grad.dtype == torch.float32
        found.append([*(y.detach() for y in outputs), leaf.grad])
    assert same(*found)


def test_an_input_in_another_layout(parts):
    parts.x = parts.x.flatten(0, 1)
    want = run(parts, LinearPair(), "now")
    parts.x = parts.x.t().contiguous().t()
    assert not parts.x.is_contiguous()
    assert same(run(parts, parts.pair, "now"), want)


@pytest.mark.parametrize("place", ["first", "second"])
@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_hooks_see_their_module_run(load, place, register):
    parts = Parts(load, "block")
    want = run(parts, LinearPair(), "now")
    seen: list[str] = []
    handle = getattr(getattr(parts, place), register)(lambda *_: seen.append(place))
    assert same(run(parts, parts.pair, "now"), want)
    assert seen == [place]
    assert parts.casts(parts.pair) == 4
    handle.remove()
    assert parts.casts(parts.pair) == 3


@pytest.mark.parametrize("unlike", ["recipe", "scales", "kind", "torch", "forward"])
@pytest.mark.parametrize("place", ["first", "second"])
def test_unlike_products_run_one_after_the_other(load, unlike, place):
    parts = Parts(load, "block")
    layer = getattr(parts, place)
    if unlike == "recipe":
        setattr(parts, place, parts.layers.TELinear(layer.weight, recipe(current=True)))
    elif unlike == "scales":  # as with delayed scaling
        layer.scaling.append(nn.Identity())
    elif unlike == "kind":
        layer.__class__ = type("Other", (parts.layers.TELinear,), {})
    elif unlike == "torch":
        setattr(parts, place, Linear(INNER, 6))
        with torch.no_grad():
            getattr(parts, place).weight.copy_(layer.weight[:6])
    else:
        layer.forward = type(layer).forward.__get__(layer)
    assert parts.casts(parts.pair) == (2 if unlike == "torch" else 4)
    assert same(run(parts, parts.pair, "now"), run(parts, LinearPair(), "now"))


def test_a_copy_shares_casts_too(load):
    """The recipe of a model's layers is one object in its copy as well."""
    parts = Parts(load, "block")
    both = copy.deepcopy(nn.ModuleList([parts.first, parts.second]))
    parts.first, parts.second = both
    assert parts.casts(parts.pair) == 3


def attention(load: Any, monkeypatch: pytest.MonkeyPatch, q_rank: int) -> Any:
    """A layer's latent attention as the backend puts it together, with torch's norm and core."""
    _, get = load
    layers = stand_in(TENorm=Norm, TECoreAttention=lambda *_: CoreAttention(), TEPermutation=nn.Module)
    layers.__dict__.update(TERouter=nn.Module, offers=bool)
    for name in ("te_attention", "te_norm", "te_permute", "te_router"):
        monkeypatch.setitem(sys.modules, f"overlap.backends.{name}", layers)
    for name in ("te_norm_linear", "te"):
        monkeypatch.setitem(sys.modules, f"overlap.backends.{name}", layers)
        del sys.modules[f"overlap.backends.{name}"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    backend = get("te")
    monkeypatch.setattr(backend, "make_recipe", lambda _: RECIPES["block"])
    config = ModelConfig(layers=1, hidden=16, q_rank=q_rank, kv_rank=8, nope_dim=8, rope_dim=8, value_dim=8)
    model: Any = Decoder(config, seed=0).get_submodule("layers.0.attn.attention")
    for fp8, modules in ((None, False), (MagicMock(), True)):
        other = backend.TEBackend(fp8, modules=modules)._replacement(model.both, config, fp8, "here")
        assert other is model.both, "it is for 8 bits by kernels"
    monkeypatch.setattr(backend, "ROW_MULTIPLE", {"block": 1})
    backend.TEBackend(MagicMock(recipe="block"))._convert(model, config, RECIPES["block"], "here")
    return model


def first_input() -> Tensor:
    return torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(1))


def run_attention(engine: Torch, model: Any, modules: set[RecomputeModule]) -> tuple[int, list[Tensor]]:
    """Casts of forward and backward; the result and all gradients."""
    model.zero_grad()
    leaf = first_input().requires_grad_()
    before = engine.casts
    with rebuilding(modules):
        y = model(leaf)
    y.square().sum().backward()
    return engine.casts - before, [y.detach(), leaf.grad, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize(("q_rank", "products"), [(0, 4), (12, 5)])
def test_attention_casts_its_input_once(load, monkeypatch, q_rank, products):
    """Forward casts inputs and weights, backward gradients and weights. A query that is rebuilt casts for itself."""
    engine, model = load[0], attention(load, monkeypatch, q_rank)
    assert type(model.both).__name__ == "TELinearPair"
    up = {RecomputeModule.MLA_UP_PROJ}
    found, rebuilt = run_attention(engine, model, set()), run_attention(engine, model, up)
    with torch.no_grad():
        assert torch.equal(model(first_input()), found[1][0])
    model.both = LinearPair()
    apart, rebuilt_apart = run_attention(engine, model, set()), run_attention(engine, model, up)
    assert apart[0] == 4 * products
    assert found[0] == apart[0] - 1
    assert rebuilt_apart[0] - rebuilt[0] == (1 if q_rank else 0)
    assert rebuilt_apart[0] == apart[0] + 2 * 2
    for other in (rebuilt, apart, rebuilt_apart):
        assert len(other[1]) == len(found[1])
        assert all(torch.equal(a, b) for a, b in zip(other[1], found[1], strict=True))
