"""Orders read from their text tables; a wrong step is shown with a mark."""

from __future__ import annotations

from typing import Any

import pytest

from overlap.errors import ScheduleError
from overlap.ir import Op, Slot, parse_schedule
from overlap.orders import ORDER_NAMES, STAGE_NAMES, Order, carried, get_order
from recompute import ConfigError, Replay

MULTI_QUEUE = (
    "B.post B.combine F.attn B.experts F.dispatch F.shared W.experts B.dispatch B.shared W.shared F.experts F.combine "
    "B.attn W.attn F.post"
)


def test_plain() -> None:
    assert str(get_order("plain")) == "F.* B.* W.*"


def test_multi_queue() -> None:
    """The steps of a layer with these stages; attention cut in two and MTP have steps of their own."""
    words = str(get_order("multi_queue")).split()
    stages = {"attn", "dispatch", "shared", "experts", "combine", "post"}
    shown = [word for word in words if word.partition(".")[2] in stages and word[0] in "FB"]
    assert [word for word in MULTI_QUEUE.split() if word[0] in "FB"] == shown
    for stage in ("experts", "shared", "attn"):
        assert words.index(f"W.{stage}") > words.index(f"B.{stage}")


def test_names() -> None:
    assert ORDER_NAMES[:2] == ("plain", "multi_queue")
    for name in ORDER_NAMES:
        assert Order.parse(name, str(get_order(name))) == get_order(name)
    with pytest.raises(ScheduleError, match="order 'fast' is unknown: choose one of plain, multi_queue"):
        get_order("fast")


@pytest.mark.parametrize("name", ORDER_NAMES)
def test_built_in_orders_name_known_stages_only(name: str) -> None:
    assert {step.stage for step in get_order(name).steps} <= {*STAGE_NAMES, "*"}


def test_transfers_stand_before_the_compute_that_hides_them() -> None:
    """Row 63 (the order's part): the launch list puts each all-to-all before the other side's compute."""
    steps = [str(step) for step in get_order("multi_queue").steps]
    for transfer, compute in [
        ("B.combine", "F.attn"),
        ("F.dispatch", "F.shared"),
        ("B.dispatch", "F.experts"),
        ("F.combine", "B.attn"),
    ]:
        assert steps.index(transfer) < steps.index(compute)


def test_comments_and_lines_do_not_matter() -> None:
    assert str(Order.parse("mine", "F.a # first\n\n # nothing\nB.a  W.*")) == "F.a B.a W.*"


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("B.a W.a B.b W.b", ""),
        ("W.a B.b W.b B.a", "W.a"),
        ("W.a B.* W.*", "W.a"),
        ("B.b W.a B.* W.b", "W.a"),
        ("W.* B.a B.b", "W.*"),
        ("B.a W.* B.b", ""),
        ("B.a W.* B.*", "W.*"),
        ("W.a F.a", ""),
        ("W.* F.*", ""),
    ],
)
def test_weight_gradients_before_their_backward_are_carried_over(steps: str, expected: str) -> None:
    assert " ".join(map(str, carried(Order.parse("mine", steps).steps))) == expected


@pytest.mark.parametrize("replay", Replay)
@pytest.mark.parametrize("name", ORDER_NAMES)
def test_no_built_in_order_carries_weight_gradients(name: str, replay: Replay) -> None:
    """R13: in a recomputed segment they stay inside their own layer pair unless asked."""
    assert not carried(get_order(name, replay).steps)


def test_an_order_says_what_it_names() -> None:
    order = Order.parse("mine", "F.a F.* B.b")
    assert order.named(Op.FORWARD) == {"a"}
    assert (order.has_rest(Op.FORWARD), order.has_rest(Op.BACKWARD)) == (True, False)


@pytest.mark.parametrize("word", ["attn", "F", "F.", "F.2", "G.attn", "N.attn", "X.attn", "F.a.b", "f.attn", "F.**"])
def test_what_is_no_step_is_marked(word: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Order.parse("mine", f"F.attn {word} B.attn")
    first, *rest = str(caught.value).splitlines()
    assert first.startswith(f"order mine: {word!r} is no step; write F, B")
    assert rest == ["     0  F.attn", f"     1  {word}   <-- here", "     2  B.attn"]


def test_a_step_stands_once() -> None:
    with pytest.raises(ScheduleError, match=r"order mine: F\.attn stands twice") as caught:
        Order.parse("mine", "F.attn B.attn F.attn")
    assert "2  F.attn   <-- here" in str(caught.value)


def as_any(value: Any) -> Any:
    return value


def test_what_is_no_order() -> None:
    table: Any = None
    unknown: list[Any] = [table, [], {}, 1]
    for name in unknown:
        with pytest.raises(ScheduleError, match="is unknown: choose one of"):
            get_order(name)
    with pytest.raises(ConfigError, match="replay='now': must be 'just_in_time' or 'hidden'"):
        get_order("plain", as_any("now"))
    assert get_order("multi_queue", as_any("hidden")) == get_order("multi_queue", Replay.HIDDEN)
    with pytest.raises(ConfigError, match="text=None: must be a text table"):
        Order.parse("mine", table)
    for steps in (None, "F.attn", ["F.attn"], ("F.attn",)):
        with pytest.raises(ConfigError, match=r"steps=.*: must be a tuple of steps"):
            Order("mine", as_any(steps))
    for parse in (Slot.parse, parse_schedule):
        with pytest.raises(ConfigError, match="text=None: must be text"):
            parse(table)
