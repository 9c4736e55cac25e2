"""`plan --budget` and `profile --oracle`: what fits, what is refused, and that nothing is ignored."""

from __future__ import annotations

import pytest

from tests.cli.run import TINY, command

JOB = f"--layers 2 --dense-layers 1 --experts 4 {TINY}"


def test_a_plan_of_a_pipeline(capsys, tmp_path) -> None:
    words = f"plan --budget 100MiB --pp 2 --virtual 1 --schedule 1f1b --ep 2 --json {JOB} --out"
    result = command(capsys, words, str(tmp_path))
    payload = result.json
    assert result.status == 0
    assert payload["fits"]
    assert payload["missing"] == 0
    assert payload["fastest"]["milliseconds"] == min(c["milliseconds"] for c in payload["candidates"] if c["fits"])
    for candidate in payload["candidates"]:
        assert candidate["peak"] == sum(candidate["bins"].values())
        assert candidate["fits"] == (candidate["peak"] <= 100 * 2**20)
    assert {c["method"] for c in payload["candidates"]} == {"none", "uniform", "block"}
    mixed = "block 1 + selective moe_act keep host, delayed wgrad"
    names = {candidate["name"] for candidate in payload["candidates"]}
    assert {"selective moe_act", "uniform 1 keep host", "block 1 hidden keep host", mixed} <= names
    assert len(payload["assumptions"]) > 5
    assert (tmp_path / "frontier.png").stat().st_size > 1000
    assert payload["job"]["dp"] == 2


def test_nothing_fits(capsys) -> None:
    result = command(capsys, f"plan --budget 80MiB --layers 1 --json {TINY}")
    payload = result.json
    assert result.status == 1
    assert payload["fastest"] is None
    assert payload["missing"] == payload["smallest"]["peak"] - 80 * 2**20 > 0
    assert payload["largest_bin"] == "workspace"


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("plan --budget much", "budget"),
        ("plan --budget 1GiB --method uniform --num-layers 1", "method"),
        ("plan --budget 1GiB --delay-wgrad", "delay_wgrad"),
        ("plan --budget 1GiB --lead 1", "lead"),
        ("plan --budget 1GiB --preset gpt", "preset"),
        ("plan --budget 1GiB --device-model abacus", "device_model"),
        ("plan --budget 1GiB --packed", "packed"),
        ("plan --budget 1GiB --ep 3", "ep"),
        ("plan --budget 1GiB --shards 0", "shards"),
        ("plan --shards 2", "shards"),
        ("plan --budget 1GiB --virtual 2", "virtual"),
        ("plan --budget 1GiB --ep 4 --dp 6", "dp"),
        ("plan --budget 1GiB --pp 8", "pp"),
        ("plan --budget 1GiB --pp 0", "pp"),
        ("plan --budget 1GiB --routing worst", "routing"),
        ("plan --budget 1GiB --ep 2 --routing skewed", "skew"),
        ("plan --budget 1GiB --ep 2 --skew 2", "skew"),
        ("plan --budget 1GiB --ep 2 --routing skewed --skew inf", "skew"),
        ("plan --budget 1GiB --ep 2 --routing skewed --skew nan", "skew"),
        ("plan --budget 1GiB --pp 2 --schedule zbv --virtual 1", "virtual"),
        ("plan --ep 2", "ep"),
        ("plan --budget 1GiB --pp 2 --vpp 2", "vpp"),
        ("plan --budget 1GiB --pp 2 --schedule gpipe", "schedule"),
        ("plan --out somewhere", "out"),
        ("profile --ep 2", "ep"),
        ("profile --rank 0", "rank"),
        ("profile --oracle --rank 0", "rank"),
        ("profile --oracle --pp 2 --rank 2", "rank"),
        ("profile --oracle --pp 2 --recompute-modules shared_experts --shared-width 0", "modules"),
        ("profile --oracle --pp 2 --method uniform --num-layers 1 --keep sharded", "keep"),
        ("profile --oracle --method uniform --num-layers 1 --keep sharded", "keep"),
        ("profile --oracle --groups 1,x", "groups"),
        ("profile --oracle --out somewhere", "out"),
        ("profile --oracle --curve somewhere", "curve"),
        ("profile --groups 1", "groups"),
    ],
)
def test_bad_input_is_refused_by_name(capsys, words, field) -> None:
    result = command(capsys, words)
    assert result.status == 2
    assert field in result.err
    assert result.out == ""


def test_oracle_equals_the_allocator(capsys) -> None:
    words = f"profile --oracle --layers 2 --method uniform --num-layers 2 --delay-wgrad --json {TINY}"
    result = command(capsys, words)
    assert result.status == 0
    assert result.json["predicted_peak"] == result.json["measured_peak"] > 0
    assert result.json["equal"]


def test_oracle_of_a_rank(capsys) -> None:
    words = f"profile --oracle --pp 2 --virtual 1 --schedule 1f1b --rank 1 --json {JOB}"
    result = command(capsys, words)
    shown = result.json["rank"]
    assert result.status == 0
    assert shown["rank"] == 1
    assert shown["peak"] == sum(shown["bins"].values())
    assert [rank["rank"] for rank in result.json["ranks"]] == [0, 1]
    assert result.json["chunks"] == ["embed+1D", "1M+head"]


def test_groups(capsys, tmp_path) -> None:
    result = command(capsys, f"profile --oracle --groups 1,2 --layers 2 --json {TINY} --out", str(tmp_path))
    assert result.status == 0
    rows = result.json["groups"]
    assert [row["group"] for row in rows] == [1, 2]
    assert all(row["predicted"] == row["measured"] for row in rows)
    assert (tmp_path / "groups.png").exists()
