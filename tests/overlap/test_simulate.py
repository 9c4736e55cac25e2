"""The queue model, what plans cost in it, and what is exposed under each order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap.chain import needs_of
from overlap.costs import PRESETS, StageCosts, read_costs
from overlap.errors import ScheduleError
from overlap.ir import Lane, Op
from overlap.orders import Order, get_order
from overlap.plan import Planner
from overlap.simulate import MANY_QUEUES, ONE_QUEUE, QUEUES, Task, exposure, place_tasks, simulate, task_of
from overlap.steady import Steady, chain_of, measure, measure_step, window
from overlap.synthetic import System
from overlap.timeline import Timeline
from recompute import ConfigError, RecomputeConfig, Replay

H200 = PRESETS["h200"]
ONE_LAYER = RecomputeConfig.uniform(1)
HIDDEN = RecomputeConfig.uniform(1, replay=Replay.HIDDEN)


def system(order: str | Order, recompute: RecomputeConfig = HIDDEN, costs: StageCosts = H200, **more: object) -> System:
    if isinstance(order, str):
        order = get_order(order, recompute.replay)
    fields: dict = {"kinds": ("M",) * 4, "order": order, "recompute": recompute, "costs": costs, **more}
    return System(**fields)


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_a_lead_moves_slots_and_adds_none(microbatches: int) -> None:
    usual, found = (measure_step(system("single_queue", lead=lead), microbatches, 32) for lead in (0, 3))
    assert sorted(str(span.slot) for span in found.spans) == sorted(str(span.slot) for span in usual.spans)
    order = [str(span.slot) for span in found.spans]
    begun = microbatches > 1 and order.index("N1.2.post") < order.index("B0.head")
    assert begun is (microbatches > 1)


@pytest.mark.parametrize("recompute", [RecomputeConfig.none(), ONE_LAYER, HIDDEN])
@pytest.mark.parametrize("lead", [0, 2])
def test_a_simulated_step_has_the_plans_of_a_real_one(lead: int, recompute: RecomputeConfig) -> None:
    """What is handed over, waited for and freed, too."""
    one = system("multi_queue", recompute, lead=lead)
    for microbatches in (1, 3):
        planner = Planner(one.program, one.order, delayed=True, lead=lead)
        assert one.step_runs(microbatches) == planner.step([recompute] * microbatches, one.program.trained())


def compute(ms: float, *after: int, kernels: int = 4) -> Task:
    return Task(Lane.COMPUTE, ms, kernels, after)


def comm(ms: float, *after: int) -> Task:
    return Task(Lane.COMM, ms, 1, after)


def test_lanes_run_side_by_side() -> None:
    assert place_tasks([comm(3), compute(4)], MANY_QUEUES) == [(0, 3), (0, 4)]
    assert place_tasks([comm(3), compute(4, 0)], MANY_QUEUES) == [(0, 3), (3, 7)]
    assert place_tasks([compute(4), compute(4), comm(3, 0)], MANY_QUEUES) == [(0, 4), (4, 8), (4, 7)]


def test_one_queue_starts_kernels_in_launch_order() -> None:
    # The transfer waits until the last of the four kernels before it has started.
    assert place_tasks([compute(4), comm(3)], ONE_QUEUE) == [(0, 4), (3, 6)]
    # Compute behind a transfer that waits for its input waits with it.
    assert place_tasks([comm(3), compute(1), comm(3, 0), compute(2)], ONE_QUEUE)[2:] == [(3, 6), (3, 5)]
    assert place_tasks([comm(3), compute(1), comm(3, 0), compute(2)], MANY_QUEUES)[2:] == [(3, 6), (1, 3)]


def test_the_host_launches_one_slot_after_the_other() -> None:
    assert place_tasks([compute(1), comm(1), compute(1)], MANY_QUEUES, 2) == [(2, 3), (4, 5), (6, 7)]


def test_exposure_is_idle_compute_under_a_transfer() -> None:
    run = simulate("run", system("plain", RecomputeConfig.none()).step_runs(1), H200, MANY_QUEUES)
    found = exposure(run, 0, run.end, ["R.dispatch"])
    assert found.exposed["R.dispatch"] == 0
    assert found.exposed["F.dispatch"] == pytest.approx(4 * 0.63)
    assert sum(found.exposed.values()) == pytest.approx(found.compute_idle)
    assert found.milliseconds == found.compute_idle + run.busy(Lane.COMPUTE, 0, run.end)


def test_merged_weight_gradients_take_the_same_time() -> None:
    both = [simulate("", system("plain", ONE_LAYER, delayed=d).step_runs(2), H200, MANY_QUEUES) for d in (True, False)]
    assert both[0].busy(Lane.COMPUTE, 0, 1e9) == pytest.approx(both[1].busy(Lane.COMPUTE, 0, 1e9))
    assert len(both[0].spans) > len(both[1].spans)


@pytest.mark.parametrize(("group", "pairs"), [(1, (4, 8)), (2, (4, 8)), (3, (6, 12)), (5, (5, 10))])
def test_what_is_measured_is_settled_and_whole_segments(group: int, pairs: tuple[int, int]) -> None:
    assert window(group) == pairs


def test_refused() -> None:
    with pytest.raises(ConfigError, match="queues=2: must be 1 or 32"):
        simulate("", [], H200, 2)
    with pytest.raises(ConfigError, match=r"has no time for F\.embed"):
        simulate("", system("plain", ONE_LAYER).step_runs(1), read_costs("mine", {"milliseconds": {}}), 1)
    with pytest.raises(ScheduleError, match="order fused has no R steps"):
        measure(system("fused"), 1)


def test_optional_stages_follow_the_costs() -> None:
    times = {f"{op.value}.{stage}": ms for (op, stage), ms in H200.milliseconds.items()}
    extra = {f"{op}.{stage}": 0.1 for op in "FBW" for stage in ("shared", "post_attn")}
    costs = read_costs("more", {"milliseconds": {**times, **extra}})
    for order in ("multi_queue", "single_queue"):
        for recompute in (HIDDEN, ONE_LAYER, RecomputeConfig.uniform(2, replay=Replay.HIDDEN)):
            timeline = measure_step(system(order, recompute, costs, kinds=tuple("MDMM")), 3, ONE_QUEUE)
            assert {"shared", "post_attn"} <= {span.slot.stage for span in timeline.spans}


@given(
    st.sampled_from(["multi_queue", "single_queue", "fused", "plain"]),
    st.sampled_from([RecomputeConfig.none(), ONE_LAYER, RecomputeConfig.uniform(2), RecomputeConfig.block(2), HIDDEN]),
    st.text("MD", min_size=1, max_size=4).map(tuple),
    st.booleans(),
    st.sampled_from(QUEUES),
)
def test_waits_stand_for_all_that_a_slot_uses(
    order: str, recompute: RecomputeConfig, kinds: tuple[str, ...], delayed: bool, queues: int
) -> None:
    """What lowering leaves out is implied: with every use as a wait, nothing starts later."""
    if recompute.replay is Replay.HIDDEN and order in ("fused", "plain"):
        return
    one = system(order, recompute, kinds=kinds, delayed=delayed)
    ((plan, _),) = one.pair_run()
    needs = needs_of(plan.issues)
    tasks = [task_of(issue, H200, after) for issue, after in zip(plan.issues, needs, strict=True)]
    run = simulate("", one.pair_run(), H200, queues)
    assert place_tasks(tasks, queues) == [(span.start, span.end) for span in run.spans]


def shown(steady: Steady) -> dict[str, float]:
    return {kind: round(time, 3) for kind, time in steady.exposed.items() if time > 1e-9}


@pytest.mark.parametrize("queues", QUEUES)
def test_single_queue_hides_every_transfer(queues: int) -> None:
    """Row 63: under one queue and under many the pair takes what its compute takes."""
    found = measure(system("single_queue"), queues)
    assert shown(found) == {}
    assert found.milliseconds == pytest.approx(3.90)
    assert found.over_bound == pytest.approx(0, abs=1e-9)
    assert set(found.exposed) == {f"{op}.{stage}" for op in "FBR" for stage in ("dispatch", "combine")}


def test_multi_queue_needs_many() -> None:
    assert shown(measure(system("multi_queue"), MANY_QUEUES)) == {}
    assert measure(system("multi_queue"), ONE_QUEUE).milliseconds > 4.5


@pytest.mark.parametrize("order", ["multi_queue", "single_queue"])
def test_just_in_time_exposes_the_replayed_dispatch_alone(order: str) -> None:
    queues = ONE_QUEUE if order == "single_queue" else MANY_QUEUES
    assert shown(measure(system(order, ONE_LAYER), queues)) == {"R.dispatch": 0.63}


@pytest.mark.parametrize("queues", QUEUES)
def test_todays_order_exposes_replays_and_one_queue_worsens_it(queues: int) -> None:
    """Row 63, the control: compute launched before the transfer, and what follows combine on its lane."""
    found = measure(system("fused", ONE_LAYER), queues)
    assert {"R.dispatch", "R.combine"} - set(shown(found)) <= ({"R.combine"} if queues == MANY_QUEUES else set())
    assert found.milliseconds > 5
    if queues == ONE_QUEUE:
        assert {"F.dispatch", "F.combine", "B.dispatch"} <= set(shown(found))
        assert found.milliseconds > 6


@pytest.mark.parametrize(("group", "most"), [(2, 0.06), (3, 0.08), (4, 0.09)])
def test_longer_segments_stay_near_the_bound(group: int, most: float) -> None:
    recompute = RecomputeConfig.uniform(group, replay=Replay.HIDDEN)
    assert measure(system("single_queue", recompute), MANY_QUEUES).over_bound < 1e-9
    assert measure(system("single_queue", recompute), ONE_QUEUE).over_bound < most


MEASURED = [
    ("fused", "B.post B.combine F.attn B.experts F.dispatch W.experts B.dispatch F.experts F.combine F.post B.attn "
     "W.attn", ONE_LAYER, 4.94, 0.06),
    ("first", "B.post B.combine F.attn F.dispatch B.experts B.dispatch F.experts F.combine W.experts B.attn F.post "
     "W.attn", ONE_LAYER, 4.48, 0.02),
    ("hidden", "B.post B.combine F.attn F.dispatch B.experts B.dispatch R.attn R.dispatch F.experts F.combine "
     "R.experts W.experts B.attn F.post W.attn", HIDDEN, 4.27, 0.02),
]  # fmt: skip


@pytest.mark.parametrize(("name", "table", "recompute", "measured", "tolerance"), MEASURED)
def test_the_preset_predicts_what_was_measured(
    name: str, table: str, recompute: RecomputeConfig, measured: float, tolerance: float
) -> None:
    """24 pairs on an H200, in milliseconds per pair, start and end included."""
    run: Timeline = simulate(
        "", system(Order.parse(name, table), recompute, kinds=("M",) * 24).pair_run(), H200, MANY_QUEUES
    )
    layered = [span for span in run.spans if span.slot.layer is not None]
    took = max(span.end for span in layered) - min(span.start for span in layered if span.slot.op is not Op.REPLAY)
    assert took / 24 == pytest.approx(measured, rel=tolerance)


DISPATCH, EXPERTS = (Op.BACKWARD, "dispatch"), (Op.WGRAD, "experts")


@pytest.mark.parametrize(
    ("order", "recompute", "waiting", "awaited"),
    [
        ("fused", ONE_LAYER, DISPATCH, EXPERTS),
        ("single_queue", ONE_LAYER, EXPERTS, DISPATCH),
        ("multi_queue", HIDDEN, EXPERTS, DISPATCH),
    ],
)
def test_a_wait_between_a_transfer_and_a_weight_gradient_shows_in_the_time(
    order: str, recompute: RecomputeConfig, waiting: tuple[Op, str], awaited: tuple[Op, str]
) -> None:
    """B18, planted: a transfer that waits for W although it needs B alone, and W that waits for a transfer."""
    chain = chain_of(system(order, recompute))
    ((plan, numbers),) = chain.pair_run()
    good = simulate("", [(plan, numbers)], H200, MANY_QUEUES)
    issues = []
    for issue in plan.issues:
        if (issue.slot.op, issue.slot.stage) == waiting:
            op, stage = awaited
            issue = replace(issue, waits=(*issue.waits, (op, (issue.slot.layer, stage))))
        issues.append(issue)
    bad = simulate("", [(replace(plan, issues=tuple(issues)), numbers)], H200, MANY_QUEUES)
    assert bad.end > good.end + 0.1 * len(chain.kinds)


def test_a_step_hides_nine_tenths_of_its_replays() -> None:
    """Eight layers, six microbatches: the first segment of a backward sends its tokens beside the head."""
    one = system("single_queue", kinds=("M",) * 8)
    found = measure_step(one, 6, ONE_QUEUE)
    replayed = sum(span.milliseconds for span in found.on(Lane.COMM) if span.slot.op is Op.REPLAY)
    exposed = exposure(found, 0, found.end, ()).exposed
    assert exposed.get("R.dispatch", 0.0) <= 0.1 * replayed
