"""Products in 8 bits on a GPU: near torch's on the same numbers, and the same to the bit in pieces of any size."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlap.dispatch import make_routing
from overlap.model import GroupedExperts, init_weights
from overlap.model.fp8 import ROW_MULTIPLE, Fp8Config, Recipe
from overlap.model.linear import Linear
from overlap.model.precision import default_dtype

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


def distance(found: Tensor, want: Tensor) -> float:
    return float((found - want).float().norm() / want.float().norm())
