"""Parts that are rebuilt in their stage's backward: the same bits, one rebuild, and nothing kept in between."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from recompute import RecomputeError, RecomputeModule, inner
from recompute.inner import rebuild, rebuilding, rebuilds
from recompute.rng import default_generators, seeded

ACT, CORE, NORM, UP = (RecomputeModule(name) for name in ("moe_act", "core_attn", "layernorm", "mla_up_proj"))
GENERATORS = default_generators(torch.device("cpu"))


class Body:
    """A stage of two parts in a row and a projection behind them; counts the calls of each part."""

    def __init__(self, dropout: float = 0.0) -> None:
        torch.manual_seed(0)
        self.first = torch.randn(6, 6, requires_grad=True)
        self.second = torch.randn(6, 6, requires_grad=True)
        self.dropout = dropout
        self.calls = {UP: 0, ACT: 0}

    def up(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls[UP] += 1
        mapped = (x @ self.first).tanh()
        return mapped, mapped.exp().transpose(0, 1)

    def act(self, left: Tensor, right: Tensor) -> Tensor:
        self.calls[ACT] += 1
        mixed = F.dropout(left.sigmoid() * right, self.dropout)
        return mixed * mixed

    def __call__(self, x: Tensor) -> Tensor:
        left, right = rebuild(UP, self.up, x * 2)
        mixed = rebuild(ACT, self.act, left, right.t(), draws=self.dropout > 0)
        # Draws of the rest of the stage go on as if the part had drawn nothing.
        result: Tensor = (mixed @ self.second + torch.rand(6)).square()
        return result


def gradients(body: Body, modules: set[RecomputeModule], *, autocast: bool = False) -> list[Tensor]:
    """Loss and gradients of one forward and backward; other draws happen in between."""
    x = torch.linspace(-1, 1, 36).view(6, 6).requires_grad_()

    def precision() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast, cache_enabled=False)

    with seeded(7, GENERATORS), precision(), rebuilding(modules, (precision,)):
        loss = body(x).float().sum()
    torch.rand(3)
    loss.backward()
    found = [loss.detach(), x.grad, body.first.grad, body.second.grad]
    assert all(torch.is_tensor(item) for item in found)
    return found  # type: ignore[return-value]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("modules", [{UP}, {ACT}, {UP, ACT}])
def test_no_bit_changes_and_each_part_is_rebuilt_once(
    modules: set[RecomputeModule], dropout: float, autocast: bool
) -> None:
    plain, rebuilt = Body(dropout), Body(dropout)
    before = torch.get_rng_state()
    expected = gradients(plain, set(), autocast=autocast)
    torch.set_rng_state(before)
    assert same(gradients(rebuilt, modules, autocast=autocast), expected)
    assert plain.calls == {UP: 1, ACT: 1}
    assert rebuilt.calls == {name: 1 + (name in modules) for name in (UP, ACT)}


def test_drawing_anew_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control (R4): a rebuild that draws from the live generator gives other gradients."""
    expected = gradients(Body(0.4), set())

    @contextmanager
    def live() -> Iterator[None]:
        yield

    monkeypatch.setattr(inner, "draws_inside", lambda name: live)
    assert not same(gradients(Body(0.4), {ACT}), expected)


def test_leaving_the_precision_out_is_seen() -> None:
    """Control (R15): a part that is rebuilt without the first pass's autocast saves other tensors, and is refused."""
    body = Body()
    x = torch.ones(6, 6, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), rebuilding({UP}):
        loss = body(x).float().sum()
    with pytest.raises(RecomputeError, match=r"module mla_up_proj saved .*bfloat16.* when it was rebuilt"):
        loss.backward()


