"""Slots print and parse; a Program that does not fit together is refused, naming stage and value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap.builder import ProgramBuilder
from overlap.errors import ProgramError, ScheduleError
from overlap.ir import Effect, Input, Lane, Loss, Op, Program, Slot, Stage, format_schedule, parse_schedule
from overlap.side import Side
from tests.overlap.programs import Weight, dummy_program, nothing

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z_0-9]{0,8}", fullmatch=True)
NUMBERS = st.integers(0, 10**6)
SLOTS = st.builds(Slot, st.sampled_from(Op), NUMBERS, st.none() | NUMBERS, NAMES)


def stage(name: str, reads: str = "", writes: str = "", layer: int | None = None, **declared: Any) -> Stage:
    return Stage(
        layer=layer,
        name=name,
        lane=Lane.COMPUTE,
        reads=tuple(reads.split()),
        writes=tuple(writes.split()),
        forward=nothing,
        **declared,
    )


def wire(*what: str, **declared: Any) -> Stage:
    return replace(stage(*what, **declared), lane=Lane.COMM, adjoint=nothing)


def program(*stages: Stage, inputs: tuple[Input, ...] = (Input("x"),), **ends: Any) -> Program:
    return Program(stages, inputs, **ends)


@pytest.mark.parametrize(
    ("text", "slot"),
    [
        ("F0.3.dispatch", Slot(Op.FORWARD, 0, 3, "dispatch")),
        ("B1.head", Slot(Op.BACKWARD, 1, None, "head")),
        ("R12.10.post_attn", Slot(Op.REPLAY, 12, 10, "post_attn")),
        ("X0.hook", Slot(Op.CALL, 0, None, "hook")),
    ],
)
def test_slots_print_and_parse(text: str, slot: Slot) -> None:
    assert str(slot) == text
    assert Slot.parse(text) == slot
    assert slot.key == (slot.layer, slot.stage)


@given(st.lists(SLOTS))
def test_any_schedule_is_read_back(slots: list[Slot]) -> None:
    assert parse_schedule(format_schedule(slots)) == tuple(slots)


@pytest.mark.parametrize(
    "text", ["", "F", "F0", "F0.3", "Q0.attn", "F0.3.attn.x", "F-1.attn", "F0.3.2d", "F\u0663.attn"]
)
def test_what_is_no_slot_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="is no slot: write op, microbatch, layer, stage"):
        Slot.parse(text)


def test_a_schedule_may_be_spread_over_lines() -> None:
    assert [str(slot) for slot in parse_schedule("F0.embed\n  N0.0.attn\tB0.head")] == [
        "F0.embed",
        "N0.0.attn",
        "B0.head",
    ]


A = stage("a", "x", "y")
PASSES = wire("a", "x", "y", aliases=True)


@pytest.mark.parametrize(
    ("stages", "ends", "message"),
    [
        ((stage("a", "z", "y"),), {}, "stage a reads 'z', which no earlier stage writes"),
        ((stage("a", "x y", "z"), stage("b", "x", "y")), {}, "stage a reads 'y', which no earlier stage writes"),
        ((A, stage("b", "y", "y")), {}, "stage b writes 'y' a second time: values are single-assignment"),
        ((stage("a", "x", "x"),), {}, "stage a writes 'x' a second time"),
        ((stage("a", "x", "y y"),), {}, "stage a writes 'y' a second time"),
        ((stage("a", "x x", "y"),), {}, "stage a reads a value twice"),
        ((A, stage("a", "y", "z")), {}, "stage a stands twice"),
        ((stage("a", "x", "y", 0), stage("a", "y", "z", 0)), {}, "stage 0.a stands twice"),
        ((stage("a.b", "x", "y"),), {}, "stage a.b: a stage name is a word"),
        (
            (stage("a", "x", "y", 0), stage("a", "y", "z", 1), stage("b", "z", "w", 0)),
            {},
            "stage 0.b comes after another layer began: a layer's stages are contiguous",
        ),
        (
            (stage("a", "x", "y", 0), stage("m", "y", "z"), stage("b", "z", "w", 0)),
            {},
            "stage 0.b comes after another layer began",
        ),
        (
            (stage("a", "x", "y", 0), stage("m", "y", "z"), stage("a", "z", "w", 1)),
            {},
            "stage m stands between two layers: make it a stage of one of them",
        ),
        ((stage("a", "x", "y", 1),), {}, r"layers are numbered \(1,\): number them from 0 up"),
        ((stage("a", "x", "y", 1), stage("a", "y", "z", 0)), {}, r"layers are numbered \(1, 0\)"),
        (
            (stage("a", "x", "y", 0), stage("a", "y", "z", 1)),
            {"mtp_layers": frozenset({0})},
            r"MTP depths are layers \[0\]: they come after the decoder layers",
        ),
        ((A,), {"inputs": (Input("x"), Input("x", True))}, "input 'x' is declared twice"),
        ((A,), {"inputs": (Input("x"), Input("mask"))}, "input 'mask' is read by no stage"),
        ((A,), {"losses": (Loss("z"),)}, "output 'z' is written by no stage"),
        ((A,), {"outputs": ("x",)}, "output 'x' is written by no stage"),
        ((A,), {"losses": (Loss("y"), Loss("y"))}, "loss 'y' is declared twice"),
        (
            (stage("a", "x", "y", nondiff=frozenset("y")),),
            {"losses": (Loss("y"),)},
            "loss 'y' is declared without grad",
        ),
        ((stage("a", "x", "y", pins=("z",)),), {}, "stage a: pins names 'z', which it does not write"),
        ((stage("a", "x", "y", pins=("y",)),), {}, "stage a pins 'y': only a value without gradient"),
        ((stage("a", "x", "y", nondiff=frozenset("x")),), {}, "stage a: nondiff names 'x', which it does not write"),
        ((stage("a", "x", "y", effects=(Effect("x", print),)),), {}, "stage a: effects names 'x'"),
        ((stage("a", "x", "y", adjoint=nothing, wgrad=True),), {}, "stage a has an adjoint and parameters"),
        ((PASSES, stage("b", "y"), stage("c", "y")), {}, "stage a passes on memory: 'y' needs a single reader"),
        ((PASSES, wire("b", "y")), {}, "stage a passes on memory: 'y' needs a single reader, on the compute lane"),
        ((PASSES,), {"losses": (Loss("y"),)}, "stage a passes on memory: 'y' needs a single reader"),
        ((wire("b", "x", "z"), wire("a", "z", "y", aliases=True)), {}, "stage a passes on memory: 'z' is not the comp"),
    ],
)
def test_bad_programs_are_refused(stages: tuple[Stage, ...], ends: dict[str, Any], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        program(*stages, **ends)


def test_memory_may_be_passed_on_twice_and_values_without_gradient_read_by_anyone() -> None:
    passes = wire("a", "x", "y n", aliases=True, nondiff=frozenset("n"))
    last = (stage("c", "z n"), stage("d", "n"))
    known = program(passes, wire("b", "y n", "z", aliases=True), *last)
    assert known.by_key[None, "b"].allocates is Lane.COMPUTE
    assert replace(known.by_key[None, "b"], aliases=False).allocates is Lane.COMM


def test_a_parameter_of_two_stages_must_be_a_value() -> None:
    weight = Weight()
    with pytest.raises(ProgramError, match=r"stages a and b read the same parameter: make it a value .* \(R3\)"):
        program(stage("a", "x", "y", parameters=(weight,)), stage("b", "y", "z", parameters=(weight,)))
    with pytest.raises(ProgramError, match="an adjoint gives input gradients only"):
        program(stage("a", "x", "y", parameters=(weight,), adjoint=nothing))


def test_a_program_answers_who_writes_and_reads() -> None:
    moe = dummy_program("MD", shared=True)
    assert moe.layers == (0, 1)
    assert [s.label for s in moe.prologue] == ["embed"]
    assert [s.label for s in moe.epilogue] == ["head"]
    assert [s.name for s in moe.layer_stages[0]] == ["attn", "shared", "dispatch", "experts", "combine", "post"]
    assert moe.producers["0.sent"].label == "0.dispatch"
    assert [s.label for s in moe.readers["0.routing"]] == ["0.dispatch", "0.combine"]
    assert moe.live_ins([0]) == ("embedded",)
    assert moe.live_ins([0, 1]) == ("embedded",)
    assert moe.live_ins([1]) == ("0.out",)
    assert (moe.nondiff("0.routing"), moe.nondiff("0.tokens"), moe.nondiff("ids")) == (True, False, True)


def test_without_layers_everything_is_prologue() -> None:
    empty = dummy_program("")
    assert [s.label for s in empty.prologue] == ["embed", "head"]
    assert empty.epilogue == ()


def test_training_follows_parameters_and_values() -> None:
    """R6: a frozen prefix takes no part; behind the first trainable parameter everything does."""
    assert dummy_program("MM").trained() == frozenset(dummy_program("MM").by_key)
    frozen = dummy_program("MM", frozen=1)
    assert {key for key in frozen.trained() if key[0] is not None} == {s.key for s in frozen.layer_stages[1]}
    assert (None, "head") in frozen.trained()


def test_training_is_looked_up_at_every_call() -> None:
    weight, other = Weight(), Weight()
    trains = program(stage("a", "x", "y", parameters=(weight,)), stage("b", "x", "z", parameters=(other,)))
    both = trains.trained()
    weight.requires_grad = False
    assert trains.trained() == {(None, "b")}
    weight.requires_grad, other.requires_grad = True, False
    assert trains.trained() == {(None, "a")}
    other.requires_grad = True
    assert trains.trained() is both


def test_shared_parameters_train_each_by_itself() -> None:
    """R6: what reads only frozen ones takes no part, though others that the same stage writes train."""
    b = ProgramBuilder()
    frozen, trains = Weight(), Weight()
    frozen.requires_grad = False
    left, right = b.parameter("frozen", frozen), b.parameter("trains", trains)
    (h,) = b.compute("a", len, b.input("x"), left, outputs=("h",))
    b.compute("b", len, h, left, right, outputs=("y",))
    shared = b.build()
    assert shared.trained() == {(None, "weights"), (None, "weight.trains"), (None, "b")}
    side = Side(shared, (), shared.trained())
    assert [side.needs_grad(value) for value in ("weight.frozen", "weight.trains", "h", "y")] == [
        False, True, False, True,
    ]  # fmt: skip


def test_an_input_that_needs_a_gradient_trains_its_readers() -> None:
    fed = program(stage("a", "x", "y"), stage("b", "y", "z"), inputs=(Input("x", needs_grad=True),))
    assert fed.trained() == {(None, "a"), (None, "b")}
    assert replace(fed, inputs=(Input("x"),)).trained() == frozenset()
