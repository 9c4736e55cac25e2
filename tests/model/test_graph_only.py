"""Products that are left out leave the graph that they would have left, and run where anybody could see it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from overlap.dispatch import Arrival
from overlap.model import Decoder, ModelConfig, grouped_linear, linear
from overlap.model.experts import GroupedExperts, SwiGLU
from overlap.model.graph_only import placeholder, skips
from overlap.model.layers import MoELayer
from overlap.model.permute import take_rows
from recompute.wgrad import WeightGradients, collect_weight_gradients, weights_left_out
from tests.overlap.test_operation_counts import Counting

ENDS = torch.tensor([3, 3, 6], dtype=torch.int32)
ORDER = torch.tensor([2, 0, 1, 5, 3, 4])
INVERSE = ORDER.argsort()
FORMS: dict[str, Callable[..., Tensor]] = {
    "linear": lambda x, w, **left: linear(x.view(2, 3, 4), w[0], **left),
    "grouped": lambda x, w, **left: grouped_linear(x, w, ENDS, **left),
    "rows": lambda x, w, **left: take_rows(x @ w[0], ORDER, INVERSE, **left),
}


def leaves(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in ((6, 4), (3, 4, 4), (3, 4, 4))
    ]


def counted(run: Callable[[], Tensor]) -> tuple[Tensor, dict[str, int]]:
    """What it returns, and its products and gathers."""
    counting = Counting()
    now = counting.found["all"] = counting._now
    with counting:
        result = run()
    wanted = ("aten.mm", "aten.bmm", "aten.index_select", "overlap.grouped_mm")
    return result, {name: now[name] for name in wanted if now[name]}


def saved_by(run: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return run(), kept


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_same_graph_and_no_numbers(form: str, dtype: torch.dtype, late: bool) -> None:
    found = []
    for left in ({}, {"graph_only": True}):
        x, weight, _ = leaves(dtype)
        collector = WeightGradients()
        with weights_left_out() if late and form != "linear" else torch.enable_grad():
            out, saved = saved_by(lambda: FORMS[form](x, weight, **left))  # noqa: B023
        with collect_weight_gradients(collector):
            out.backward(torch.arange(24.0).view(out.shape).to(dtype))
        later = [gradient for _, gradient in collector.drain()]
        found.append((out, [*saved, x.grad, weight.grad, *later]))
    (real, wanted), (fake, given) = found
    assert (fake.shape, fake.dtype, fake.device) == (real.shape, real.dtype, real.device)
    assert fake.untyped_storage().nbytes() == dtype.itemsize
    assert len(given) == len(wanted)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(wanted, given, strict=True))


def test_autocast_decides_the_type() -> None:
    x, weight, _ = leaves(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        types = {FORMS[form](x, weight, graph_only=left).dtype for form in FORMS for left in (False, True)}
    assert types == {torch.bfloat16}


def test_rows_of_no_expert_and_none_at_all() -> None:
    out = grouped_linear(
        torch.randn(0, 4), leaves(torch.float32)[1], torch.zeros(3, dtype=torch.int32), graph_only=True
    )
    assert (out.shape, out.untyped_storage().nbytes()) == ((0, 4), 0)
    assert placeholder(torch.ones(2), 5, 0).shape == (5, 0)


def fill(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.normal_(parameter)


def experts() -> GroupedExperts:
    module = GroupedExperts(3, 4, 2)
    fill(module)
    return module


def layer(module: nn.Module) -> MoELayer:
    model = Decoder(ModelConfig(layers=1, experts=3, hidden=16))
    moe = model.layers[0]
    assert isinstance(moe, MoELayer)
    moe.register_module("experts", module)
    return moe


def test_rows_are_not_sorted_back_for_nobody() -> None:
    """With expert parallelism a gather follows the product: both are gone, one product and two gathers stay."""
    arrival = Arrival(torch.tensor([3, 0, 3]), ENDS, order=ORDER, inverse=INVERSE)
    moe = layer(experts())
    rows, probs = leaves(torch.float32)[0], torch.rand(6, requires_grad=True)
    found = []
    for left in ({}, {"graph_only": True}):
        rows.grad = probs.grad = None
        out, work = counted(lambda: moe.apply_experts(rows, probs, arrival, **left))  # noqa: B023
        out.backward(torch.arange(24.0).view(6, 4))
        found.append((work, rows.grad, probs.grad, *(p.grad for p in moe.experts.parameters())))
        moe.experts.zero_grad(set_to_none=True)
    assert found[0][0] == {"aten.index_select": 3, "overlap.grouped_mm": 2}
    assert found[1][0] == {"aten.index_select": 2, "overlap.grouped_mm": 1}
    assert all(torch.equal(a, b) for a, b in zip(found[0][1:], found[1][1:], strict=True))


@pytest.mark.parametrize("name", ["", "down"])
def test_a_hook_that_sees_the_output_sees_numbers(name: str) -> None:
    module = SwiGLU(4, 2)
    fill(module)
    seen: list[Tensor] = []
    handle = module.get_submodule(name).register_forward_hook(lambda _m, _i, output: seen.append(output))
    x = torch.randn(6, 4)
    assert torch.equal(module(x, graph_only=True), module(x))
    assert torch.equal(*seen)
    handle.remove()
    assert module(x, graph_only=True).untyped_storage().nbytes() == 4


def test_a_hook_of_all_modules_too() -> None:
    module, rows, probs = experts(), leaves(torch.float32)[0], torch.rand(6)
    arrival = Arrival(torch.tensor([3, 0, 3]), ENDS)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert torch.equal(module(rows, probs, arrival, graph_only=True), module(rows, probs, arrival))
    finally:
        handle.remove()
    assert module(rows, probs, arrival, graph_only=True).untyped_storage().nbytes() == 4


class OtherExperts(GroupedExperts):
    """A forward that knows nothing of it."""

    def forward(self, rows: Tensor, probs: Tensor, routing: object) -> Tensor:  # type: ignore[override]
        """Does not matter."""
        return rows


def test_what_does_not_take_it_is_not_asked() -> None:
    """A forward of another class, and a feed-forward that ends with somebody else's product."""
    plain = SwiGLU(4, 2)
    assert skips(plain)
    assert skips(experts())
    plain.register_module("down", nn.Linear(2, 4))
    assert not skips(plain)
    assert not skips(OtherExperts(3, 4, 2))
    assert not skips(nn.Linear(2, 4))
    model = Decoder(ModelConfig(layers=2, dense_layers=1))
    declared = lambda: [s.label for s in model.program().stages if s.graph_only is not None]  # noqa: E731
    assert declared() == ["0.experts", "1.shared", "1.experts"]
    dense, moe = (model.get_submodule(name) for name in ("layers.0.ffn", "layers.1"))
    dense.register_module("down", nn.Linear(model.config.ffn_width, model.config.hidden, bias=False))
    moe.register_module("experts", OtherExperts(model.config.experts, model.config.hidden, model.config.expert_width))
    assert declared() == ["1.shared"]
