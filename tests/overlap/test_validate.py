"""Every rule of a schedule: a breach is refused with the slot marked, and what is accepted runs bit for bit."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap.engine import Engine, MicrobatchState
from overlap.errors import ScheduleError
from overlap.ir import Schedule, format_schedule, parse_schedule
from overlap.lower import lower
from overlap.orders import get_order
from overlap.plan import make_schedule
from overlap.recording import RecordingLanes
from overlap.reference import reference_step
from overlap.side import Side
from overlap.validate import validate
from recompute import RecomputeConfig
from tests.overlap.programs import differences, dummy_program, result_of, side_of, tiny_chunk, tiny_feeds

uniform, none = RecomputeConfig.uniform, RecomputeConfig.none


def whole(side: Side, *, delayed: bool = False) -> Schedule:
    """Forward, then backward of microbatch 0, in one schedule."""
    plain = get_order("plain")
    ahead = format_schedule(make_schedule(plain, side, None, delayed=delayed)).replace("F1", "F0").replace("N1", "N0")
    return (*parse_schedule(ahead), *make_schedule(plain, None, side, delayed=delayed))


def faults_of(schedule: Schedule, side: Side) -> str:
    with pytest.raises(ScheduleError) as caught:
        validate(schedule, {0: side})
    return str(caught.value)


def marked(message: str) -> str:
    """The slot that a message marks."""
    (line,) = [line for line in message.splitlines() if line.endswith("   <-- here")]
    return line.split()[1]


def edited(schedule: Schedule, *, drop: str = "", put: str = "", before: str = "") -> Schedule:
    """Take slots out, and put others in before a slot (or at the end)."""
    words = [word for word in format_schedule(schedule).split() if word not in drop.split()]
    place = words.index(before) if before else len(words)
    return parse_schedule(" ".join([*words[:place], *put.split(), *words[place:]]))


CASES = [
    ("", "F0.7.attn", "", "F0.7.attn", "F0.7.attn issues a stage that its program does not have"),
    ("", "F3.head", "", "F3.head", "F3.head issues a stage that its program does not have"),
    ("", "B0.head", "", "B0.head", "B0.head was already issued at position 12"),
    ("N0.0.post", "F0.0.post", "N0.1.attn", "F0.0.post", "F0.0.post should be N: a first pass keeps its graph outside"),
    ("F0.head", "N0.head", "B0.head", "N0.head", "N0.head should be F"),
    (
        "N0.0.attn",
        "N0.0.attn",
        "N0.0.experts",
        "N0.0.dispatch",
        "N0.0.dispatch reads '0.tokens', which no earlier slot",
    ),
    ("", "R0.head", "B0.head", "R0.head", "R0.head replays a stage that belongs to no segment"),
    ("R0.0.attn", "R0.0.attn", "N0.0.attn", "R0.0.attn", "R0.0.attn replays a stage before its first pass"),
    (
        "R0.0.dispatch",
        "",
        "",
        "R0.0.experts",
        "R0.0.experts reads '0.sent' of its own segment, whose producer 0.dispatch is not replayed before it",
    ),
    ("R0.1.experts", "", "", "B0.1.experts", "B0.1.experts has no graph: replay the stage before it"),
    ("B0.head", "B0.head", "F0.head", "B0.head", "B0.head precedes its forward"),
    (
        "B0.0.post",
        "B0.0.post",
        "B0.1.attn",
        "B0.0.post",
        "B0.0.post precedes the backward of 1.attn, which reads its '0.out'",
    ),
    ("B0.embed", "", "", "B0.0.attn", "microbatch 0: backward of embed is missing"),
    ("W0.1.attn", "W0.1.attn", "B0.1.attn", "W0.1.attn", "W0.1.attn precedes its backward"),
    ("", "W0.0.dispatch", "", "W0.0.dispatch", "W0.0.dispatch delays weight gradients of a stage that has none"),
    ("W0.0.attn", "", "", "B0.embed", "microbatch 0: W of 0.attn is missing"),
    ("", "X0.head", "B0.head", "X0.head", "X0.head calls a hook, but names a stage"),
]


@pytest.mark.parametrize(("drop", "put", "before", "mark", "message"), CASES, ids=[case[4][:40] for case in CASES])
def test_a_breach_is_refused_with_the_slot_marked(drop: str, put: str, before: str, mark: str, message: str) -> None:
    side = side_of(dummy_program("MM"), uniform(1))
    text = faults_of(edited(whole(side, delayed="W" in mark + drop), drop=drop, put=put, before=before), side)
    assert text.startswith(message)
    assert marked(text) == mark


def test_a_forward_is_complete() -> None:
    side = side_of(dummy_program("MM"))
    forward = edited(
        whole(side), drop="F0.head " + format_schedule(make_schedule(get_order("plain"), None, side, delayed=False))
    )
    text = faults_of(forward, side)
    assert text.startswith("microbatch 0: forward of head is missing")
    assert marked(text) == "F0.1.post"


def test_a_replay_is_followed_by_a_backward() -> None:
    side = side_of(dummy_program("M"), uniform(1))
    text = faults_of(parse_schedule("R0.0.attn R0.0.dispatch"), side)
    assert text.startswith("R0.0.attn replays, but no backward follows")
    assert marked(text) == "R0.0.attn"


def test_what_no_gradient_passes_has_no_backward() -> None:
    side = side_of(dummy_program("M", frozen=1))
    text = faults_of(parse_schedule("B0.head B0.0.post"), side)
    assert text.startswith("B0.0.post runs backward of a stage that no gradient passes")
    assert marked(text) == "B0.0.post"


def test_shared_parameters_are_summed_last() -> None:
    """R3: the backward of `weights` adds up every use, so it follows the delayed gradients of its readers."""
    side = side_of(dummy_program("M", tied=True))
    text = faults_of(edited(whole(side, delayed=True), drop="W0.head", put="W0.head"), side)
    assert text.startswith("B0.weights precedes the weight gradient of its reader head")
    assert marked(text) == "B0.weights"


def test_what_the_passes_make_is_accepted() -> None:
    for delayed in (False, True):
        side = side_of(dummy_program("MDM", tied=True, shared=True), uniform(2))
        validate(whole(side, delayed=delayed), {0: side})


def shuffled(schedule: Schedule, seed: int, side: Side) -> Schedule:
    """Swap two slots again and again, near ones mostly, as long as the schedule stays valid."""
    source = random.Random(seed)
    for _ in range(400):
        slots = list(schedule)
        left = source.randrange(len(slots))
        right = (left + source.choice((1, 1, 2, 3, 8))) % len(slots)
        slots[left], slots[right] = slots[right], slots[left]
        try:
            validate(tuple(slots), {0: side})
        except ScheduleError:
            continue
        schedule = tuple(slots)
    return schedule


@settings(max_examples=25)
@given(
    st.integers(0, 2**32),
    st.sampled_from([none(), uniform(1), uniform(2)]),
    st.sampled_from([{"tied": True}, {"shared": True, "dropout": 0.2}, {"stateful": True, "plain_post": True}]),
    st.booleans(),
)
def test_any_accepted_permutation_is_exact(seed: int, config: RecomputeConfig, shape: dict, delayed: bool) -> None:
    """R3: what validate accepts runs, without a race and with the same bits, whatever its order."""
    feeds = tiny_feeds(1)
    reference, chunk = (tiny_chunk("MM", shape=shape) for _ in range(2))
    wanted = reference_step(reference, feeds)
    side = side_of(chunk.program, config)
    schedule = shuffled(whole(side, delayed=delayed), seed, side)
    lanes = RecordingLanes()
    engine = Engine(lanes, run_seed=0, step=0, generators=(torch.default_generator,))
    owner = MicrobatchState(0, feeds[0], 1.0)
    engine.run(lower(schedule, {0: side}, {}), {0: owner})
    for effect, value in owner.effects:
        effect.apply(value)
    assert owner.leftovers() == []
    assert lanes.alive() == []
    assert torch.equal(owner.outputs["loss"], wanted[0]["loss"])
    assert differences(result_of(reference), result_of(chunk)) == []
