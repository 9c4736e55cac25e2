"""Feed-forwards against their formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overlap.dispatch import make_routing
from overlap.model import GroupedExperts, SwiGLU, experts, init_weights
from overlap.model.linear import Linear
from overlap.model.permute import permute, reorder, unpermute
from overlap.model.precision import default_dtype
from overlap.model.swiglu import swiglu as elementwise
from recompute.inner import rebuilding
from recompute.modules import RecomputeModule


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ gate_up).chunk(2, -1)
    return (F.silu(gate) * up) @ down


def test_swiglu() -> None:
    module = SwiGLU(6, 4)
    init_weights(module, 0)
    x = torch.randn(2, 3, 6)
    torch.testing.assert_close(module(x), swiglu(x, module.gate_up.weight.T, module.down.weight.T))


def test_experts_equal_a_loop_over_tokens() -> None:
    """An expert without tokens, a weighted sum over the others."""
    with default_dtype(torch.float64):
        module = GroupedExperts(4, 6, 5)
    init_weights(module, 0)
    x, probs = torch.randn(3, 6, dtype=torch.float64), torch.rand(3, 2, dtype=torch.float64)
    ids = torch.tensor([[3, 0], [0, 1], [1, 3]])
    routing = make_routing(ids, 4)
    rows = module(permute(x, routing), reorder(probs, routing), routing)
    expected = [
        sum(p * swiglu(token, module.gate_up[e], module.down[e]) for p, e in zip(weights, chosen.tolist(), strict=True))
        for token, weights, chosen in zip(x, probs, ids, strict=True)
    ]
    torch.testing.assert_close(unpermute(rows, routing), torch.stack(expected))
    rows.sum().backward()
    assert module.gate_up.grad is not None
    assert module.gate_up.grad[2].eq(0).all()


def test_no_rows_at_all() -> None:
    module = GroupedExperts(2, 6, 5)
    init_weights(module, 0)
    rows = torch.empty(0, 6, requires_grad=True)
    module(rows, torch.empty(0), make_routing(torch.empty(0, 1, dtype=torch.int64), 2)).sum().backward()
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert parameter.grad.eq(0).all()


def test_rows_of_no_expert_are_zero_and_train_nothing() -> None:
    """Row 34's tokens: rows behind the counts belong to padding."""
    module = GroupedExperts(3, 4, 2)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    ids = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1]])
    padding = torch.tensor([False, True, False, True])
    routing, alone = make_routing(ids, 3, padding), make_routing(ids[~padding], 3)
    rows = torch.randn(8, 4, requires_grad=True)
    probs = torch.rand(8, requires_grad=True)
    out = module(rows, probs, routing)
    assert torch.equal(out[:4], module(rows[:4], probs[:4], alone))
    assert torch.equal(out[4:], torch.zeros(4, 4))
    out.square().sum().backward()
    assert rows.grad is not None
    assert probs.grad is not None
    assert torch.equal(rows.grad[4:], torch.zeros(4, 4))
    assert torch.equal(probs.grad[4:], torch.zeros(4))


def test_ends_must_cover_the_rows_unless_padding_follows() -> None:
    module = GroupedExperts(2, 4, 2)
    routing = make_routing(torch.tensor([[0], [1]]), 2)
    with pytest.raises(ValueError, match=r"end at \[1, 2\], for 3 rows"):
        module(torch.randn(3, 4), torch.rand(3), routing)
    with pytest.raises(ValueError, match=r"end at \[1, 2\], for 1 rows"):
        module(torch.randn(1, 4), torch.rand(1), routing._replace(covers=False))


class Squashed(Linear):
    """Puts behind the product what keeps its own result for backward."""

    def forward(self, x: Tensor, *, graph_only: bool = False) -> Tensor:
        return super().forward(x).tanh()


def in_memory_of_its_own(gate_up: Tensor, probs: Tensor | None = None, *, consumes: bool = False) -> Tensor:
    return elementwise(gate_up, probs)


def places(module: nn.Module, *inputs: Any, modules: tuple[str, ...] = ()) -> tuple[bool, list[Tensor]]:
    """Whether the first product's output and its gradient share their memory, and all gradients."""
    leaves = [x.clone().requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x for x in inputs]
    found: list[bool] = []

    def noted(gate_up: Tensor, *args: Any, **settings: Any) -> Tensor:
        if gate_up.requires_grad and gate_up.grad_fn is not None:
            place = gate_up.data_ptr()
            gate_up.register_hook(lambda grad: found.append(grad.data_ptr() == place))
        result: Tensor = using(gate_up, *args, **settings)
        return result

    using = vars(experts)["swiglu"]
    with pytest.MonkeyPatch.context() as patch, rebuilding([RecomputeModule(name) for name in modules]):
        patch.setitem(vars(experts), "swiglu", noted)
        result = module(*leaves)
        module.zero_grad()
        result.backward(torch.linspace(-1, 1, result.numel()).view_as(result).to(result.dtype))
    tensors = [*module.parameters(), *(x for x in leaves if torch.is_tensor(x) and x.requires_grad)]
    return found[0], [tensor.grad for tensor in tensors if tensor.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("modules", [(), ("moe_act",)])
def test_experts_write_gradients_over_their_first_product(modules, dtype, monkeypatch) -> None:
    """And get the same gradients, whether the result of SwiGLU is rebuilt from that product or kept."""
    with default_dtype(dtype):
        module = GroupedExperts(3, 6, 5)
    init_weights(module, 0)
    routing = make_routing(torch.tensor([[2, 0], [0, 2], [2, 0]]), 3)
    inputs = torch.randn(6, 6).to(dtype), torch.rand(6), routing
    over, found = places(module, *inputs, modules=modules)
    monkeypatch.setitem(vars(experts), "swiglu", in_memory_of_its_own)
    control, want = places(module, *inputs, modules=modules)
    assert (over, control) == (True, False)
    assert len(found) == len(want) == 4
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("case", ["plain", "hooked", "subclass", "object", "other"])
def test_a_dense_layer_does_where_nobody_else_sees_that_product(case, monkeypatch) -> None:
    module = SwiGLU(6, 4)
    seen: list[tuple[Tensor, Tensor]] = []
    if case == "subclass":
        module.gate_up = Squashed(6, 8)
    if case == "other":
        module.gate_up = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh())  # type: ignore[assignment]
    init_weights(module, 0)
    if case == "hooked":
        module.gate_up.register_forward_hook(lambda _, __, made: seen.append((made, made.detach().clone())))
    if case == "object":
        product = module.gate_up.forward
        monkeypatch.setattr(module.gate_up, "forward", lambda x: product(x).tanh())
    x = torch.randn(2, 3, 6)
    over, found = places(module, x)
    assert over == (case == "plain")
    assert all(torch.equal(made, then) for made, then in seen)
    monkeypatch.setitem(vars(experts), "swiglu", in_memory_of_its_own)
    assert all(torch.equal(a, b) for a, b in zip(found, places(module, x)[1], strict=True))
