"""Products in 8 bits by Transformer Engine's kernels, of one matrix and of experts, with a stand-in for the package."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recompute.wgrad import WeightGradients, adding_in_place, collect_weight_gradients, weights_left_out
from tests.backends.te_stand_in import Quantised, install, recipe

RECIPES = {"block": recipe(block=True), "current": recipe(current=True), "mxfp8": recipe()}
SPLITS = [[3, 5, 4, 2], [0, 7, 0, 7], [0, 0, 0, 14], [0, 0, 0, 0]]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    return install(monkeypatch)


def grid(x: Tensor, steps: int) -> Tensor:
    return (x.detach() * steps).round() / steps


def in_columns(kind: str) -> int:
    """Of the grid of a weight in columns: with square blocks they are the rows' numbers."""
    return 4 if kind == "block" else 8


def limit_pieces(patch: pytest.MonkeyPatch, load: Any, weight: Tensor, experts: int, rows: int | None) -> None:
    """Take that many experts and rows at a time."""
    limits, matrix = load("te_pieces").Limits, weight[0].nbytes
    nbytes = None if rows is None else rows * sum(weight.shape[1:]) * weight.element_size()
    for module, name in (("te_backward", "_PIECE"), ("te_grouped", "_FORWARD"), ("te_grouped", "_FIRST_PASS")):
        patch.setattr(load(module), name, limits(weights=experts * matrix, rows=nbytes))


def run(call: Any, weight: nn.Parameter, x: Tensor, how: str) -> tuple[Tensor, Tensor, Tensor]:
    """Output, input gradient and weight gradient: at once, in a W slot, or added in place."""
    leaf = x.detach().requires_grad_()
    weight.grad = torch.zeros_like(weight) if how == "in place" else None
    pending = WeightGradients()
    gradient: Tensor | None
    if how == "late":
        with weights_left_out():
            y = call(leaf)
    else:
        y = call(leaf)
    seed = torch.linspace(-2, 2, y.numel()).view_as(y)
    if how == "late":
        with collect_weight_gradients(pending):
            y.backward(seed)
        assert weight.grad is None
        ((found, gradient),) = pending.drain()
        assert found is weight
    elif how == "in place":
        with adding_in_place():
            y.backward(seed)
        gradient = weight.grad
    else:
        y.backward(seed)
        gradient = weight.grad
    assert gradient is not None
    assert leaf.grad is not None
    return y.detach(), leaf.grad, gradient


@pytest.mark.parametrize("kind", RECIPES)
def test_linear(engine, kind):
    _, load = engine
    weight = nn.Parameter(torch.randn(6, 5))
    product = load("te_linear").Fp8Product(weight, RECIPES[kind], nn.ModuleList())
    x = torch.randn(2, 4, 5)
    runs = [run(lambda leaf: product(weight, leaf), weight, x, how) for how in ("now", "late")]
    seed = torch.linspace(-2, 2, 48).view(2, 4, 6)
    want = (
        grid(x, 4) @ grid(weight, 4).t(),
        grid(seed, 4) @ grid(weight, in_columns(kind)),
        grid(seed, 8).flatten(0, 1).t() @ grid(x, 8).flatten(0, 1),
    )
    for found in runs:
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    with torch.no_grad():
        assert torch.equal(product(weight, x), want[0])


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize(("kind", "multiple", "unused"), [("block", 4, 3), ("current", 1, 0), ("mxfp8", 4, 0)])
def test_grouped(engine, kind, multiple, unused, splits, monkeypatch):
    """Now, late, in place, in pieces of any size and with padding are the same; idle experts and rows give zeros."""
    _, load = engine
    module = load("te_grouped")
    weight = nn.Parameter(torch.randn(4, 6, 5))
    product = module.Fp8GroupedProduct(weight, RECIPES[kind], nn.ModuleList(), multiple)
    x = torch.randn(sum(splits) + unused, 5)
    parts = [
        (grid(rows, 4) @ grid(matrix, 4).t(), rows)
        for rows, matrix in zip(x[: sum(splits)].split(splits), weight.unbind(0), strict=True)
    ]
    want = torch.cat([*(part for part, _ in parts), torch.zeros(unused, 6)])
    seed = torch.linspace(-2, 2, want.numel()).view(-1, 6)
    pairs = [(grad, part[1]) for grad, part in zip(seed[: sum(splits)].split(splits), parts, strict=True)]
    want_weight = torch.stack([grid(grad, 8).t() @ grid(rows, 8) for grad, rows in pairs])
    want_x = torch.cat(
        [
            grid(grad, 4) @ grid(matrix, in_columns(kind))
            for (grad, _), matrix in zip(pairs, weight.unbind(0), strict=True)
        ]
    )
    for matrices, rows in ((1, None), (2, None), (4, None), (4, 8)):
        limit_pieces(monkeypatch, load, weight, matrices, rows)
        for how in ("now", "late", "in place"):
            y, grad_x, gradient = run(lambda leaf: product(weight, leaf, splits), weight, x, how)
            assert torch.equal(y, want)
            assert torch.equal(gradient, want_weight)
            assert torch.equal(grad_x[: sum(splits)], want_x)
            assert not grad_x[sum(splits) :].any()
    with torch.no_grad():
        assert torch.equal(product(weight, x, splits), y)


