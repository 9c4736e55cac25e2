"""An order and two chunks become the list of slots, whatever their layers (rows 37 and 62: lists of unequal length)."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap.builder import ProgramBuilder
from overlap.errors import ScheduleError
from overlap.expand import expand
from overlap.ir import Op, Program, format_schedule
from overlap.orders import ORDER_NAMES, Order, get_order
from tests.overlap.programs import dummy_program, nothing

ALONE_FORWARD = "F1.{0}.attn F1.{0}.dispatch F1.{0}.experts F1.{0}.combine F1.{0}.post "
ALONE_BACKWARD = "B0.{0}.post B0.{0}.combine B0.{0}.experts W0.{0}.experts B0.{0}.dispatch B0.{0}.attn W0.{0}.attn "
PAIR = (
    "B0.{1}.post B0.{1}.combine F1.{0}.attn B0.{1}.experts F1.{0}.dispatch W0.{1}.experts B0.{1}.dispatch "
    "F1.{0}.experts F1.{0}.combine B0.{1}.attn W0.{1}.attn F1.{0}.post "
)
START = "F1.embed B0.head W0.head "
END = "F1.head B0.embed"


def expanded(order: Order | str, forward: Program | None, backward: Program | None) -> str:
    slots = expand(
        get_order(order) if isinstance(order, str) else order,
        None if forward is None else (1, forward),
        None if backward is None else (0, backward),
    )
    return format_schedule(slots)


@pytest.mark.parametrize(
    ("forward", "backward", "expected"),
    [
        ("M", "M", START + PAIR.format(0, 0) + END),
        ("MM", "MM", START + PAIR.format(0, 1) + PAIR.format(1, 0) + END),
        ("M", "MMM", START + PAIR.format(0, 2) + ALONE_BACKWARD.format(1) + ALONE_BACKWARD.format(0) + END),
        ("MMM", "M", START + PAIR.format(0, 0) + ALONE_FORWARD.format(1) + ALONE_FORWARD.format(2) + END),
        ("", "", "F1.embed F1.head B0.head W0.head B0.embed"),
        (
            "MM",
            "",
            "F1.embed " + ALONE_FORWARD.format(0) + ALONE_FORWARD.format(1) + "F1.head B0.head W0.head B0.embed",
        ),
        ("", "M", "F1.embed F1.head B0.head W0.head " + ALONE_BACKWARD.format(0) + "B0.embed"),
        (
            "D",
            "M",
            "F1.embed B0.head W0.head B0.0.post B0.0.combine F1.0.attn B0.0.experts W0.0.experts B0.0.dispatch "
            "F1.0.experts B0.0.attn W0.0.attn F1.0.post F1.head B0.embed",
        ),
        (
            "M",
            "D",
            "F1.embed B0.head W0.head B0.0.post F1.0.attn B0.0.experts F1.0.dispatch W0.0.experts F1.0.experts "
            "F1.0.combine B0.0.attn W0.0.attn F1.0.post F1.head B0.embed",
        ),
        ("M", None, "F1.embed " + ALONE_FORWARD.format(0) + "F1.head"),
        (None, "M", "B0.head W0.head " + ALONE_BACKWARD.format(0) + "B0.embed"),
    ],
)
def test_multi_queue(forward: str | None, backward: str | None, expected: str) -> None:
    programs = [None if kinds is None else dummy_program(kinds) for kinds in (forward, backward)]
    assert expanded("multi_queue", *programs) == expected


def test_plain_takes_one_layer_after_the_other() -> None:
    assert expanded("plain", dummy_program("M"), dummy_program("MD")) == (
        "F1.embed B0.head W0.head F1.0.attn F1.0.dispatch F1.0.experts F1.0.combine F1.0.post "
        "B0.1.post B0.1.experts B0.1.attn W0.1.experts W0.1.attn "
        "B0.0.post B0.0.combine B0.0.experts B0.0.dispatch B0.0.attn W0.0.experts W0.0.attn F1.head B0.embed"
    )


def test_a_shared_expert_is_issued_beside_the_transfers() -> None:
    slots = expanded("multi_queue", dummy_program("M", shared=True), dummy_program("M", shared=True)).split()
    middle = slots[slots.index("F1.0.dispatch") : slots.index("F1.0.experts") + 1]
    assert middle == ["F1.0.dispatch", "F1.0.shared", "W0.0.experts", "B0.0.dispatch", "B0.0.shared", "F1.0.experts"]


@given(
    st.sampled_from(ORDER_NAMES),
    st.text("MD", max_size=5),
    st.text("MD", max_size=5),
    st.booleans(),
)
def test_every_stage_of_both_lists_is_issued_once(order: str, forward: str, backward: str, shared: bool) -> None:
    """Row 62: nothing is lost or doubled where one list is longer, and each side keeps its own order."""
    front, back = dummy_program(forward, shared=shared), dummy_program(backward, shared=shared)
    slots = expand(get_order(order), (1, front), (0, back))
    assert Counter(slot.key for slot in slots if slot.op is Op.FORWARD) == Counter(list(front.by_key))
    assert Counter(slot.key for slot in slots if slot.op is Op.BACKWARD) == Counter(list(back.by_key))
    assert {slot.key for slot in slots if slot.op is Op.WGRAD} == {stage.key for stage in back.stages if stage.wgrad}


CARRY = Order.parse("mine", "B.post W.attn F.* B.combine B.experts W.experts B.dispatch B.attn")


@pytest.mark.parametrize(
    ("forward", "backward", "expected"),
    [
        (
            None,
            "MM",
            "B0.1.post B0.1.combine B0.1.experts W0.1.experts B0.1.dispatch B0.1.attn "
            "B0.0.post W0.1.attn B0.0.combine B0.0.experts W0.0.experts B0.0.dispatch B0.0.attn W0.0.attn",
        ),
        (
            "DD",
            "M",
            "B0.0.post F1.0.attn F1.0.experts F1.0.post B0.0.combine B0.0.experts W0.0.experts B0.0.dispatch B0.0.attn "
            "W0.0.attn F1.1.attn F1.1.experts F1.1.post",
        ),
        ("D", "", "F1.0.attn F1.0.experts F1.0.post"),
    ],
)
def test_weight_gradients_carried_over(forward: str | None, backward: str, expected: str) -> None:
    """They come in the next pair, whatever it has; after the last one at its end."""
    programs = [None if kinds is None else dummy_program(kinds) for kinds in (forward, backward)]
    slots = [slot for slot in expanded(CARRY, *programs).split() if slot.count(".") == 2]
    assert " ".join(slots) == expected


def custom(*names: str, wgrad: bool = False) -> Program:
    b = ProgramBuilder()
    value = b.input("x")
    with b.layer(0):
        for name in names:
            (value,) = b.compute(name, nothing, value, outputs=(f"{name}_out",), wgrad=wgrad)
    return b.build(outputs=(value,))


def test_plain_fits_any_stage_names() -> None:
    own = custom("mix", "add", wgrad=True)
    assert expanded("plain", own, own) == "F1.0.mix F1.0.add B0.0.add B0.0.mix W0.0.add W0.0.mix"


def test_rest_takes_what_no_other_step_names() -> None:
    order = Order.parse("mine", "F.add F.* B.*")
    assert expanded(order, custom("mix", "add"), None) == "F1.0.add F1.0.mix"


@pytest.mark.parametrize(
    ("order", "program", "message"),
    [
        ("F.* B.* W.typo", custom("mix"), "order mine names an unknown stage 'typo'"),
        ("F.attn B.* W.*", custom("mix"), r"order mine has no step F\.mix, which stage 0\.mix needs; use order plain"),
        ("F.* W.*", custom("mix"), r"order mine has no step B\.mix"),
        ("F.* B.*", custom("mix", wgrad=True), r"order mine has no step W\.mix"),
        ("", custom("mix"), r"order mine has no step F\.mix"),
    ],
)
def test_orders_that_do_not_fit_are_refused(order: str, program: Program, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        expanded(Order.parse("mine", order), program, program)


def test_the_unknown_stage_is_marked() -> None:
    with pytest.raises(ScheduleError) as caught:
        expanded(Order.parse("mine", "F.* F.typo B.*"), custom("mix"), None)
    assert "     1  F.typo   <-- here" in str(caught.value)


def test_one_layer_with_weight_gradients_is_enough_to_need_a_step() -> None:
    b = ProgramBuilder()
    value = b.input("x")
    for index in range(2):
        with b.layer(index):
            (value,) = b.compute("mix", nothing, value, outputs=("y",), wgrad=index == 0)
    with pytest.raises(ScheduleError, match=r"no step W\.mix"):
        expanded(Order.parse("mine", "F.* B.*"), None, b.build())


@pytest.mark.parametrize("partner", [None, custom("mix")])
def test_a_chunk_without_layers_takes_any_order(partner: Program | None) -> None:
    """Row 37: an empty chunk has no stage that an order names; only the partner's names count."""
    order = Order.parse("mine", "F.mix B.mix")
    assert expanded(order, dummy_program(""), partner).startswith("F1.embed")
