"""The search finds legal orders, never worse than where it starts, the same for the same seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap.chain import Chain
from overlap.costs import PRESETS, StageCosts, read_costs
from overlap.errors import ScheduleError
from overlap.ir import Op
from overlap.orders import STAGE_NAMES, Order, Step, carried, format_order, get_order
from overlap.plan import BACKWARD_SIDE
from overlap.search import Found, _Descent, search
from overlap.simulate import MANY_QUEUES, ONE_QUEUE, QUEUES, simulate
from overlap.steady import chain_of, measure, with_order
from overlap.synthetic import System
from recompute import RecomputeConfig, Replay

H200 = PRESETS["h200"]
HAND = Order.parse(
    "hand",
    "B.mtp_post B.post B.combine F.attn F.post_attn F.shared F.dispatch B.experts B.dispatch R.attn R.dispatch "
    "F.experts F.combine R.experts W.experts B.shared B.post_attn B.attn F.post F.mtp_post W.*",
)
"""The order written by hand that took 4.27 ms a pair on an H200."""


def system(group: int = 1, order: Order = HAND, costs: StageCosts = H200, *, delayed: bool = True) -> System:
    recompute = RecomputeConfig.uniform(group, replay=Replay.HIDDEN)
    return System(kinds=("M",), order=order, recompute=recompute, costs=costs, delayed=delayed)


@pytest.fixture(scope="module")
def found() -> Found:
    return search(system(order=get_order("multi_queue", Replay.HIDDEN)))


def test_the_hand_written_order_is_beaten_down_to_the_bound(found: Found) -> None:
    assert measure(system(), MANY_QUEUES).milliseconds == pytest.approx(4.27, abs=0.01)
    for queues in QUEUES:
        best = measure(with_order(system(), found.order), queues)
        assert best.milliseconds == pytest.approx(3.90, abs=1e-6)
        assert best.bound == pytest.approx(3.90)


def test_the_score_is_what_plans_take(found: Found) -> None:
    times = [measure(with_order(system(), found.order), queues).milliseconds for queues in QUEUES]
    assert found.score[0] == pytest.approx(sum(times), abs=1e-5)
    assert found.tried > 100


def test_the_order_found_is_a_whole_table(found: Found) -> None:
    assert Order.parse("searched", format_order(found.order)) == found.order
    for op in (Op.FORWARD, Op.BACKWARD, Op.REPLAY):
        assert found.order.named(op) == STAGE_NAMES
    assert found.order.named(Op.WGRAD) == STAGE_NAMES - {"dispatch", "combine"}
    places = [found.order.steps.index(Step(Op.BACKWARD, stage)) for stage in ("mtp_post", "post", "combine")]
    assert places == sorted(places), "what costs nothing here stands where layers that have it allow it"


def test_the_same_seed_finds_the_same_order(found: Found) -> None:
    assert search(system(order=get_order("multi_queue", Replay.HIDDEN))) == found


CARRIED = Order.parse(
    "carried",
    "B.mtp_post W.mtp_post B.post W.post B.combine W.attn F.attn F.post_attn F.dispatch F.shared W.experts R.attn "
    "R.post_attn R.shared R.dispatch B.experts B.dispatch B.shared W.shared R.experts R.combine F.experts F.combine "
    "B.post_attn W.post_attn B.attn R.post R.mtp_post F.post F.mtp_post",
)
"""Weight gradients of the pair before, while this one's first transfers are under way."""


@pytest.mark.parametrize("order", [get_order("multi_queue", Replay.HIDDEN), get_order("single_queue", Replay.HIDDEN),
                                   CARRIED])  # fmt: skip
@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("queues", QUEUES)
def test_a_chain_takes_what_its_plans_take(order: Order, group: int, queues: int) -> None:
    one = system(group, order)
    chain = Chain(chain_of(one), H200)
    assert chain.milliseconds(one.order.steps, queues) == pytest.approx(measure(one, queues).milliseconds)


def test_a_chain_replays_just_in_time() -> None:
    for group in (1, 2):
        recompute = RecomputeConfig.uniform(group)
        one = System(kinds=("M",), order=get_order("single_queue"), recompute=recompute, costs=H200)
        for queues in QUEUES:
            found = Chain(chain_of(one), H200).milliseconds(one.order.steps, queues)
            assert found == pytest.approx(measure(one, queues).milliseconds)


def test_a_backward_alone_takes_what_its_plans_take() -> None:
    """With recorded costs, where hiding B.combine takes W.attn of the pair before."""
    times = {"F.attn": 0.6, "R.attn": 0.5, "B.attn": 1.1, "W.attn": 0.2, "F.experts": 0.6, "B.experts": 0.6,
             "W.experts": 0.7, "F.post": 0.04, "B.post": 0.04, "F.dispatch": 0.7, "F.combine": 0.7, "F.embed": 0.02,
             "B.embed": 0.05, "F.head": 0.9, "B.head": 0.9, "W.head": 0.9}  # fmt: skip
    costs = read_costs("mine", {"milliseconds": times})
    start = system(order=get_order("single_queue", Replay.HIDDEN), costs=costs)
    found = search(start, restarts=1)
    assert "W.attn" in map(str, carried(found.order.steps))

    def alone(order: Order) -> float:
        return Chain(chain_of(with_order(start, order)), costs, alone=True).milliseconds(order.steps, MANY_QUEUES)

    for order in (start.order, found.order):
        timeline = simulate("", [(replace(start, kinds=("M",) * 8, order=order).plan(forward=False, backward=True),
                                  {BACKWARD_SIDE: 0})], costs, MANY_QUEUES)  # fmt: skip
        ends = {
            s.slot.layer: s.end for s in timeline.spans if str(s.slot).endswith(".attn") and s.slot.op is Op.BACKWARD
        }
        assert alone(order) == pytest.approx(ends[3] - ends[4])
    assert alone(found.order) < alone(start.order) - 0.1