def test_input_gradient(engine):
    _, load = engine
    weight = nn.Parameter(torch.randn(2, 6, 5))
    product = load("te_grouped").Fp8GroupedProduct(weight, RECIPES["block"], nn.ModuleList(), 1)
    x = torch.randn(7, 5)
    _, grad_x, _ = run(lambda leaf: product(weight, leaf, [3, 4]), weight, x, "now")
    seed = torch.linspace(-2, 2, 42).view(7, 6)
    assert torch.equal(grad_x[:3], grid(seed[:3], 4) @ grid(weight[0], 4))
    assert torch.equal(grad_x[3:], grid(seed[3:], 4) @ grid(weight[1], 4))


def test_no_weight_and_no_rows_are_kept(engine):
    """Between forward and backward a graph holds the columns of the inputs, and nothing of a weight."""
    _, load = engine
    weight = nn.Parameter(torch.randn(4, 6, 5))
    product = load("te_grouped").Fp8GroupedProduct(weight, RECIPES["block"], nn.ModuleList(), 1)
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = product(weight, torch.randn(8, 5, requires_grad=True), [2, 2, 2, 2])
    # Stored transposed, with a scale each for at most 128 of a column.
    assert [tuple(tensor.shape) for tensor in saved if tensor is not weight] == [(5, 2), (1, 8)] * 4
    del y


@pytest.mark.parametrize(("experts_a_piece", "most"), [(1, 6), (4, 12)])
def test_casts_live_a_piece_long(engine, monkeypatch, experts_a_piece, most):
    """Kept inputs of four experts, and of one piece the weights and the gradient (or the next input) beside them."""
    tex, load = engine
    module = load("te_grouped")
    weight = nn.Parameter(torch.randn(4, 6, 5))
    limit_pieces(monkeypatch, load, weight, experts_a_piece, None)
    product = module.Fp8GroupedProduct(weight, RECIPES["block"], nn.ModuleList(), 1)
    gc.collect()
    Quantised.alive.clear()
    run(lambda leaf: product(weight, leaf, [2, 2, 2, 2]), weight, torch.randn(8, 5), "now")
    assert tex.most_alive == most


def test_pieces(engine):
    _, load = engine
    module = load("te_pieces")
    pieces = module.pieces
    weight = torch.empty(5, 2, 2)
    two = module.Limits(weights=2 * weight[0].nbytes)
    found = pieces(weight, module.Rows((1, 0, 2, 0, 0), 4), two)
    assert [piece.splits for piece in found] == [(1,), (2,), ()]
    assert [piece.padded for piece in found] == [(4,), (4,), ()]
    assert [piece.busy for piece in found] == [(0,), (0,), ()]
    assert [piece.experts for piece in found] == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert [(piece.rows.start, piece.rows.stop) for piece in found] == [(0, 1), (1, 3), (3, 3)]
    assert len(pieces(weight, module.Rows((1,) * 5, 4), module.Limits(weights=1))) == 5


@pytest.mark.parametrize(
    ("splits", "experts"),
    [
        ((4, 4, 4, 4, 4), [2, 2, 1]),
        ((9, 1, 0, 0, 1), [1, 4]),
        ((1, 9, 0, 0, 8), [1, 3, 1]),
        ((0, 0, 0, 1, 4), [5]),
        ((5, 1, 1, 1, 1), [1, 2, 2]),
        ((0, 0, 0, 0, 0), [5]),
    ],
)
def test_a_piece_ends_where_its_rows_are_too_many(engine, splits, experts):
    """Padded ones count; an expert is never cut, and one without rows costs none."""
    _, load = engine
    module = load("te_pieces")
    weight = torch.empty(5, 2, 3)
    # Rows of 2 in and 3 out: 8 of them at most.
    found = module.pieces(weight, module.Rows(splits, 4), module.Limits(weights=weight.nbytes, rows=8 * 5 * 4))
    assert [piece.experts.stop - piece.experts.start for piece in found] == experts
    assert [expert for piece in found for expert in range(piece.experts.start, piece.experts.stop)] == list(range(5))
    assert [row for piece in found for row in range(piece.rows.start, piece.rows.stop)] == list(range(sum(splits)))
    assert [piece.splits for piece in found] == [tuple(rows for rows in splits[p.experts] if rows) for p in found]


@pytest.mark.parametrize(
    ("splits", "writes"),
    [
        ((3, 1, 4), [True, True, True]),
        # One row too few behind it; and rows of no expert must stay zeros.
        ((4, 2, 1), [True, False, False]),
        ((3, 0, 1), [True, False]),
    ],
)
def test_padding_of_one_expert_falls_on_rows_that_are_written_later(engine, splits, writes):
    _, load = engine
    module = load("te_pieces")
    weight, out = torch.empty(3, 2, 2), torch.zeros(16, 64)
    found = module.busy_pieces(weight, module.Rows(splits, 4), module.Limits(weights=1))
    places = [piece.place(out) for piece in found]
    assert [place is not None for place in places] == writes
    for piece, place in zip(found, places, strict=True):
        assert place is None or (len(place), place.data_ptr()) == (4, out[piece.rows.start :].data_ptr())
    (both, *_) = module.pieces(weight, module.Rows((3, 1, 4), 4), module.Limits(weights=2 * weight[0].nbytes))
    assert both.place(out) is None
    narrow = torch.zeros(16, 63)
    assert [piece.place(narrow) is None for piece in found[:2]] == [False, True]


def test_workspaces_are_one(engine):
    """Groups run in parts of the workspace that plain products use."""
    _, load = engine
    parts, nothing = load("te_casts")._workspaces(0)
    assert [len(part) for part in parts] == [4096] * 4
    assert nothing.numel() == 0
