"""The engine runs plans: what it leaves behind, how it adds gradients, how it fails."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlap.builder import ProgramBuilder, Value
from overlap.chunk import ModelChunk
from overlap.engine import Engine, MicrobatchState
from overlap.ir import Op, Slot
from overlap.lanes import NullLanes
from overlap.lower import Issue, Plan, lower
from overlap.orders import ORDER_NAMES, get_order
from overlap.plan import BACKWARD_SIDE, FORWARD_SIDE, make_schedule
from overlap.reference import reference_step
from overlap.side import Side
from overlap.step import train_step
from recompute import RecomputeConfig
from tests.overlap.programs import Own, differences, result_of, side_of, tiny_chunk, tiny_feeds
from tests.recompute.looks import doubled_twice

uniform, block, none = RecomputeConfig.uniform, RecomputeConfig.block, RecomputeConfig.none


def engine(*observers) -> Engine:
    return Engine(NullLanes(), run_seed=0, step=0, generators=(torch.default_generator,), observers=observers)


def plan_of(
    forward: Side | None, backward: Side | None, order: str = "multi_queue", survivors: Side | None = None
) -> Plan:
    """The plan of a pair of sides; a forward keeps what `survivors` needs."""
    schedule = make_schedule(get_order(order), forward, backward, delayed=False)
    sides = {n: s for n, s in ((FORWARD_SIDE, forward), (BACKWARD_SIDE, backward)) if s is not None}
    kept = {}
    if survivors is not None:
        kept = {FORWARD_SIDE: plan_of(None, survivors).imports.get(BACKWARD_SIDE, frozenset())}
    return lower(schedule, sides, kept)


@pytest.mark.parametrize("config", [none(), uniform(1), uniform(2), block(1)], ids=str)
def test_tables_are_empty_afterwards(config: RecomputeConfig) -> None:
    chunk = tiny_chunk("MD", shape={"tied": True, "stateful": True})
    side = side_of(chunk.program, config)
    owner = MicrobatchState(0, tiny_feeds(1)[0], 1.0)
    engine().run(plan_of(side, None, survivors=side), {FORWARD_SIDE: owner})
    assert owner.leftovers() != []
    engine().run(plan_of(None, side), {BACKWARD_SIDE: owner})
    assert owner.leftovers() == []
    assert (owner.values, owner.grads, owner.tapes, owner.pending, owner.snapshots) == ({}, {}, {}, {}, {})


def test_leftovers_are_named() -> None:
    owner = MicrobatchState(3, {"ids": torch.ones(1)}, 1.0)
    assert owner.leftovers() == ["""values of microbatch 3: ["('ids', 0)"]"""]


class Watch:
    """Weak references to every tensor that a stage of a segment writes."""

    def __init__(self) -> None:
        self.seen: dict[str, weakref.ref[Tensor]] = {}
        self.alive_at: dict[str, set[str]] = {}

    def before(self, issue: Issue, owner: MicrobatchState) -> None:
        self.alive_at[str(issue.slot)] = {name for name, ref in self.seen.items() if ref() is not None}

    def after(self, issue: Issue, owner: MicrobatchState) -> None:
        for key in issue.writes:
            if key is not None and torch.is_tensor(owner.values[key]):
                self.seen[key[0] + "'" * key[1]] = weakref.ref(owner.values[key])


def test_values_die_at_their_last_use() -> None:
    """R2: before a backward begins, only segment inputs and routing are there; the replay's die with their readers."""
    chunk = tiny_chunk("MM", order="plain", recompute=uniform(1))
    watch = Watch()
    gc.disable()
    try:
        train_step(chunk, tiny_feeds(1), observers=(watch,))
    finally:
        gc.enable()
    gap = {"embedded", "0.out", "0.routing", "1.routing", "loss"}
    # Counts wait for the step to succeed, since an effect reads them.
    assert watch.alive_at["B0.head"] - {"0.counts", "1.counts"} <= gap
    assert {name for name, ref in watch.seen.items() if ref() is not None} <= {"loss"}


def test_what_a_stage_raises_names_the_slot() -> None:
    class Fail:
        def before(self, issue: Issue, owner: MicrobatchState) -> None:
            if str(issue.slot) == "R0.1.experts" and owner.number == 1:
                raise KeyError("mine")

        def after(self, issue: Issue, owner: MicrobatchState) -> None:
            pass

    with pytest.raises(KeyError, match="mine") as caught:
        train_step(tiny_chunk("MM", recompute=uniform(1)), tiny_feeds(2), observers=(Fail(),))
    assert caught.value.__notes__ == ["in slot R0.1.experts of the plan, microbatch 1 of the step"]