def test_of_equal_pairs_the_one_with_the_shorter_backward_alone_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a search that does not look at backward alone ends with a longer one."""
    start = replace(
        system(order=get_order("multi_queue"), costs=PRESETS["units"]), recompute=RecomputeConfig.uniform(1)
    )
    found = search(start, restarts=1)
    monkeypatch.setattr("overlap.search.Chain", lambda system, costs, *, alone=False: Chain(system, costs))
    blind = search(start, restarts=1)
    assert found.score[:2] == blind.score[:2]
    alone = Chain(chain_of(start), start.costs, alone=True)
    seeing, other = (sum(alone.milliseconds(one.order.steps, queues) for queues in QUEUES) for one in (found, blind))
    assert found.score[2] == pytest.approx(seeing, abs=1e-5)
    assert seeing < other - 1


class Alike(Chain):
    """All orders take the same."""

    def __init__(self) -> None:
        pass

    @property
    def steps(self) -> frozenset[Step]:
        return frozenset(Order.parse("", "B.attn W.attn").steps)

    def milliseconds(self, steps: Sequence[Step], queues: int) -> float:
        return 1.0


def test_of_equal_orders_the_one_that_carries_fewer_over_wins() -> None:
    score, order = _Descent([Alike()] * 3, QUEUES).run([(step,) for step in Order.parse("", "W.attn B.attn").steps])
    assert score == (2.0, 2.0, 2.0, 0.0)
    assert not carried([step for group in order for step in group])


def test_an_order_that_breaks_a_dependency_costs_infinitely() -> None:
    one = system(order=get_order("single_queue", Replay.HIDDEN))
    steps = list(one.order.steps)
    for first, second in [("F.attn", "F.dispatch"), ("B.experts", "B.dispatch"), ("R.dispatch", "R.experts")]:
        words = [str(step) for step in steps]
        a, b = words.index(first), words.index(second)
        broken = [*steps]
        broken[a], broken[b] = broken[b], broken[a]
        assert Chain(chain_of(one), H200).milliseconds(broken, ONE_QUEUE) == float("inf")


def test_a_bad_start_is_refused() -> None:
    with pytest.raises(ScheduleError, match="has no R steps"):
        search(system(order=get_order("plain")))


@settings(max_examples=6)
@given(
    st.sampled_from([0.2, 0.9, 1.4]),
    st.sampled_from([1, 2]),
    st.sampled_from([(ONE_QUEUE,), QUEUES]),
    st.booleans(),
    st.booleans(),
)
def test_a_search_never_ends_worse_than_it_began(
    transfer: float, group: int, queues: tuple[int, ...], delayed: bool, shared: bool
) -> None:
    times = {f"{op.value}.{stage}": ms for (op, stage), ms in H200.milliseconds.items()}
    times |= {"F.dispatch": transfer, "F.combine": transfer}
    times |= {f"{op}.shared": 0.1 for op in "FBW"} if shared else {}
    start = system(
        group, get_order("single_queue", Replay.HIDDEN), read_costs("mine", {"milliseconds": times}), delayed=delayed
    )
    found = search(start, queues=queues, restarts=1)
    before = sum(measure(start, q).milliseconds for q in queues)
    after = [measure(with_order(start, found.order), q) for q in queues]
    assert sum(pair.milliseconds for pair in after) <= before + 1e-6
    assert all(pair.milliseconds >= pair.bound - 1e-6 for pair in after)


@pytest.mark.parametrize(
    ("order", "replay"),
    [
        (get_order("plain"), Replay.JUST_IN_TIME),
        (Order.parse("mine", "W.* F.* B.*"), Replay.JUST_IN_TIME),
        (get_order("multi_queue", Replay.HIDDEN), Replay.JUST_IN_TIME),
        (HAND, Replay.HIDDEN),
        (Order.parse("mine", "R.* F.* B.* W.*"), Replay.HIDDEN),
    ],
)
def test_a_search_starts_from_any_order_that_fits(order: Order, replay: Replay) -> None:
    """Whether it names its stages, and whether or not its R steps place anything."""
    start = replace(system(order=order), recompute=RecomputeConfig.uniform(1, replay=replay))
    found = search(start, queues=(MANY_QUEUES,), restarts=0)
    assert found.score[0] <= measure(start, MANY_QUEUES).milliseconds + 1e-6
    assert found.order.replays is (replay is Replay.HIDDEN)
    assert found.order.named(Op.WGRAD) == STAGE_NAMES - {"dispatch", "combine"}


def test_a_descent_starts_from_a_legal_order_only() -> None:
    one = system(order=get_order("single_queue", Replay.HIDDEN))
    descent = _Descent([Chain(chain_of(one), H200), Chain(chain_of(one), H200, alone=True)], QUEUES)
    with pytest.raises(ScheduleError, match="the order to start from breaks a dependency"):
        descent.run([(step,) for step in reversed(one.order.steps)])