def test_what_parts_save_and_give_is_let_go() -> None:
    """Of two parts and a projection only the input of the first is kept."""
    counts = {}
    for modules in (frozenset(), frozenset({ACT}), frozenset({UP, ACT})):
        alive: weakref.WeakSet[Any] = weakref.WeakSet()
        body = Body()

        def watch(function: Callable[..., Any], alive: weakref.WeakSet[Any] = alive) -> Callable[..., Any]:
            def run(*args: Tensor) -> Any:
                result = function(*args)
                for output in result if isinstance(result, tuple) else (result,):
                    alive.add(output.untyped_storage())
                return result

            return run

        body.up, body.act = watch(body.up), watch(body.act)  # type: ignore[method-assign]
        with seeded(7, GENERATORS), rebuilding(modules):
            loss = body(torch.ones(6, 6, requires_grad=True)).sum()
        gc.collect()
        counts[modules] = len(alive)
        loss.backward()
        assert len(alive) == 0
    assert counts == {frozenset(): 3, frozenset({ACT}): 2, frozenset({UP, ACT}): 0}


def test_what_was_rebuilt_is_let_go_when_it_is_fetched() -> None:
    """A graph that is kept for a second backward holds no more than before the first, and gives the same again."""
    body = Body()
    x = torch.ones(6, 6, requires_grad=True)
    parts = []

    class Watched(inner._Part):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            parts.append(self)

    with pytest.MonkeyPatch.context() as patch, seeded(7, GENERATORS), rebuilding({UP, ACT}):
        patch.setattr(inner, "_Part", Watched)
        loss = body(x).sum()
    loss.backward(retain_graph=True)
    first = body.first.grad
    assert first is not None
    first = first.clone()
    assert [(part._built, part._outputs, part.builds) for part in parts] == [({}, {}, 1)] * 2
    loss.backward()
    assert body.first.grad is not None
    assert torch.equal(body.first.grad, first + first)
    assert [part.builds for part in parts] == [2, 2]


def test_hooks_of_the_caller_see_what_is_kept() -> None:
    """Saved-tensor hooks do not add up in torch; those around a stage still get every tensor that stays."""
    plain = gradients(Body(), set())
    packed: list[tuple[int, ...]] = []
    unpacked: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(1)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        found = gradients(Body(), {UP, ACT})
    assert same(found, plain)
    assert len(packed) == len(unpacked) > 0
    inside = len(packed)
    packed.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        gradients(Body(), set())
    assert len(packed) > inside


def test_a_part_that_differs_is_refused() -> None:
    """A rebuild that saves other tensors than the first pass did."""
    grows = iter((3, 4))

    def part(x: Tensor) -> Tensor:
        return torch.cat([x] * next(grows)).exp().sum(0)

    x = torch.ones(2, 2, requires_grad=True)
    with rebuilding({NORM}):
        loss = rebuild(NORM, part, x).sum()
    with pytest.raises(RecomputeError, match="module layernorm saved"):
        loss.backward()


def test_draws_without_a_seed_are_refused() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    with rebuilding({CORE}), pytest.raises(RecomputeError, match="draws outside a seeded stage"):
        rebuild(CORE, F.dropout, x, draws=True)
    assert rebuild(CORE, F.dropout, x, draws=True).shape == x.shape


def test_nothing_happens_without_a_graph_or_an_order_to_rebuild() -> None:
    body = Body()
    x = torch.ones(6, 6)
    with torch.no_grad(), rebuilding({UP, ACT}):
        assert not rebuilds(UP)
        body(x)
    assert not rebuilds(UP)
    body(x)
    with rebuilding({CORE}):
        assert (rebuilds(CORE), rebuilds(UP)) == (True, False)
        body(x)
    assert body.calls == {UP: 3, ACT: 3}


def test_a_failed_stage_leaves_no_scope() -> None:
    with pytest.raises(ZeroDivisionError), rebuilding({UP}):
        rebuild(UP, lambda x: x / (1 // 0), torch.ones(1))
    assert inner._scopes == []
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_a_new_storage_at_an_old_address_is_no_output() -> None:
    """The memory of a part's output is given out again while the stage still runs: what lies there then is kept."""
    x = torch.ones(64, requires_grad=True)
    with rebuilding({ACT}):
        scope = inner._scopes[-1]
        for _ in range(8):
            rebuild(ACT, torch.exp, x).sum()
            assert scope._outputs == {}
        kept = rebuild(ACT, torch.exp, x)
        assert len(scope._outputs) == 1
        loss = (kept * kept).sum()
    loss.backward()
    assert torch.equal(x.grad, 2 * x.detach().exp() * x.detach().exp())