def test_observers_see_values_before_they_are_freed() -> None:
    seen: list[str] = []

    class Look:
        def before(self, issue: Issue, owner: MicrobatchState) -> None:
            seen.append(f"before {issue.slot}")

        def after(self, issue: Issue, owner: MicrobatchState) -> None:
            assert all(key in owner.values for key in issue.frees)
            seen.append(f"after {issue.slot}")

    train_step(tiny_chunk("M", recompute=uniform(1)), tiny_feeds(1), observers=(Look(),))
    assert seen[:4] == ["before F1.embed", "after F1.embed", "before N1.0.attn", "after N1.0.attn"]
    assert seen[-1] == "after B0.embed"


READERS = ("a", "b", "c", "d")


def many_readers(module: Any, b: ProgramBuilder) -> None:
    """One value with four readers, and one of them uses it twice."""
    (x,) = b.compute("embed", lambda x: x * module.weight, b.input("x"), outputs=("h",), parameters=(module.weight,))
    results: list[Value] = []
    for place, name in enumerate(READERS):
        factor = 10.0**-place / 3

        def read(h: Tensor, factor: float = factor) -> Tensor:
            return torch.tanh(h * factor) + h * (factor * 1.7)

        results += b.compute(name, read, x, outputs=(name,))
    (loss,) = b.compute("head", lambda *r: torch.stack(r).square().sum(), *results, outputs=("loss",))
    b.loss(loss)


def gradient_of(slots: tuple[Slot, ...], reverse: bool = False) -> Tensor:
    torch.manual_seed(0)
    chunk = ModelChunk(Own(many_readers, weight=nn.Parameter(torch.randn(64))))
    side = side_of(chunk.program)
    owner = MicrobatchState(0, {"x": torch.randn(64)}, 1.0)
    plan = lower(slots, {0: side}, {})
    if reverse:
        issues = (replace(i, pieces=tuple(group[::-1] for group in i.pieces)) for i in plan.issues)
        plan = replace(plan, issues=tuple(issues))
    engine().run(plan, {0: owner})
    gradient = chunk.get_parameter("module.weight").grad
    assert gradient is not None
    return gradient


def test_gradients_of_many_readers_are_added_in_one_order() -> None:
    """R3: reverse program order, whatever order the backward slots come in; the other way round is another sum."""
    torch.manual_seed(0)
    reference = ModelChunk(Own(many_readers, weight=nn.Parameter(torch.randn(64))))
    reference_step(reference, [{"x": torch.randn(64)}])
    wanted = reference.get_parameter("module.weight").grad
    assert wanted is not None

    def slot(op: Op, name: str) -> Slot:
        return Slot(op, 0, None, name)

    forward = [slot(Op.FORWARD, name) for name in ("embed", *READERS, "head")]
    for order in permutations(READERS):
        backward = [slot(Op.BACKWARD, name) for name in ("head", *order, "embed")]
        assert torch.equal(gradient_of((*forward, *backward)), wanted)
    assert not torch.equal(gradient_of((*forward, *backward), reverse=True), wanted)


@pytest.mark.parametrize("order", ORDER_NAMES)
@pytest.mark.parametrize("config", [none(), uniform(1), uniform(2)], ids=str)
@pytest.mark.parametrize(("front", "back"), [("MM", ""), ("", "MM"), ("MDM", "MM"), ("M", "MDMM"), ("", "")])
def test_chunks_of_unequal_length_run_as_a_pair(front: str, back: str, config: RecomputeConfig, order: str) -> None:
    """Rows 37 and 62: layer counts (2,0), (0,2), (3,2), (1,4), an empty chunk beside another."""
    feeds = tiny_feeds(2)
    wanted = []
    for kinds, feed in ((front, feeds[1]), (back, feeds[0])):
        chunk = tiny_chunk(kinds)
        torch.manual_seed(0)
        reference_step(chunk, [feed])
        wanted.append(result_of(chunk))
    chunks = [tiny_chunk(kinds) for kinds in (front, back)]
    torch.manual_seed(0)
    ahead, behind = (side_of(chunk.program, config) for chunk in chunks)
    first, second = (MicrobatchState(0, feed, 1.0) for feed in (feeds[0], feeds[1]))
    engine().run(plan_of(behind, None, order, survivors=behind), {FORWARD_SIDE: first})
    pair = plan_of(ahead, behind, order, survivors=ahead)
    engine().run(pair, {FORWARD_SIDE: second, BACKWARD_SIDE: first})
    engine().run(plan_of(None, ahead, order), {BACKWARD_SIDE: second})
    for owner in (second, first):
        assert owner.leftovers() == []
        for effect, value in owner.effects:
            effect.apply(value)
    assert [differences(w, result_of(chunk)) for w, chunk in zip(wanted, chunks, strict=True)] == [[], []]
    issued = [(i.slot.microbatch, i.stage.key) for i in pair.issues if i.slot.op in {Op.FORWARD, Op.NO_GRAD}]
    assert issued == [(FORWARD_SIDE, stage.key) for stage in chunks[0].program.stages]


