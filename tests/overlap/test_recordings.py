"""Recordings: one timeline of a file or all, costs of a recorded step, and the step simulated from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overlap.costs import PRESETS, costs_of, load_costs
from overlap.ir import Op
from overlap.orders import get_order
from overlap.recordings import load_recording, split_name
from overlap.simulate import MANY_QUEUES, simulate
from overlap.steady import measure_step
from overlap.synthetic import MOE, System
from overlap.timeline import Timeline, chrome_trace
from recompute import ConfigError, RecomputeConfig, Replay

COMMITTED = "benchmarks/memory/results/graph_2026-11-30_trace.json"


def step(name: str, replay: Replay) -> Timeline:
    system = System(
        kinds=(MOE,) * 2, order=get_order("single_queue", replay), recompute=RecomputeConfig.uniform(1, replay=replay),
        costs=PRESETS["h200"],
    )  # fmt: skip
    return simulate(name, system.step_runs(2), system.costs, MANY_QUEUES)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "run#7.json"
    path.write_text(json.dumps(chrome_trace([step("exposed", Replay.JUST_IN_TIME), step("hidden", Replay.HIDDEN)])))
    return str(path)


def test_names() -> None:
    assert split_name("a/b.json") == ("a/b.json", None)
    assert split_name("a/b.json#12") == ("a/b.json", 12)
    assert split_name("a#b.json") == ("a#b.json", None)


def test_all_or_one(trace: str) -> None:
    assert [timeline.name for timeline in load_recording("recorded", trace)] == ["exposed", "hidden"]
    assert [timeline.name for timeline in load_recording("recorded", f"{trace}#1")] == ["hidden"]
    with pytest.raises(ConfigError, match=r"recorded=.*: the file holds timelines 0 to 1"):
        load_recording("recorded", f"{trace}#2")


def test_costs_are_read_from_a_recorded_run(trace: str) -> None:
    costs = load_costs(f"{trace}#1")
    assert costs.name == "hidden"
    assert costs.of(Op.BACKWARD, "experts") == pytest.approx(PRESETS["h200"].of(Op.BACKWARD, "experts"))
    with pytest.raises(ConfigError, match=r"costs=.*: the file holds 2 timelines: name one of them as .*#0"):
        load_costs(trace)
    with pytest.raises(ConfigError, match=r"costs=.*must be one of h200, units, or a JSON file"):
        load_costs("nowhere.json#0")


@pytest.mark.parametrize(
    ("number", "order", "replay"),
    [(0, "multi_queue", Replay.JUST_IN_TIME), (3, "single_queue", Replay.HIDDEN)],
)
def test_a_recorded_device_step_is_predicted_from_its_own_costs(number: int, order: str, replay: Replay) -> None:
    """Within one percent: the model of lanes holds on the device."""
    (recorded,) = load_recording("recorded", f"{COMMITTED}#{number}")
    recompute = RecomputeConfig.uniform(1, replay=replay)
    system = System(kinds=(MOE,) * 8, order=get_order(order, replay), recompute=recompute, costs=costs_of(recorded))
    assert measure_step(system, 6, MANY_QUEUES).end == pytest.approx(recorded.end, rel=0.01)
    assert measure_step(system, 6, MANY_QUEUES).end != pytest.approx(measure_step(system, 7, MANY_QUEUES).end, rel=0.01)
