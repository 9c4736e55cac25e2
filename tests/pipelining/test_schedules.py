from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap.pipeline_model.torch_lists import make_schedule
from overlap.pipelining import compat
from overlap.pipelining.in_flight import in_flight
from overlap.pipelining.layout import PipelineLayout, make_layout
from overlap.pipelining.schedules import ScheduleKind, make_orders, no_loss, placement_of
from recompute.errors import ConfigError
from tests.pipelining.dry import Deadlock, run_dry

TWO = (ScheduleKind.DUALPIPEV, ScheduleKind.ZBV)


def layout_of(kind: ScheduleKind, pp: int, vpp: int) -> PipelineLayout:
    stages = 2 if kind in TWO else 1 if kind is ScheduleKind.ONE_F_ONE_B else vpp
    return make_layout(pp=pp, vpp=stages, layers=8, placement=placement_of(kind))


def lowered(orders: compat.RankActions, layout: PipelineLayout, microbatches: int) -> dict[int, list[compat.Action]]:
    return compat.lower_actions(orders, layout.num_stages, microbatches)


@given(st.sampled_from(ScheduleKind), st.integers(1, 6), st.integers(1, 4), st.integers(1, 20))
@settings(max_examples=100)
def test_drawn_schedules_run_or_say_why_not(kind: ScheduleKind, pp: int, vpp: int, microbatches: int) -> None:
    layout = layout_of(kind, pp, vpp)
    refusal: ConfigError | None = None
    try:
        orders = make_orders(kind, layout, microbatches)
    except ConfigError as error:
        refusal = error
    if refusal is not None:
        assert (refusal.field, str(kind) in str(refusal.value)) == ("schedule", True)
        assert "microbatches" in refusal.rule
        return
    ranks = {stage: layout.rank_of(stage) for stage in range(layout.num_stages)}
    delivered = run_dry(lowered(orders, layout, microbatches), ranks)
    borders = sum(ranks[stage] != ranks[stage + 1] for stage in range(layout.num_stages - 1))
    assert delivered == 2 * borders * microbatches
    # Gradients add up in the reference's order: each stage's microbatches run backward in ascending order.
    for ends in ((compat.FULL_BACKWARD, compat.BACKWARD_INPUT), (compat.FULL_BACKWARD, compat.BACKWARD_WEIGHT)):
        numbers: dict[int, list[int]] = {}
        for action in (a for actions in orders.values() for a in actions if a is not None):
            for part in action.sub_actions or (action,):
                if part.computation_type in ends:
                    numbers.setdefault(part.stage_index, []).append(compat.microbatch_of(part))
        assert numbers == {stage: list(range(microbatches)) for stage in range(layout.num_stages)}


def test_swapped_receives_are_seen() -> None:
    """Negative control of the dry run."""
    layout = layout_of(ScheduleKind.INTERLEAVED, 2, 2)
    actions = lowered(make_orders(ScheduleKind.INTERLEAVED, layout, 4), layout, 4)
    receives = [place for place, a in enumerate(actions[1]) if a.computation_type in (compat.RECV_F, compat.RECV_B)]
    first, second = receives[2:4]
    actions[1][first], actions[1][second] = actions[1][second], actions[1][first]
    with pytest.raises(Deadlock):
        run_dry(actions, {stage: layout.rank_of(stage) for stage in range(4)})


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 6), (2, 2), (4, 8), (4, 6)])
def test_interleaved_pairs_its_steady_state_only(pp: int, microbatches: int) -> None:
    """Row B29 of reference/megatron.md: forward and backward of a pair are of different microbatches or stages."""
    layout = layout_of(ScheduleKind.INTERLEAVED, pp, 2)
    for rank, actions in make_orders(ScheduleKind.INTERLEAVED, layout, microbatches).items():
        kinds = [action.computation_type for action in actions if action is not None]
        pairs = [action for action in actions if action is not None and action.sub_actions]
        warm = kinds.index(compat.OVERLAP_F_B) if pairs else 2 * microbatches
        # one more than torch's, so that the pairs never hold one microbatch twice
        assert warm == min(compat.get_warmup_ops(rank, 2, per_round(pp, microbatches), pp, microbatches) + 1, warm)
        assert kinds == [compat.FORWARD] * warm + [compat.OVERLAP_F_B] * len(pairs) + [compat.FULL_BACKWARD] * warm
        for pair in pairs:
            forward, backward = compat.sub_actions(pair)
            assert (forward.stage_index, forward.microbatch_index) != (backward.stage_index, backward.microbatch_index)