def test_a_pinned_choice_is_used_again() -> None:
    """R7: the replay is handed the first pass's routing; what it would choose itself does not matter."""
    chunk = tiny_chunk("M", recompute=uniform(1))
    seen: list[tuple[str, bool]] = []

    class Look:
        def before(self, issue: Issue, owner: MicrobatchState) -> None:
            self.routing = owner.values.get(("0.routing", 0))

        def after(self, issue: Issue, owner: MicrobatchState) -> None:
            if issue.slot.stage in {"dispatch", "combine"} and issue.reads:
                key = next(key for key in issue.reads if key[0] == "0.routing")
                seen.append((str(issue.slot), owner.values[key] is self.routing))

    train_step(chunk, tiny_feeds(1), observers=(Look(),))
    assert [slot for slot, same in seen if same] == [
        "N1.0.dispatch", "N1.0.combine", "B0.0.combine", "R0.0.dispatch", "B0.0.dispatch",
    ]  # fmt: skip


@pytest.mark.parametrize("recompute", [none(), uniform(1)])
def test_a_handle_reaches_the_replay_and_the_adjoint(recompute: RecomputeConfig) -> None:
    """R7: what a transport learned in the first pass may be any object; it is asked for once a microbatch."""
    made: list[object] = []
    used: list[tuple[str, object]] = []

    def send(x: Tensor, *, pinned: tuple[object] | None) -> tuple[Tensor, object]:
        if pinned is None:
            made.append(object())
            return x.clone(), made[-1]
        used.append(("replay", pinned[0]))
        return x.clone(), pinned[0]

    def send_adjoint(grads: Sequence[Tensor | None], pinned: Sequence[object]) -> tuple[Tensor | None]:
        used.append(("adjoint", *pinned))
        return (grads[0],)

    def build(module: Any, b: ProgramBuilder) -> None:
        x = b.input("x")
        with b.layer(0):
            (y,) = b.compute("attn", lambda x: x * module.weight, x, outputs=("y",), parameters=(module.weight,))
            sent, _ = b.comm("go", send, y, outputs=("sent",), nondiff=("h",), pins=("h",), adjoint=send_adjoint)
            (loss,) = b.compute("sum", lambda sent: sent.square().sum(), sent, outputs=("loss",))
        b.loss(loss)

    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    chunk = ModelChunk(Own(build, weight=weight), recompute=recompute, order="plain")
    chunk.checked = True
    train_step(chunk, [{"x": torch.tensor([3.0, 4.0])}, {"x": torch.ones(2)}])
    assert weight.grad is not None
    assert weight.grad.tolist() == [(18 + 2) / 2, (64 + 4) / 2]
    replays = [("replay",)] if recompute.method else []
    assert used == [(*what, handle) for handle in made for what in (*replays, ("adjoint",))]
    assert len(made) == 2


@pytest.mark.parametrize("sheds", [(0,), ()])
def test_a_stage_that_sheds_takes_its_gradient_over(sheds: tuple[int, ...]) -> None:
    """Its memory goes when the first node has used it; elsewhere backward holds it to the end."""
    seen: list[weakref.ref[torch.UntypedStorage]] = []
    alive: list[bool] = []

    def look(gradient: Tensor) -> None:
        if not seen:
            seen.append(weakref.ref(gradient.untyped_storage()))
        alive.append(seen[0]() is not None)

    def build(module: Any, b: ProgramBuilder) -> None:
        (h,) = b.compute("embed", lambda x: x * module.first, b.input("x"), outputs=("h",), parameters=(module.first,))
        (y,) = b.compute("mine", doubled_twice(look), h, outputs=("y",), sheds=sheds)
        (loss,) = b.compute("head", lambda y: y.square().sum(), y, outputs=("loss",))
        b.loss(loss)

    first = nn.Parameter(torch.ones(3))
    chunk = ModelChunk(Own(build, first=first))
    chunk.checked = True  # the check runs no backward of this stage
    train_step(chunk, [{"x": torch.ones(2, 3)}])
    assert alive == [True, not sheds]
    assert first.grad is not None
    assert first.grad.tolist() == [64.0] * 3
