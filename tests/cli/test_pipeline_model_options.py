"""`simulate --pp` and `timeline --pp`: the JSON contract, the size it is for, files, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from time import process_time
from typing import Any

import pytest

from tests.cli.run import command, refused

Capsys = pytest.CaptureFixture[str]


def simulated(capsys: Capsys, words: str) -> dict[str, Any]:
    result = command(capsys, f"simulate --json {words}")
    assert (result.status, result.err) == (0, "")
    return result.json


def test_contract(capsys: Capsys) -> None:
    payload = simulated(capsys, "--pp 2 --vpp 2 --microbatches 8 --schedule interleaved")
    assert set(payload) == {
        "milliseconds", "working", "bubble_share", "exposed_p2p", "exposed_a2a", "paired_share", "peak_inflight",
        "per_rank", "config",
    }  # fmt: skip
    assert len(payload["per_rank"]) == 2
    for rank in payload["per_rank"]:
        assert rank["working"] + rank["exposed_p2p"] + rank["bubble"] == pytest.approx(payload["milliseconds"])
    assert payload["config"]["pp_layout"] == [2, 2, 2, 2]
    assert payload["config"]["layers"] == 8
    assert payload["config"]["schedule"] == "interleaved"
    assert payload["peak_inflight"] == 6


@pytest.mark.parametrize(
    ("words", "stages"),
    [("--schedule dualpipev", 4), ("--schedule zbv", 4), ("--schedule 1f1b", 2), ("--schedule gpipe", 2),
     ("--vpp 3", 6), ("--schedule gpipe --vpp 2", 4), ("--no-pairs", 4), ("--schedule zbv --pin-activations", 4)],
)  # fmt: skip
def test_every_schedule(words: str, stages: int, capsys: Capsys) -> None:
    payload = simulated(capsys, f"--pp 2 --microbatches 4 {words}")
    assert payload["config"]["pp_layout"] == [2] * stages
    assert 0 < payload["bubble_share"] < 1


def test_pairs_hide_the_all_to_all(capsys: Capsys) -> None:
    paired, plain = (simulated(capsys, f"--pp 2 --microbatches 16 --layers 16 {words}") for words in ("", "--no-pairs"))
    assert paired["milliseconds"] < plain["milliseconds"]
    assert paired["exposed_a2a"] < 0.4 * plain["exposed_a2a"]
    assert (paired["paired_share"], plain["paired_share"]) == (0.875, 0)


def test_recompute_shows_in_what_is_held(capsys: Capsys) -> None:
    words = "--pp 2 --microbatches 8 --input-mib 16 --activation-mib 480"
    none, one, deferred = (
        simulated(capsys, f"{words} {more}")["per_rank"][0]["peak_bytes"] // 2**20
        for more in (
            "--method none --schedule zbv", "--replay just_in_time --schedule zbv",
            "--replay just_in_time --schedule zbv --pin-activations",
        )
    )  # fmt: skip
    assert none == 4 * 2 * 480, "four microbatches of two layers each"
    assert one == 4 * 2 * 16 + 480
    assert one < deferred < none


def test_sixty_four_ranks(capsys: Capsys) -> None:
    """Time grows with the actions: four times the microbatches stay within seconds."""
    simulated(capsys, "--pp 2")  # imports
    begun = process_time()
    payload = simulated(capsys, "--pp 64 --vpp 2 --microbatches 128 --schedule interleaved")
    assert process_time() - begun < 5, "about one second where nothing else runs"
    assert payload["config"]["layers"] == 256
    assert len(payload["per_rank"]) == 64


def test_layouts(capsys: Capsys) -> None:
    words = "--pp 2 --microbatches 4"
    assert simulated(capsys, f"{words} --layers 7")["config"]["pp_layout"] == [2, 2, 2, 1]
    payload = simulated(capsys, f"{words} --pp-layout 1,3,2,1")
    assert (payload["config"]["pp_layout"], payload["config"]["layers"]) == ([1, 3, 2, 1], 7)
    empty = simulated(capsys, f"{words} --pp-layout 0,4,0,0")["per_rank"]
    assert empty[0]["working"] < empty[1]["working"]


def test_files(tmp_path: Path, capsys: Capsys) -> None:
    result = command(capsys, f"timeline --pp 2 --schedule dualpipev --microbatches 4 --json --out {tmp_path / 'out'}")
    assert (result.status, result.err) == (0, "")
    events = json.loads(Path(result.json["trace"]).read_text())["traceEvents"]
    assert max(e["ts"] + e["dur"] for e in events if e["ph"] == "X") == pytest.approx(
        1000 * result.json["milliseconds"]
    )
    assert Path(result.json["picture"]).read_bytes().startswith(b"\x89PNG")


def test_tables_for_people(tmp_path: Path, capsys: Capsys) -> None:
    for words, ranks in (("simulate", 20), (f"timeline --out {tmp_path}", 2)):
        result = command(capsys, f"{words} --pp {ranks} --microbatches 20 --input-mib 1")
        assert result.status == 0
        assert f"interleaved, {ranks} x 2 stages, 20 microbatches" in result.out
        assert "of the forwards overlap with a backward" in result.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *((f"--{words}", "has no effect without --pp") for words in (
            "vpp 2", "schedule zbv", "no-pairs", "pp-layout 1,2", "p2p-ms 0", "pin-activations", "input-mib 0",
            "activation-mib 1",
        )),
        ("--pp 2 --schedule fast", "schedule='fast': must be one of"),
        ("--pp 2 --schedule zbv --no-pairs", "no_pairs=True: has no effect with schedule zbv"),
        ("--pp 2 --pin-activations", "pin_activations=True: has no effect with schedule interleaved"),
        ("--pp 2 --schedule zbv --pin-activations --method none", "pin_activations=True: has no effect where nothing"),
        ("--pp 2 --schedule zbv --vpp 1", "vpp=1: must be 2 for schedule zbv"),
        ("--pp 2 --lead 1", "lead=1: has no place in a pipeline"),
        ("--pp 1", "pp=1: must be at least 2"),
        ("--pp 2 --vpp 0", "vpp=0: must be at least 1"),
        ("--pp 2 --layers 3", "layers=3: must be at least one per virtual stage: 4"),
        ("--pp 2 --pp-layout 1,2", "pp_layout='1,2': must be 4 numbers"),
        ("--pp 2 --pp-layout 1,2,a,1", "pp_layout='1,2,a,1': must be 4 numbers"),
        ("--pp 2 --pp-layout 1,1,1,1 --layers 5", "pp_layout=(1, 1, 1, 1): must add up to the model's layers: 5"),
        ("--pp 2 --p2p-ms -1", "p2p_ms=-1.0: must be a number of at least 0"),
        ("--pp 2 --input-mib -1", "input_mib=-1.0: must be a number of at least 0"),
        ("--pp 2 --search", "search=True: has no effect with --pp"),
        ("--pp 2 --schedule dualpipev --microbatches 3", "microbatches=3: dualpipev needs as many"),
    ],
)  # fmt: skip
def test_bad_input(words: str, message: str, capsys: Capsys) -> None:
    assert message in refused(capsys, f"simulate {words}")


@pytest.mark.parametrize(
    ("words", "message"),
    [("--recorded x.json", "recorded='x.json': has no effect with --pp"),
     ("--from-ms 1e9", "from_ms=1000000000.0: must be from 0 to below")],
)  # fmt: skip
def test_bad_input_of_the_timeline(words: str, message: str, tmp_path: Path, capsys: Capsys) -> None:
    assert message in refused(capsys, f"timeline --pp 2 --out {tmp_path} {words}")
