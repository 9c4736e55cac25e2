"""`plan`: segments, what each keeps, slots; without running anything."""

from __future__ import annotations

import pytest

from overlap import parse_schedule
from tests.cli.run import TINY, command

Capsys = pytest.CaptureFixture[str]


def test_contract(capsys: Capsys) -> None:
    result = command(capsys, f"plan --layers 3 --method uniform --num-layers 2 --microbatches 4 --json {TINY}")
    assert (result.status, result.err) == (0, "")
    payload = result.json
    assert {name: type(value) for name, value in payload.items()} == {
        "segments": list, "rebuilt": dict, "slots": dict, "replayed_a2a": int, "replayed_a2a_per_layer": float,
        "order": str, "pair": list, "config": dict,
    }  # fmt: skip
    assert [segment["layers"] for segment in payload["segments"]] == [[0, 1], [2]]
    assert [segment["inputs"] for segment in payload["segments"]] == [["embedded"], ["1.hidden"]]
    assert [segment["pinned"] for segment in payload["segments"]] == [
        ["0.routing", "0.arrival", "1.routing", "1.arrival"], ["2.routing", "2.arrival"],
    ]  # fmt: skip
    assert payload["replayed_a2a"] == 4 * (2 + 1 + 1)


def test_replay_leaves_out_what_backward_does_not_need(capsys: Capsys) -> None:
    """With one layer per segment neither combine nor post is replayed."""
    payload = command(capsys, f"plan --layers 2 --method uniform --num-layers 1 --json {TINY}").json
    for layer, segment in enumerate(payload["segments"]):
        assert segment["replayed"] == [f"{layer}.{name}" for name in ("attn", "shared", "dispatch", "experts")]
    assert payload["replayed_a2a_per_layer"] == 1.0
    payload = command(capsys, f"plan --layers 2 --method uniform --num-layers 2 --json {TINY}").json
    assert {"0.combine", "0.post"} <= set(payload["segments"][0]["replayed"])
    assert not {"1.combine", "1.post"} & set(payload["segments"][0]["replayed"])


def test_pair_is_a_schedule(capsys: Capsys) -> None:
    """The printed pair parses, and its slots are those that a step of one more microbatch adds."""
    words = f"plan --layers 2 --method block --num-layers 1 --json {TINY}"
    payload = command(capsys, words).json
    schedule = parse_schedule(" ".join(payload["pair"]))
    assert [str(slot) for slot in schedule] == payload["pair"]
    more = command(capsys, f"{words} --microbatches 3").json["slots"]
    for op, count in payload["slots"].items():
        assert more[op] - count == sum(slot.op.value == op for slot in schedule)


def test_delayed_weight_gradients(capsys: Capsys) -> None:
    words = f"plan --layers 2 --json {TINY}"
    assert command(capsys, words).json["slots"]["W"] == 0
    # attn, shared and experts of two layers, and the head, for two microbatches
    assert command(capsys, f"{words} --delay-wgrad").json["slots"]["W"] == 2 * (2 * 3 + 1)


def test_without_a_rule(capsys: Capsys) -> None:
    payload = command(capsys, f"plan --layers 2 --json {TINY}").json
    assert payload["segments"] == []
    assert (payload["slots"]["N"], payload["slots"]["R"], payload["replayed_a2a"]) == (0, 0, 0)


def test_for_people(capsys: Capsys) -> None:
    result = command(capsys, f"plan --layers 2 --method uniform --num-layers 1 {TINY}")
    assert result.status == 0
    for text in ("Segments", "embedded", "0.routing", "replayed all-to-alls: 4", "Issue order of one pair"):
        assert text in result.out
    assert "No segment" in command(capsys, f"plan --layers 2 {TINY}").out


def test_zero_layers_and_own_model(capsys: Capsys) -> None:
    assert command(capsys, f"plan --layers 0 --method uniform --num-layers 1 --json {TINY}").json["segments"] == []
    words = "plan --program examples.own_layer:build --method block --num-layers 2 --json"
    assert [s["layers"] for s in command(capsys, words).json["segments"]] == [[0], [1]]


def test_the_first_plan_of_a_lead(capsys: Capsys) -> None:
    words = f"plan --layers 2 --shared-width 0 --lead 1 {TINY.replace('--shared-width 8', '')}"
    slots = command(capsys, f"{words} --json").json["first_plan"]
    assert slots[slots.index("F0.1.dispatch") + 1 :][:4] == ["F1.embed", "F1.0.attn", "F1.0.dispatch", "F0.1.experts"]
    assert "first_plan" not in command(capsys, f"plan --layers 2 --json {TINY}").json
    assert "Issue order of the first plan" in command(capsys, words).out
