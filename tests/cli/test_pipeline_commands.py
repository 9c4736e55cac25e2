"""Pipelines on the command line: one process with several virtual stages, and what is refused."""

from __future__ import annotations

import pytest

from tests.cli.run import TINY, command, refused

Capsys = pytest.CaptureFixture[str]
KEYS = {
    "equal": bool, "loss_equal": bool, "gradients": dict, "buffers": dict, "rng_equal": bool,
    "max_live_segments": int, "ranks": list, "config": dict,
}  # fmt: skip


def test_verify_contract(capsys: Capsys) -> None:
    words = "--layers 3 --vpp 2 --method uniform --num-layers 1 --replay hidden --mtp 1 --dropout 0.1 --steps 1"
    result = command(capsys, f"verify {words} --microbatches 3 --json {TINY}")
    assert (result.status, result.err) == (0, "")
    payload = result.json
    assert {name: type(value) for name, value in payload.items()} == KEYS
    assert payload["equal"] is True
    (rank,) = payload["ranks"]
    assert (rank["stages"], rank["segments"]) == ([0, 1], [[[0], [1]], [[2], [3]]])
    assert (rank["overlapped_pairs"], rank["receive_buffers"]) == (4, {"peak": 0, "live": 0})
    config = payload["config"]
    assert (config["pp"], config["vpp"], config["schedule"], config["pp_layout"]) == (1, 2, "interleaved", [2, 1])


@pytest.mark.parametrize("control", ["no_rng", "wrong_gradient", "local_seeds"])
def test_a_broken_pipeline_is_seen(control: str, capsys: Capsys) -> None:
    words = "--layers 2 --vpp 2 --method uniform --num-layers 1 --dropout 0.3 --steps 1"
    result = command(capsys, f"verify {words} --microbatches 2 --control {control} --json {TINY}")
    assert result.status == 1
    assert result.json["gradients"]["different"]


def test_plan_counts_what_is_in_flight(capsys: Capsys) -> None:
    words = "--pp 2 --schedule zbv --layers 5 --pp-layout 2,0,2,1 --method uniform --num-layers 2 --microbatches 6"
    payload = command(capsys, f"plan {words} --json {TINY}").json
    assert [(each["rank"], each["layers"], each["segments"]) for each in payload["stages"]] == [
        (0, [0, 1], [[0, 1]]), (1, [], []), (1, [2, 3], [[2, 3]]), (0, [4], [[4]]),
    ]  # fmt: skip
    assert [each["in_flight"] for each in payload["ranks"]] == [4, 4]
    assert all(each["put_off"] > 0 for each in payload["ranks"])
    shown = command(capsys, f"plan {words} {TINY}").out
    assert "most in flight" in shown


def test_train_through_virtual_stages(capsys: Capsys) -> None:
    words = "--layers 2 --seq 16 --batch 1 --microbatches 3 --steps 2 --hidden 16 --experts 2 --topk 1"
    plain = command(capsys, f"train {words} --json")
    cut = command(capsys, f"train {words} --schedule dualpipev --json")
    assert (plain.status, cut.status) == (0, 0)
    assert cut.json["losses"][0] == plain.json["losses"][0]
    assert cut.json["losses"][1] == pytest.approx(plain.json["losses"][1], abs=1e-4)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("verify --vpp 2 --layers 2 --pp-layout 1,2", "pp_layout"),
        ("verify --vpp 2 --layers 2 --pp-layout 1,x", "pp_layout"),
        ("verify --vpp 0 --layers 2", "vpp"),
        ("verify --schedule dualpipev --vpp 3 --layers 3", "vpp"),
        ("verify --schedule dualpipev --layers 2 --microbatches 1", "schedule"),
        ("verify --schedule interleaved --pin-activations --layers 2", "pin_activations"),
        ("verify --vpp 2 --layers 2 --control drop_bridge", "control"),
        ("verify --vpp 2 --layers 2 --lead 1", "lead"),
        ("plan --schedule dualpipev --layers 2 --lead 1", "lead"),
        ("verify --pp 2 --layers 2", "pp"),
        ("plan --pp 2 --layers 2 --method uniform --num-layers 1 --keep sharded", "keep='sharded'"),
        ("train --vpp 2 --layers 2 --save x", "save"),
    ],
)
def test_bad_pipelines_are_refused(words: str, field: str, capsys: Capsys) -> None:
    assert field in refused(capsys, words)
