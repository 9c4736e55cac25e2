"""torch's action lists: known makespans and in-flight peaks, what torch rejects, all schedules run to their end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap.pipeline_model.actions import PipelineSchedule, Work, step_text
from overlap.pipeline_model.layout import ChunkHolds, Held
from overlap.pipeline_model.memory import peaks
from overlap.pipeline_model.run import PlainTimes, run_pipeline
from overlap.pipeline_model.torch_lists import PAIRED, SCHEDULES, make_schedule
from recompute import ConfigError

TIMES = PlainTimes(forward=1, backward=2, wgrad=1, pair=0.75 * 3)
NOTHING = ChunkHolds(gap=Held(), replayed=Held(), pending=Held())


def inflight(schedule: PipelineSchedule) -> int:
    return max(peak.inflight for peak in peaks(schedule, [NOTHING] * schedule.num_stages))


@pytest.mark.parametrize(
    ("ranks", "microbatches", "interleaved", "plain", "dualpipev"),
    [(2, 16, 77.25, 99, 77), (4, 32, 156.75, 201, 154.5), (8, 64, 315.75, 405, 309.5)],
)
def test_known_makespans(ranks: int, microbatches: int, interleaved: float, plain: float, dualpipev: float) -> None:
    """Pairs at three quarters of their parts: reference times of two virtual stages a rank."""
    for name, pairs, expected in (
        ("interleaved", True, interleaved),
        ("interleaved", False, plain),
        ("dualpipev", True, dualpipev),
    ):
        schedule = make_schedule(name, ranks, 2, microbatches, pairs=pairs)
        assert run_pipeline(schedule, TIMES).milliseconds == expected, schedule.name


def test_known_inflight_peaks() -> None:
    """One more warm-up microbatch is one more in flight; a V holds less."""
    assert inflight(make_schedule("interleaved", 8, 2, 64)) == 24
    assert inflight(make_schedule("interleaved", 8, 2, 64, pairs=False)) == 23
    assert inflight(make_schedule("dualpipev", 8, 2, 64)) == 17


def test_the_last_rank_pairs_different_microbatches() -> None:
    schedule = make_schedule("interleaved", 2, 2, 4)
    assert [step_text(step) for step in schedule.ranks[1]] == [
        "1F0", "1F1", "3F0", "3F1;3B0", "1F2;3B1", "1F3;1B0", "3F2;1B1", "3F3;3B2", "3B3", "1B2", "1B3",
    ]  # fmt: skip


def test_zbv_splits_every_backward() -> None:
    schedule = make_schedule("zbv", 2, 2, 5)
    works = [action.work for steps in schedule.ranks for step in steps for action in step]
    assert {work: works.count(work) for work in Work} == {
        Work.FORWARD: 20, Work.INPUT: 20, Work.WGRAD: 20, Work.BACKWARD: 0,
    }  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(SCHEDULES), ranks=st.integers(2, 5), chunks=st.integers(1, 3), microbatches=st.integers(1, 14),
    pairs=st.booleans(), p2p=st.sampled_from([0.0, 0.3, 5.0]),
)  # fmt: skip
def test_what_is_accepted_runs_to_its_end(
    name: str, ranks: int, chunks: int, microbatches: int, pairs: bool, p2p: float
) -> None:
    try:
        schedule = make_schedule(name, ranks, chunks, microbatches, pairs=pairs)
    except ConfigError:
        return
    run = run_pipeline(schedule, TIMES, p2p)
    for rank in run.ranks:
        assert rank.working + rank.exposed_p2p + rank.bubble == pytest.approx(run.milliseconds)
        assert min(rank.working, rank.exposed_p2p, rank.bubble) >= -1e-9
    assert (schedule.paired_share > 0) <= (pairs and name in PAIRED)
    assert run.milliseconds >= chunks * microbatches * 2.25


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "microbatches", "message"),
    [
        ("fast", 2, 2, 4, "schedule='fast': must be one of interleaved, dualpipev, zbv, 1f1b, gpipe"),
        ("gpipe", 1, 1, 4, "pp=1: must be at least 2"),
        ("interleaved", 2, 0, 4, "vpp=0: must be at least 1"),
        ("zbv", 2, 3, 4, "vpp=3: must be 2 for schedule zbv"),
        ("1f1b", 2, 2, 4, "vpp=2: must be 1 for schedule 1f1b"),
        ("gpipe", 2, 1, 0, "microbatches=0: must be at least 1"),
        ("dualpipev", 4, 2, 7, "microbatches=7: dualpipev needs as many as there are virtual stages: at least 8"),
        ("interleaved", 4, 2, 9, "microbatches=9: interleaved runs them in 2 rounds"),
    ],
)
def test_what_torch_rejects(name: str, ranks: int, chunks: int, microbatches: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_schedule(name, ranks, chunks, microbatches)
