"""Costs: presets, the JSON schema entry by entry, and what is taken from a recorded run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from overlap.costs import PRESETS, StageCosts, costs_of, load_costs, read_costs
from overlap.ir import Lane, Op, Slot
from overlap.orders import Order
from overlap.simulate import MANY_QUEUES, simulate
from overlap.synthetic import System
from overlap.timeline import Span, Timeline
from recompute import ConfigError, RecomputeConfig, Replay


def test_what_falls_back_to_what() -> None:
    costs = read_costs("mine", {"milliseconds": {"F.attn": 1, "R.attn": 2, "F.dispatch": 3, "B.experts": 4}})
    assert [costs.of(op, "attn") for op in (Op.FORWARD, Op.NO_GRAD, Op.REPLAY)] == [1, 1, 2]
    assert [costs.of(op, "dispatch") for op in (Op.NO_GRAD, Op.REPLAY, Op.BACKWARD)] == [3, 3, 3]
    for op, stage in [(Op.BACKWARD, "attn"), (Op.WGRAD, "experts"), (Op.FORWARD, "experts"), (Op.REPLAY, "post")]:
        with pytest.raises(ConfigError, match="costs='mine': has no time for"):
            costs.of(op, stage)


def test_transfers_scale_alone() -> None:
    slower = PRESETS["h200"].scaled_transfers(2)
    assert slower.of(Op.FORWARD, "dispatch") == pytest.approx(1.26)
    assert slower.of(Op.FORWARD, "attn") == PRESETS["h200"].of(Op.FORWARD, "attn")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_a_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(PRESETS[name].as_json()))
    assert load_costs(str(path)) == PRESETS[name]
    assert load_costs(name) is PRESETS[name]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], r"costs='mine': must be \{milliseconds"),
        ({}, r"costs='mine': must be \{milliseconds"),
        ({"milliseconds": []}, r"costs='mine': must be \{milliseconds"),
        ({"milliseconds": {}, "unit": "s"}, r"costs\.unit='s': is not known"),
        ({"milliseconds": {}, "kernels": 0}, r"costs\.kernels=0: must be an integer of at least 1"),
        ({"milliseconds": {}, "kernels": True}, r"costs\.kernels=True"),
        ({"milliseconds": {}, "host_milliseconds": -1}, r"costs\.host_milliseconds=-1: must be a number"),
        ({"milliseconds": {"N.attn": 1}}, r"costs\.milliseconds='N\.attn': must be F, R, B or W"),
        ({"milliseconds": {"F": 1}}, r"costs\.milliseconds='F': must be F, R, B or W"),
        ({"milliseconds": {"F.attn": "1"}}, r"costs\.milliseconds\.F\.attn='1': must be a number"),
        ({"milliseconds": {"F.attn": float("nan")}}, r"costs\.milliseconds\.F\.attn=nan: must be a number"),
        ({"milliseconds": {"F.attn": True}}, r"costs\.milliseconds\.F\.attn=True: must be a number"),
    ],
)
def test_what_breaks_the_schema_is_named(content: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_costs("mine", content)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="costs='none': must be one of h200, units, or a JSON file"):
        load_costs("none")
    path = tmp_path / "broken.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        load_costs(str(path))


def test_costs_of_a_recorded_run_are_its_medians() -> None:
    def span(slot: str, lane: Lane, start: float, end: float) -> Span:
        return Span(slot=Slot.parse(slot), lane=lane, start=start, end=end)

    run = Timeline(
        name="run",
        spans=(
            span("N0.0.attn", Lane.COMPUTE, 0, 1), span("F1.0.attn", Lane.COMPUTE, 1, 4),
            span("F1.1.attn", Lane.COMPUTE, 4, 6), span("N0.0.move", Lane.COMM, 1, 5),
        ),
    )  # fmt: skip
    costs = costs_of(run)
    assert dict(costs.milliseconds) == {(Op.FORWARD, "attn"): 2, (Op.FORWARD, "move"): 4}
    assert costs.of(Op.BACKWARD, "move") == 4


def test_a_simulated_run_gives_its_own_costs_back() -> None:
    costs = PRESETS["h200"]
    order = Order.parse("mine", "F.* B.* W.* R.*")
    system = System(
        kinds=("M",) * 3, order=order, recompute=RecomputeConfig.uniform(1, replay=Replay.HIDDEN), costs=costs
    )
    found: StageCosts = costs_of(simulate("run", system.step_runs(3), costs, MANY_QUEUES))
    for part in found.milliseconds:
        assert found.of(*part) == pytest.approx(costs.of(*part))
