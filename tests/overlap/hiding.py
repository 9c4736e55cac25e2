"""What tests of hidden replay share: configs, sides, and any order with R steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from overlap.ir import Op, Program, Schedule
from overlap.orders import Order, get_order
from overlap.plan import BACKWARD_SIDE, Planner, StepPlan, segments_of
from overlap.recording import RecordingLanes
from overlap.side import Side
from recompute import RecomputeConfig, Replay
from tests.overlap.programs import drive, fake_owner

HIDDEN = Replay.HIDDEN
ORDERS = ("multi_queue", "single_queue")
EVERYTHING = Order.parse("everything", "B.* R.* F.* W.*")


def uniform(num_layers: int) -> RecomputeConfig:
    return RecomputeConfig.uniform(num_layers, replay=HIDDEN)


def block(num_layers: int, *, mtp: bool = False) -> RecomputeConfig:
    return RecomputeConfig.block(num_layers, recompute_mtp=mtp, replay=HIDDEN)


def with_mtp(program: Program, depths: int) -> Program:
    """The same with the last layers declared MTP depths."""
    return replace(program, mtp_layers=frozenset(program.layers[len(program.layers) - depths :]))


def side_of(program: Program, config: RecomputeConfig) -> Side:
    return Side(program, segments_of(program, config), program.trained(), hidden=config.replay is HIDDEN)


CONFIGS = st.sampled_from(
    [RecomputeConfig.none(), RecomputeConfig.uniform(2), *(uniform(n) for n in (1, 2, 3)), block(1), block(3),
     block(2, mtp=True)]
)  # fmt: skip
SHAPES = st.fixed_dictionaries({"shared": st.booleans(), "plain_post": st.booleans(), "frozen": st.integers(0, 2)})


@st.composite
def orders(draw: st.DrawFn) -> Order:
    """Built-in ones, a coarse one, and random interleavings that keep each op's own sequence.

    Weight gradients go anywhere: before their B step they are the last pair's.
    """
    name = draw(st.sampled_from([*ORDERS, "everything", "random"]))
    if name in ORDERS:
        return get_order(name, HIDDEN)
    if name == "everything":
        return EVERYTHING
    forward = ["attn", "dispatch", "experts", "combine", "post"]
    rows = {
        "F": ["attn", "shared", *forward[1:]],
        "R": ["attn", "shared", *forward[1:]],
        "B": [*forward[:0:-1], "shared", "attn"],
        "W": ["experts", "shared", "attn"],
    }
    picks = draw(st.permutations([op for op, row in rows.items() for _ in row]))
    left = {op: iter(row) for op, row in rows.items()}
    steps = [(op, next(left[op])) for op in picks]
    return Order.parse("random", " ".join(f"{op}.{stage}" for op, stage in steps))


def live_segments(slots: Schedule, side: Side) -> int:
    """Most segments of the backward side that have a graph at once."""
    graphs: set[tuple[int | None, str]] = set()
    most = 0
    for slot in slots:
        if slot.microbatch != BACKWARD_SIDE or slot.layer not in side.segment_of:
            continue
        if slot.op is Op.REPLAY and side.needs_activations(side.program.by_key[slot.key]):
            graphs.add(slot.key)
        elif slot.op is Op.BACKWARD:
            graphs.discard(slot.key)
        most = max(most, len({side.segment_of[layer] for layer, _ in graphs if layer is not None}))
    return most


def step_plans(planner: Planner, configs: Sequence[RecomputeConfig]) -> list[StepPlan]:
    return planner.step(configs, planner.program.trained())


def race_free(planner: Planner, configs: Sequence[RecomputeConfig]) -> None:
    """Drive a step's plans through lanes that raise at a race, and see that nothing stays alive."""
    lanes = RecordingLanes()
    owners = [fake_owner(number, planner.program) for number in range(len(configs))]
    for plan, numbers in step_plans(planner, configs):
        drive(lanes, plan, {side: owners[number] for side, number in numbers.items()})
    assert lanes.alive() == []
