"""`verify --replay hidden`: equal to the bit with two segments live, also with MTP and hyper-connections."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap.controls import CONTROLS
from tests.cli.run import TINY, command

WORDS = f"verify --json --steps 1 {TINY} --layers 6 --microbatches 3 --method uniform --num-layers 2 --replay hidden"


@pytest.mark.parametrize("order", ["single_queue", "multi_queue"])
@pytest.mark.parametrize("model", ["", "--mtp 1 --mhc 2", "--mtp 2 --dropout 0.1 --delay-wgrad", "--dense-layers 1"])
def test_equal_with_two_segments_live(model: str, order: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = command(capsys, f"{WORDS} --order {order} {model}")
    assert (result.status, result.json["equal"]) == (0, True)
    assert result.json["max_live_segments"] == 2
    assert result.json["config"]["replay"] == "hidden"


CARRIED = """
    B.mtp_post W.mtp_post B.post W.post
    B.combine  W.attn W.experts F.attn F.post_attn  # weight gradients of the pair before hide B.combine
    F.dispatch F.shared R.attn R.post_attn R.shared
    R.dispatch B.experts
    B.dispatch B.shared W.shared R.experts
    R.combine  F.experts
    F.combine  B.post_attn W.post_attn B.attn R.post R.mtp_post F.post F.mtp_post
"""


@pytest.mark.parametrize("model", ["--mtp 1 --mhc 2 --dropout 0.1", "--dense-layers 2"])
def test_equal_with_weight_gradients_carried_over(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "carried.txt"
    path.write_text(CARRIED)
    result = command(capsys, f"{WORDS} --order {path} --delay-wgrad {model}")
    assert (result.status, result.json["equal"]) == (0, True)
    assert result.json["max_live_segments"] == 2
    assert command(capsys, f"{WORDS} --order {path} --delay-wgrad {model} --control swap_slots").status == 1


@pytest.mark.parametrize("control", CONTROLS)
def test_what_a_control_breaks_is_found(control: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{WORDS} --order single_queue --dropout 0.1 --mtp 1 --mhc 2 --control {control}"
    assert command(capsys, words).status == 1