def per_round(pp: int, microbatches: int) -> int:
    return microbatches // max(1, microbatches // pp)


@pytest.mark.parametrize(
    ("kind", "pp", "vpp", "microbatches", "rule"),
    [
        (ScheduleKind.INTERLEAVED, 2, 2, 5, "multiple of the number of rounds"),
        (ScheduleKind.DUALPIPEV, 2, 2, 3, "at least as many microbatches as stages"),
        (ScheduleKind.ONE_F_ONE_B, 2, 2, 4, "must be 1 for schedule 1f1b"),
    ],
)
def test_what_torch_rejects_gives_its_reason(
    kind: ScheduleKind, pp: int, vpp: int, microbatches: int, rule: str
) -> None:
    layout = make_layout(pp=pp, vpp=vpp, layers=4, placement=placement_of(kind))
    with pytest.raises(ConfigError, match=rule):
        make_orders(kind, layout, microbatches)


def test_placement_must_fit() -> None:
    with pytest.raises(ConfigError, match="places its stages as a v"):
        make_orders(ScheduleKind.ZBV, make_layout(pp=2, vpp=2, layers=4), 4)


def test_microbatches_in_flight() -> None:
    """The counts of reference/torch_pipelining.md, section 2.5: 24 and 17 at 8 ranks."""
    counts = {}
    for kind in (ScheduleKind.INTERLEAVED, ScheduleKind.DUALPIPEV, ScheduleKind.ZBV):
        layout = layout_of(kind, 8, 2)
        counts[kind] = in_flight(make_orders(kind, layout, 64))
    assert max(counts[ScheduleKind.INTERLEAVED].ranks.values()) == 24
    assert max(counts[ScheduleKind.DUALPIPEV].ranks.values()) == 17
    assert max(counts[ScheduleKind.INTERLEAVED].waiting.values()) == 0
    assert max(counts[ScheduleKind.ZBV].waiting.values()) > 0
    plain = in_flight(make_orders(ScheduleKind.ONE_F_ONE_B, layout_of(ScheduleKind.ONE_F_ONE_B, 4, 1), 8))
    assert plain.ranks == {0: 4, 1: 3, 2: 2, 3: 1}
    assert in_flight(make_orders(ScheduleKind.GPIPE, layout_of(ScheduleKind.GPIPE, 2, 1), 5)).stages == {0: 5, 1: 5}


def test_losses_are_no_loss_function() -> None:
    with pytest.raises(ValueError, match="last virtual stage"):
        no_loss()


@pytest.mark.parametrize("kind", ScheduleKind)
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (3, 6), (4, 8), (2, 7)])
def test_the_simulated_pipeline_is_the_one_that_runs(kind: ScheduleKind, pp: int, microbatches: int) -> None:
    layout = layout_of(kind, pp, 2)
    if microbatches % max(1, microbatches // pp) and kind is ScheduleKind.INTERLEAVED:
        microbatches += 1
    orders = make_orders(kind, layout, microbatches)
    runs = [
        tuple(tuple(map(str, a.sub_actions or (a,))) for a in actions if a is not None) for actions in orders.values()
    ]
    simulated = make_schedule(str(kind), pp, layout.vpp, microbatches)
    assert runs == [tuple(tuple(map(str, step)) for step in steps) for steps in simulated.ranks]


def test_arguments() -> None:
    layout = layout_of(ScheduleKind.GPIPE, 2, 1)
    text: Any = "gpipe"
    assert make_orders(text, layout, 2) == make_orders(ScheduleKind.GPIPE, layout, 2)
    assert placement_of(text) is layout.placement
    unknown: list[Any] = [None, "sideways", [], 1]
    for kind in unknown:
        for use in (placement_of, lambda kind: make_orders(kind, layout, 2)):
            with pytest.raises(ConfigError, match=r"^schedule=.*: must be 'interleaved', "):
                use(kind)
    numbers: list[Any] = [None, 0, 2.0, "2"]
    for number in numbers:
        with pytest.raises(ConfigError, match=r"^num_microbatches=.*: must be an integer of at least 1"):
            make_orders(ScheduleKind.GPIPE, layout, number)
    nothing: Any = None
    with pytest.raises(ConfigError, match="layout=None: must be a PipelineLayout"):
        make_orders(ScheduleKind.GPIPE, nothing, 2)
