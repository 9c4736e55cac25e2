"""Orders read from their text tables; a wrong step is shown with a mark."""

from __future__ import annotations

import pytest

from overlap.errors import ScheduleError
from overlap.ir import Op
from overlap.orders import ORDER_NAMES, STAGE_NAMES, Order, get_order

MULTI_QUEUE = (
    "B.post B.combine F.attn B.experts F.dispatch F.shared W.experts B.dispatch B.shared W.shared F.experts F.combine "
    "B.attn W.attn F.post"
)


@pytest.mark.parametrize(("name", "text"), [("plain", "F.* B.* W.*"), ("multi_queue", MULTI_QUEUE)])
def test_built_in_orders(name: str, text: str) -> None:
    assert str(get_order(name)) == text
    assert Order.parse(name, text) == get_order(name)


def test_names() -> None:
    assert ORDER_NAMES == ("plain", "multi_queue")
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


def test_an_order_says_what_it_names() -> None:
    order = Order.parse("mine", "F.a F.* B.b")
    assert order.named(Op.FORWARD) == {"a"}
    assert (order.has_rest(Op.FORWARD), order.has_rest(Op.BACKWARD)) == (True, False)


@pytest.mark.parametrize("word", ["attn", "F", "F.", "F.2", "G.attn", "N.attn", "R.attn", "F.a.b", "f.attn", "F.**"])
def test_what_is_no_step_is_marked(word: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Order.parse("mine", f"F.attn {word} B.attn")
    assert str(caught.value) == (
        f"order mine: {word!r} is no step; write F, B or W, a dot, a stage\n"
        f"     0  F.attn\n     1  {word}   <-- here\n     2  B.attn"
    )


def test_a_step_stands_once() -> None:
    with pytest.raises(ScheduleError, match=r"order mine: F\.attn stands twice") as caught:
        Order.parse("mine", "F.attn B.attn F.attn")
    assert "2  F.attn   <-- here" in str(caught.value)
