"""Products in 8 bits on a GPU: near torch's on the same numbers, and the same to the bit in pieces of any size."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlap.dispatch import make_routing
from overlap.model import GroupedExperts, init_weights
from overlap.model.fp8 import ROW_MULTIPLE, Fp8Config, Recipe
from overlap.model.linear import Linear, LinearPair
from overlap.model.precision import default_dtype
from recompute.wgrad import WeightGradients, collect_weight_gradients, weights_left_out

# Transformer Engine's own imports warn.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

DEVICE = torch.device("cuda")
CLOSE = 0.1
"""Of the norm. Rounding to e4m3 with a scale per 128 gives 0.07 for experts and 0.04 for one product."""
EXPERTS, HIDDEN, WIDTH = 4, 256, 128


@pytest.fixture(autouse=True)
def _transformer_engine() -> None:
    pytest.importorskip("transformer_engine")


def torchs(kind: type[nn.Module], *sizes: int) -> Any:
    with default_dtype(torch.bfloat16):
        made = kind(*sizes)
    init_weights(made, 0)
    return made.to(DEVICE)


def in_8_bits(module: Any, recipe: str) -> Any:
    layers, scaling = (import_module(f"overlap.backends.{name}") for name in ("te_layers", "te_scaling"))
    config = Fp8Config(recipe=Recipe(recipe))
    made = scaling.make_recipe(config)
    if isinstance(module, Linear):
        return layers.TELinear(module.weight, made)
    return layers.from_torch_experts(module, made, ROW_MULTIPLE[config.recipe], False)


def inputs(idle: bool = False) -> tuple[Any, ...]:
    """Rows, their weights and their experts, of which one may have none and none has a multiple of anything."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(128, EXPERTS, generator=generator).argsort(1)[:, :2]
    if idle:
        ids = torch.where(ids == 2, 3, ids)
    rows = torch.randn(256, HIDDEN, generator=generator).to(DEVICE, torch.bfloat16)
    return rows, torch.rand(256, generator=generator).to(DEVICE), make_routing(ids.to(DEVICE), EXPERTS)


def run(module: Any, *args: Any) -> list[Tensor]:
    """The result, and the gradients of inputs and parameters."""
    leaves = [x.clone().requires_grad_() if torch.is_tensor(x) else x for x in args]
    y = module(*leaves)
    generator = torch.Generator().manual_seed(3)
    y.backward(torch.randn(y.shape, generator=generator).to(DEVICE, y.dtype))
    grads = [x.grad for x in (*leaves, *module.parameters()) if torch.is_tensor(x)]
    assert all(grad is not None for grad in grads)
    return [y.detach(), *grads]


def test_a_product_is_torchs():
    module = torchs(Linear, HIDDEN, 384)
    rows = inputs()[0]
    for want, found in zip(run(module, rows), run(in_8_bits(module, "block"), rows), strict=True):
        assert distance(found, want) < CLOSE


def test_experts_are_torchs():
    """Routing is given: no rounding sends a token elsewhere."""
    module, args = torchs(GroupedExperts, EXPERTS, HIDDEN, WIDTH), inputs()
    wants, finds = run(module, *args), run(in_8_bits(module, "block"), *args)
    assert len(wants) == len(finds) == 5
    for want, found in zip(wants, finds, strict=True):
        # Transformer Engine's matrices are transposed.
        assert distance(found.transpose(1, 2) if found.dim() == 3 else found, want) < CLOSE


def test_control_other_experts_are_far():
    """As far as gradients of unlike products are: what the limit above keeps out."""
    module, (rows, probs, routing) = torchs(GroupedExperts, EXPERTS, HIDDEN, WIDTH), inputs()
    want, found = (run(in_8_bits(module, "block"), x, probs, routing)[0] for x in (rows, rows.roll(1, 0)))
    assert distance(found, want) > 5 * CLOSE


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("recipe", ["block", "current", "delayed"])
def test_pieces_change_no_bit(recipe, idle, monkeypatch):
    """Cut by their weights, by their rows, or not at all."""
    limits = import_module("overlap.backends.te_pieces").Limits
    module, args = torchs(GroupedExperts, EXPERTS, HIDDEN, WIDTH), inputs(idle)
    matrix, row = 2 * HIDDEN * WIDTH * 2, (HIDDEN + 2 * WIDTH) * 2
    found = []
    for weights, rows in ((99, None), (99, 100), (2, None), (1, None)):
        most = limits(weights=weights * matrix, rows=None if rows is None else rows * row)
        backward, grouped = (import_module(f"overlap.backends.{name}") for name in ("te_backward", "te_grouped"))
        for where, name in ((backward, "_PIECE"), (grouped, "_FORWARD"), (grouped, "_FIRST_PASS")):
            monkeypatch.setattr(where, name, most)
        found.append(run(in_8_bits(module, recipe), *args))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("recipe", ["block", "current"])
def test_a_pair_is_its_products_one_after_the_other(recipe, late, monkeypatch):
    """The same bits of one cast fewer, and columns in 8 bits held once for both weight gradients."""
    layers, scaling, linears, pairs = (
        import_module(f"overlap.backends.{name}") for name in ("te_layers", "te_scaling", "te_linear", "te_linear_pair")
    )
    made = scaling.make_recipe(Fp8Config(recipe=Recipe(recipe)))
    products = [layers.TELinear(torchs(Linear, HIDDEN, outer).weight, made) for outer in (384, 192)]
    rows = torch.randn(1024, HIDDEN, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.bfloat16)
    casts: list[bool] = []
    cast = linears.cast

    def count(x: Tensor, *args: Any, **settings: Any) -> Any:
        casts.append(x.shape == rows.shape)
        return cast(x, *args, **settings)

    # The workspace is made by the first product.
    run_pair(LinearPair(), products, rows, late)
    monkeypatch.setattr(linears, "cast", count)
    (found, held), shared = run_pair(pairs.TELinearPair(), products, rows, late), list(casts)
    casts.clear()
    (want, held_apart), apart = run_pair(LinearPair(), products, rows, late), list(casts)
    assert len(found) == len(want) == 5
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert (sum(shared), sum(apart), len(apart) - len(shared)) == (1, 2, 1)
    assert rows.numel() <= held_apart - held <= rows.numel() * 5 // 4
    with torch.no_grad():
        first_pass = pairs.TELinearPair()(*products, rows)
    assert all(torch.equal(a, b) for a, b in zip(first_pass, want, strict=False))


def run_pair(pair: LinearPair, products: list[Any], rows: Tensor, late: bool) -> tuple[list[Tensor], int]:
    """Results, and the gradients of the input and both weights; bytes that both results and their graphs hold."""
    weights, pending = [product.weight for product in products], WeightGradients()
    leaf = rows.clone().requires_grad_()
    gc.collect()
    before = torch.cuda.memory_allocated()
    with weights_left_out() if late else nullcontext():
        outputs = pair(*products, leaf)
    held = torch.cuda.memory_allocated() - before
    seeds = [torch.linspace(-1, 1, y.numel(), device=DEVICE).to(y.dtype).view_as(y) for y in outputs]
    with collect_weight_gradients(pending) if late else nullcontext():
        torch.autograd.backward(outputs, seeds)
    gradients = {id(weight): gradient for weight, gradient in pending.drain()}
    for weight in weights:
        if weight.grad is not None:
            gradients[id(weight)], weight.grad = weight.grad, None
    assert leaf.grad is not None
    return [*(y.detach() for y in outputs), leaf.grad, *(gradients[id(weight)] for weight in weights)], held


def distance(found: Tensor, want: Tensor) -> float:
    return float((found - want).float().norm() / want.float().norm())
