"""`timeline`: a trace that reads back and a picture; a recorded run beside the simulated one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overlap.timeline import read_trace
from tests.cli.run import command, refused

Capsys = pytest.CaptureFixture[str]


def test_contract(tmp_path: Path, capsys: Capsys) -> None:
    result = command(capsys, f"timeline --json --layers 3 --microbatches 2 --out {tmp_path / 'deep' / 'out'}")
    assert (result.status, result.err) == (0, "")
    (timeline,) = read_trace(json.loads(Path(result.json["trace"]).read_text()))
    assert result.json["milliseconds"] == {timeline.name: pytest.approx(timeline.end)}
    assert {span.slot.microbatch for span in timeline.spans} == {0, 1}
    assert Path(result.json["picture"]).read_bytes().startswith(b"\x89PNG")


def test_a_recorded_run_stands_below_its_prediction(tmp_path: Path, capsys: Capsys) -> None:
    words = f"timeline --layers 2 --microbatches 1 --out {tmp_path}"
    assert command(capsys, f"{words} --order fused").status == 0
    recorded = tmp_path / "recorded.json"
    (tmp_path / "timeline.json").rename(recorded)
    result = command(capsys, f"{words} --recorded {recorded}")
    assert result.status == 0
    names = [timeline.name for timeline in read_trace(json.loads((tmp_path / "timeline.json").read_text()))]
    assert names == ["single_queue, 1 queue(s)", "fused, 1 queue(s)"]
    assert all(name in result.out for name in names)
    both = tmp_path / "both.json"
    (tmp_path / "timeline.json").rename(both)
    assert command(capsys, f"{words} --recorded {both}#1 --costs {both}#1 --json").json["config"]["costs"] == names[1]
    names = [timeline.name for timeline in read_trace(json.loads((tmp_path / "timeline.json").read_text()))]
    assert names == ["single_queue, 1 queue(s)", "fused, 1 queue(s)"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--recorded none.json", "recorded='none.json': cannot be read as JSON"),
        ("--from-ms 100000", "from_ms=100000.0: must be from 0 to below the picture's end"),
        ("--from-ms -1", "from_ms=-1.0: must be"),
        ("--to-ms inf", "to_ms=inf: must be finite"),
        ("--to-ms nan", "to_ms=nan: must be finite"),
    ],
)
def test_bad_input(words: str, message: str, tmp_path: Path, capsys: Capsys) -> None:
    assert message in refused(capsys, f"timeline --layers 1 --microbatches 1 --out {tmp_path} {words}")


def test_another_trace_is_refused(tmp_path: Path, capsys: Capsys) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"traceEvents": [{"ph": "X"}]}')
    words = f"timeline --layers 1 --microbatches 1 --out {tmp_path} --recorded {path}"
    assert "must be a Chrome trace that" in refused(capsys, words)
