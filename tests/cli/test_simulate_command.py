"""`simulate`: the JSON contract, what is exposed under which order, the search and its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from overlap.costs import PRESETS
from tests.cli.run import command, refused

Capsys = pytest.CaptureFixture[str]


def simulated(capsys: Capsys, words: str) -> dict[str, Any]:
    result = command(capsys, f"simulate --json {words}")
    assert (result.status, result.err) == (0, "")
    return result.json


def exposed(payload: dict[str, Any]) -> set[str]:
    return {kind for kind, time in payload["exposed"].items() if time > 1e-9}


def test_contract(capsys: Capsys) -> None:
    payload = simulated(capsys, "--order single_queue --queues 1")
    assert set(payload) == {
        "milliseconds_per_pair", "milliseconds_per_step", "compute_idle", "exposed", "bound", "over_bound", "config",
    }  # fmt: skip
    assert payload["milliseconds_per_pair"] == pytest.approx(3.9)
    assert payload["milliseconds_per_step"] > 8 * 5 * 3.9
    assert payload["config"]["recompute"] == "uniform 1 hidden"


@pytest.mark.parametrize("queues", [1, 32])
def test_nothing_is_exposed_where_replays_are_hidden(queues: int, capsys: Capsys) -> None:
    for words in ("", "--replay hidden", "--method block --num-layers 8", "--dense-layers 2"):
        assert exposed(simulated(capsys, f"--order single_queue --queues {queues} {words}")) == set()


def test_just_in_time_exposes_the_replay_alone(capsys: Capsys) -> None:
    assert exposed(simulated(capsys, "--order single_queue --queues 1 --replay just_in_time")) == {"R.dispatch"}


def test_todays_order_exposes_transfers_under_one_queue(capsys: Capsys) -> None:
    """Row 63."""
    kinds = exposed(simulated(capsys, "--order fused --queues 1"))
    assert {"F.dispatch", "F.combine", "B.dispatch", "R.dispatch", "R.combine"} <= kinds


def test_costs_from_a_file(tmp_path: Path, capsys: Capsys) -> None:
    path = tmp_path / "mine.json"
    content: dict[str, Any] = PRESETS["h200"].as_json()
    content["milliseconds"] |= {"F.dispatch": 1.0, "F.combine": 1.0}
    path.write_text(json.dumps(content))
    payload = simulated(capsys, f"--costs {path}")
    assert payload["bound"] == pytest.approx(5.0), "communication-bound: five transfers"
    assert payload["config"]["costs"] == "mine"


def test_the_order_found_is_accepted_back(tmp_path: Path, capsys: Capsys) -> None:
    path = tmp_path / "best.txt"
    payload = simulated(capsys, f"--order multi_queue --search --write {path}")
    found = payload["search"]
    assert found["table"] == path.read_text()
    again = simulated(capsys, f"--order {path} --queues 1")
    assert again["milliseconds_per_pair"] == found["queues"]["1"]["milliseconds_per_pair"] == pytest.approx(3.9)
    assert again["config"]["order"] == "best"
    assert found["queues"]["32"]["over_bound"] == pytest.approx(0, abs=1e-9)
    words = f"verify --json --layers 3 --method uniform --num-layers 1 --replay hidden --order {path}"
    assert command(capsys, words).json["equal"] is True


def test_a_lead_hides_the_first_forwards_transfers(capsys: Capsys) -> None:
    """Of steps alone, the pair is the same; the longer the lead, the shorter the step."""
    found = [simulated(capsys, f"--order single_queue --queues 32 --lead {lead}") for lead in (0, 4, 8)]
    steps = [payload["milliseconds_per_step"] for payload in found]
    assert steps == sorted(steps, reverse=True)
    assert len(set(steps)) == 3
    assert [payload["config"]["lead"] for payload in found] == [0, 4, 8]
    assert len({payload["milliseconds_per_pair"] for payload in found}) == 1


def test_tables_for_people(capsys: Capsys) -> None:
    result = command(capsys, "simulate --order fused --queues 1 --search --for-queues 1")
    assert result.status == 0
    assert "A layer pair in steady state" in result.out
    assert "orders tried; the best one:" in result.out
    assert "B.combine F.attn" in result.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--order fast", "order 'fast' is unknown"),
        ("--order plain --replay hidden", "order plain has no R steps"),
        ("--costs none", "costs='none': must be one of h200, units, or a JSON file"),
        ("--method none --replay hidden", "replay='hidden': has no effect with method none"),
        ("--method none --num-layers 2", "num_layers=2: has no effect with method none"),
        ("--method squares", "method='squares': must be"),
        ("--num-layers 0", "num_layers=0: must be an integer of at least 1"),
        ("--layers 0", "layers=0: must be at least 1"),
        ("--layers 2 --dense-layers 3", "dense_layers=3: must be from 0 to the layers"),
        ("--microbatches 0", "microbatches=0: must be at least 1"),
        ("--lead 9", "lead=9: must be an integer from 0 to the layers of the program (8)"),
        ("--lead -1", "lead=-1: must be"),
        ("--lead 1 --microbatches 1", "lead=1: has no effect on a step of one microbatch"),
        ("--write best.txt", "write='best.txt': has no effect without --search"),
        ("--seed 1", "seed=1: has no effect without --search"),
        ("--for-queues 1", "for_queues=[1]: has no effect without --search"),
    ],
)
def test_bad_input(words: str, message: str, capsys: Capsys) -> None:
    assert message in refused(capsys, f"simulate {words}")
