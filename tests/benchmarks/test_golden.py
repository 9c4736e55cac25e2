"""A benchmark that can fail, and two result files side by side."""

from __future__ import annotations

import copy
import json

import pytest

from benchmarks.memory import compare, golden
from benchmarks.memory.markdown import markdown


@pytest.fixture
def payload():
    return copy.deepcopy(dict(golden.load(golden.GOLDEN)))


def test_the_golden_file_passes_itself(payload) -> None:
    assert golden.check(payload, golden.load(golden.GOLDEN)) == []


@pytest.mark.parametrize(
    ("field", "factor", "fails"),
    [
        ("activation_peak", 1.03, True),
        ("activation_peak", 0.97, True),
        ("activation_peak", 1.01, False),
        ("step", 2.0, False),
        ("reserved", 1.06, True),
    ],
)
def test_a_figure_that_leaves_its_tolerance_fails(field, factor, fails) -> None:
    row = {"name": "a", "activation_peak": 900.0, "reserved": 10000.0, "step": 300.0}
    found = golden.check({"memory": [{**row, field: row[field] * factor}]}, {"memory": [row]})
    assert [(failure.part, failure.case, failure.field) for failure in found] == (
        [("memory", "a", field)] if fails else []
    )


@pytest.mark.parametrize(
    ("name", "field", "factor", "fails"),
    [
        ("a, CUDA graph", "step", 1.09, True),
        ("a, CUDA graph", "step", 0.5, False),
        ("a, host_loopback x0.3, CUDA graph", "of_bound", 1.03, True),
        ("a, host_loopback x0.3", "of_bound", 1.03, False),
    ],
)
def test_times_count_where_the_host_does_not_set_them(name, field, factor, fails) -> None:
    row = {"name": name, "step": 300.0, "of_bound": 1.04}
    found = golden.check({"part": [{**row, field: row[field] * factor}]}, {"part": [row]})
    assert [failure.field for failure in found] == ([field] if fails else [])


@pytest.mark.parametrize(("found", "fails"), [(0.0, False), (0.055, False), (0.06, True)])
def test_a_share_near_nothing_has_a_margin(found, fails) -> None:
    row = {"name": "a, CUDA graph", "replay_exposed_share": 0.006}
    failures = golden.check({"part": [{**row, "replay_exposed_share": found}]}, {"part": [row]})
    assert [failure.field for failure in failures] == (["replay_exposed_share"] if fails else [])


def test_a_run_with_no_known_case_is_no_pass(payload) -> None:
    with pytest.raises(ValueError, match="no case in common"):
        golden.check({"memory": [{"name": "new"}]}, payload)


def test_a_prediction_that_misses_fails() -> None:
    rows = [{"name": "good", "within": True}, {"name": "bad", "within": False}]
    assert golden.oracle_failures({"oracle": rows}) == ["bad"]


def test_ratios(payload, tmp_path, capsys) -> None:
    other = copy.deepcopy(payload)
    other["graph_overhead"][0]["step"] *= 2
    found = {(r.part, r.case, r.field): r.ratio for r in compare.ratios(payload, other)}
    assert found["graph_overhead", payload["graph_overhead"][0]["name"], "step"] == 2
    assert sum(ratio != 1 for ratio in found.values()) == 1
    for name, content in (("a.json", payload), ("b.json", other), ("c.json", {"graph_overhead": []})):
        (tmp_path / name).write_text(json.dumps(content))
    assert compare.show(tmp_path / "a.json", tmp_path / "b.json") == 0
    assert "2.000" in capsys.readouterr().out
    assert compare.show(tmp_path / "a.json", tmp_path / "c.json") == 1


def test_markdown_has_environment_and_a_row_per_case(payload) -> None:
    text = markdown(payload)
    assert f"- command: {payload['environment']['command']}" in text
    assert all(f"| {row['name']} |" in text for row in payload["graph_overhead"])
