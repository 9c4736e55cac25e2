"""Hidden replay: which layer is replayed beside which, at which steps, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlap.errors import ScheduleError
from overlap.hidden import Hosts, hosts_of, spread
from overlap.ir import Op, Program, Schedule, format_schedule
from overlap.orders import Order, get_order
from overlap.plan import BACKWARD_SIDE, make_schedule
from overlap.validate import validate
from recompute import RecomputeConfig
from tests.overlap.hiding import HIDDEN, block, side_of, uniform, with_mtp
from tests.overlap.programs import dummy_program, nothing

HOSTS: list[tuple[str, int, RecomputeConfig, dict[int, tuple[int, ...]]]] = [
    ("MMM", 0, uniform(1), {2: (1,), 1: (0,)}),
    ("MMMM", 0, uniform(2), {3: (0,), 2: (1,)}),
    ("MMMMMM", 0, uniform(3), {5: (0,), 4: (1,), 3: (2,)}),
    # Ragged: one pair takes the two layers that come next.
    ("MMMMM", 0, uniform(2), {4: (2, 3), 3: (0,), 2: (1,)}),
    ("MMMMM", 0, uniform(3), {4: (0,), 3: (1, 2)}),
    # An eager layer hosts only what comes directly next.
    ("MMMM", 0, block(2), {2: (1,), 1: (0,)}),
    ("MMMM", 0, block(9), {3: (2,), 2: (1,), 1: (0,)}),
    # MTP depths: a segment each under uniform, eager under block.
    ("MMMMMM", 2, uniform(2), {5: (4,), 4: (2, 3), 3: (0,), 2: (1,)}),
    ("MMMM", 1, block(3), {3: (2,), 2: (1,), 1: (0,)}),
    ("MMMM", 1, block(2, mtp=True), {2: (1,), 1: (0,)}),
    ("M", 0, uniform(1), {}),
    ("MM", 0, uniform(2), {}),
    ("", 0, uniform(1), {}),
]


@pytest.mark.parametrize(("kinds", "mtp", "config", "hosts"), HOSTS)
def test_hosts(kinds: str, mtp: int, config: RecomputeConfig, hosts: dict[int, tuple[int, ...]]) -> None:
    assert hosts_of(side_of(with_mtp(dummy_program(kinds), mtp), config)).layers == hosts


def test_the_first_segment_sends_its_tokens_beside_the_head() -> None:
    head = hosts_of(side_of(dummy_program("MM"), uniform(1))).head
    assert [stage.label for stage in head] == ["1.attn", "1.dispatch"]
    assert hosts_of(side_of(dummy_program("DD"), uniform(1))).head == ()
    assert hosts_of(side_of(dummy_program("MMM"), block(2))).head == ()


def test_without_stages_behind_the_layers_nothing_goes_beside_them() -> None:
    program = dummy_program("MM")
    inputs = tuple(source for source in program.inputs if source.name != "target")
    headless = replace(program, stages=program.stages[:-1], inputs=inputs, losses=())
    assert hosts_of(side_of(headless, uniform(1))).head == ()


def test_a_segment_whose_transfers_are_not_replayed_has_none_to_send_ahead() -> None:
    """The last layer's experts need no activations, so nobody reads the rows that a replay would send."""
    program = dummy_program("MM")
    stages = tuple(
        s if s.name != "experts" else replace(s, adjoint=nothing, wgrad=False, parameters=()) for s in program.stages
    )
    side = side_of(replace(program, stages=stages), uniform(1))
    assert (1, "attn") in side.replay_needed
    assert (1, "dispatch") not in side.replay_needed
    assert hosts_of(side).head == ()


def test_what_does_not_train_is_not_replayed() -> None:
    assert hosts_of(side_of(dummy_program("MMM", frozen=1), uniform(1))).layers == {2: (1,)}
    assert hosts_of(side_of(dummy_program("MMM", frozen=3), uniform(1))).layers == {}


def test_just_in_time_has_no_hosts() -> None:
    assert hosts_of(side_of(dummy_program("MM"), RecomputeConfig.uniform(1))) == Hosts()


