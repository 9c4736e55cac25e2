"""The built-in tables: each names all that a layer may have, in a variant for hidden replay; and orders from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap.errors import ScheduleError
from overlap.ir import Op
from overlap.order_tables import HIDDEN
from overlap.orders import ORDER_NAMES, STAGE_NAMES, Order, format_order, get_order, load_order
from recompute import Replay


@pytest.mark.parametrize("replay", Replay)
@pytest.mark.parametrize("name", ORDER_NAMES)
def test_a_table_names_every_stage_it_may_meet(name: str, replay: Replay) -> None:
    order = get_order(name, replay)
    hidden = name in HIDDEN and replay is Replay.HIDDEN
    assert order.replays is hidden
    if name == "plain":
        assert str(order) == "F.* B.* W.*"
        return
    for op in (Op.FORWARD, Op.BACKWARD, *([Op.REPLAY] if hidden else [])):
        assert order.named(op) == STAGE_NAMES
    assert order.named(Op.WGRAD) == STAGE_NAMES - {"dispatch", "combine"}


HIDES = [
    ("multi_queue", Replay.JUST_IN_TIME,
     "B.combine F.attn  F.dispatch F.shared  B.dispatch F.experts  F.combine B.attn"),
    ("single_queue", Replay.JUST_IN_TIME,
     "B.combine F.attn  F.dispatch B.experts  B.dispatch F.experts  F.combine B.attn"),
    ("multi_queue", Replay.HIDDEN,
     "B.combine F.attn  F.dispatch R.attn  R.dispatch F.experts  F.combine R.experts  R.combine B.attn"),
    ("single_queue", Replay.HIDDEN,
     "B.combine F.attn  F.dispatch R.attn  R.dispatch B.experts  B.dispatch R.experts  F.combine B.attn"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "replay", "pairs"), HIDES)
def test_a_transfer_stands_before_what_hides_it(name: str, replay: Replay, pairs: str) -> None:
    """Row 63 (the order's part): the launch list puts each all-to-all before the compute that hides it."""
    words = str(get_order(name, replay)).split()
    for pair in pairs.split("  "):
        transfer, compute = pair.split()
        assert words.index(transfer) < words.index(compute)


def test_format_reads_back() -> None:
    for name in ORDER_NAMES:
        for replay in Replay:
            order = get_order(name, replay)
            assert Order.parse(name, format_order(order)) == order


def test_an_order_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("# forward first\nF.* R.*\nB.* W.*\n")
    order = load_order(str(path))
    assert (order.name, str(order)) == ("mine", "F.* R.* B.* W.*")
    assert load_order("single_queue", Replay.HIDDEN) == get_order("single_queue", Replay.HIDDEN)
    with pytest.raises(ScheduleError, match="is unknown: choose one of"):
        load_order(str(tmp_path / "none.txt"))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ScheduleError, match="cannot be read"):
        load_order(str(path))