@pytest.mark.parametrize(
    ("order", "taken", "rest"),
    [
        ("R.attn R.dispatch R.experts", "attn dispatch experts", "combine post"),
        ("R.* B.* F.*", "attn dispatch experts combine post", ""),
        ("R.attn R.*", "attn dispatch experts combine post", ""),
    ],
)
def test_one_layer_follows_the_names(order: str, taken: str, rest: str) -> None:
    program = dummy_program("M")
    steps, leftovers = spread(Order.parse("mine", order), [program.layer_stages[0]])
    assert [stage.name for stages in steps.values() for stage in stages] == taken.split()
    assert [stage.name for stage in leftovers] == rest.split()


def test_several_layers_are_spread_evenly() -> None:
    program = dummy_program("MM")
    order = Order.parse("mine", "R.attn R.dispatch R.experts R.combine R.post")
    steps, leftovers = spread(order, [program.layer_stages[layer] for layer in (0, 1)])
    assert [[stage.label for stage in stages] for stages in steps.values()] == [
        ["0.attn", "0.dispatch"], ["0.experts", "0.combine"], ["0.post", "1.attn"], ["1.dispatch", "1.experts"],
        ["1.combine", "1.post"],
    ]  # fmt: skip
    assert leftovers == ()


def backward(program: Program, config: RecomputeConfig, order: Order, *, delayed: bool = False) -> Schedule:
    return make_schedule(order, None, side_of(program, config), delayed=delayed)


def test_a_backward_alone() -> None:
    slots = backward(dummy_program("MMM"), uniform(1), get_order("single_queue", HIDDEN), delayed=True)
    assert format_schedule(slots) == (
        "R0.2.attn R0.2.dispatch B0.head W0.head "
        "B0.2.post B0.2.combine R0.1.attn R0.1.dispatch R0.2.experts B0.2.experts W0.2.experts B0.2.dispatch "
        "R0.1.experts B0.2.attn W0.2.attn "
        "B0.1.post B0.1.combine R0.0.attn R0.0.dispatch B0.1.experts W0.1.experts B0.1.dispatch R0.0.experts "
        "B0.1.attn W0.1.attn "
        "B0.0.post B0.0.combine B0.0.experts W0.0.experts B0.0.dispatch B0.0.attn W0.0.attn B0.embed"
    )


def test_a_post_that_needs_its_input_is_replayed_with_the_combine() -> None:
    slots = backward(dummy_program("MM", plain_post=True), uniform(1), get_order("single_queue", HIDDEN))
    assert [slot.stage for slot in slots if slot.op is Op.REPLAY and slot.layer == 0] == [
        "attn", "dispatch", "experts", "combine", "post",
    ]  # fmt: skip


@pytest.mark.parametrize("order", [get_order("plain", HIDDEN), get_order("fused", HIDDEN), get_order("multi_queue")])
def test_an_order_without_replays_hides_none(order: Order) -> None:
    with pytest.raises(ScheduleError, match=f"order {order.name} has no R steps, so it hides no replay"):
        backward(dummy_program("MM"), uniform(1), order)


def test_an_order_that_replays_backwards_is_refused() -> None:
    order = Order.parse("mine", "F.* B.* W.* R.experts R.dispatch R.attn")
    with pytest.raises(ScheduleError, match=r"R0\.0\.experts reads '0\.sent' of its own segment") as caught:
        backward(dummy_program("MM"), uniform(1), order)
    assert "R0.0.experts   <-- here" in str(caught.value)


def test_a_replay_that_is_lost_is_refused() -> None:
    side = side_of(dummy_program("MM"), uniform(1))
    slots = backward(side.program, uniform(1), get_order("single_queue", HIDDEN))
    for lost in [slot for slot in slots if slot.op is Op.REPLAY]:
        with pytest.raises(ScheduleError, match="replay"):
            validate(tuple(slot for slot in slots if slot != lost), {BACKWARD_SIDE: side})
