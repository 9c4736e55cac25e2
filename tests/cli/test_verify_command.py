"""`verify`: the contract of its JSON and of its exit status."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.cli.run import TINY, command, refused

KEYS = {
    "equal": bool, "loss_equal": bool, "gradients": dict, "buffers": dict, "rng_equal": bool, "segments": list,
    "slots": dict, "replayed_a2a": int, "replayed_a2a_per_layer": float, "max_live_segments": int, "config": dict,
}  # fmt: skip
Capsys = pytest.CaptureFixture[str]


def test_contract(capsys: Capsys) -> None:
    result = command(
        capsys,
        f"verify --layers 5 --method uniform --num-layers 2 --microbatches 4 --dropout 0.1 --json {TINY}",
    )
    assert (result.status, result.err) == (0, "")
    payload = result.json
    assert {name: type(value) for name, value in payload.items()} == KEYS
    for part in ("gradients", "buffers"):
        assert set(payload[part]) == {"compared", "different"}
        assert type(payload[part]["compared"]) is int
        assert payload[part]["compared"] > 0
        assert payload[part]["different"] == []
    assert payload["equal"] is payload["loss_equal"] is payload["rng_equal"] is True
    assert payload["segments"] == [[0, 1], [2, 3], [4]]
    assert payload["max_live_segments"] == 1
    assert payload["replayed_a2a"] == 4 * 7
    assert payload["replayed_a2a_per_layer"] == 28 / 20
    assert payload["slots"] == {"F": 8, "N": 120, "R": 96, "B": 128, "W": 0}
    config = payload["config"]
    assert (config["layers"], config["method"], config["num_layers"], config["steps"]) == (5, "uniform", 2, 2)
    assert config["control"] is None


@pytest.mark.parametrize(
    ("words", "segments"),
    [
        ("--method block --num-layers 3", [[0], [1], [2]]),
        ("--method uniform --num-layers 8", [[0, 1, 2, 3, 4]]),
        ("--method uniform --num-layers 1", [[0], [1], [2], [3], [4]]),
        ("--method none", []),
        ("--method uniform --num-layers 2 --dense-layers 1", [[0, 1], [2, 3], [4]]),
        ("--method uniform --num-layers 2 --delay-wgrad --tied", [[0, 1], [2, 3], [4]]),
        ("--method uniform --num-layers 2 --dtype bfloat16 --per-token-loss", [[0, 1], [2, 3], [4]]),
        ("--method uniform --num-layers 2 --dtype float64 --batch 3", [[0, 1], [2, 3], [4]]),
        ("--method uniform --num-layers 2 --order plain --batch 1", [[0, 1], [2, 3], [4]]),
        ("--method uniform --num-layers 2 --order single_queue --lead 3", [[0, 1], [2, 3], [4]]),
    ],
)
def test_equal(words: str, segments: list[list[int]], capsys: Capsys) -> None:
    result = command(capsys, f"verify --layers 5 --microbatches 3 --dropout 0.1 --steps 1 --json {words} {TINY}")
    assert result.status == 0
    payload = result.json
    assert payload["equal"] is True
    assert payload["segments"] == segments
    assert (payload["slots"]["W"] > 0) == ("--delay-wgrad" in words)
    if payload["config"]["num_layers"] == 1:
        assert payload["replayed_a2a_per_layer"] == 1.0


@pytest.mark.parametrize(
    ("control", "part"),
    [
        ("no_rng", "gradients"),
        ("unpinned_routing", "gradients"),
        ("double_effects", "buffers"),
        ("swap_slots", "gradients"),
    ],
)
def test_controls(control: str, part: str, capsys: Capsys) -> None:
    words = f"verify --layers 3 --method uniform --num-layers 1 --microbatches 3 --dropout 0.1 --control {control}"
    result = command(capsys, f"{words} --json {TINY}")
    assert result.status == 1
    payload = result.json
    assert payload["equal"] is False
    different = payload[part]["different"]
    assert different
    assert different == sorted(different)
    assert payload["config"]["control"] == control
    assert set(payload) == {*KEYS, "broken"}
    assert result.err == f"control {control}: {payload['broken']}\n"


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("--method uniform --num-layers 1 --control no_rng", "control='no_rng': no replay draws random numbers"),
        ("--dropout 0.1 --control no_rng", "control='no_rng': no replay draws random numbers"),
        ("--control unpinned_routing", "control='unpinned_routing': no routing is pinned"),
        ("--control double_effects", "control='double_effects': no stage with effects is replayed"),
        ("--microbatches 2 --control swap_slots", "control='swap_slots': gradients of fewer than 3 microbatches"),
        ("--control luck", "control='luck': must be one of no_rng"),
        ("--steps 0", "steps=0: must be at least 1"),
        ("--layers 2 --mtp 1 --lead 4", "lead=4: must be an integer from 0 to the layers of the program (3)"),
        ("--lead 1 --microbatches 1", "lead=1: has no effect on a step of one microbatch: leave it out"),
    ],
)
def test_nothing_to_do(words: str, rule: str, capsys: Capsys) -> None:
    assert rule in refused(capsys, f"verify --json {words} {TINY}")


def test_for_people(capsys: Capsys) -> None:
    words = f"verify --layers 2 --steps 1 --method uniform --num-layers 1 --microbatches 3 {TINY}"
    result = command(capsys, words)
    assert result.status == 0
    assert "generator state" in result.out
    assert "different" in result.out
    result = command(capsys, f"{words} --control double_effects")
    assert result.status == 1
    assert "differs: layers.0.router.tokens_per_expert" in result.out


def test_own_model(capsys: Capsys) -> None:
    """The example of README, and its control."""
    words = "verify --program examples.own_layer:build --method uniform --num-layers 2 --json"
    result = command(capsys, words)
    assert result.status == 0
    assert result.json["segments"] == [[0, 1], [2, 3], [4]]
    assert result.json["gradients"]["compared"] == 10
    assert result.json["config"]["order"] == "plain"
    result = command(capsys, f"{words} --control no_rng")
    assert result.status == 1
    assert result.json["gradients"]["different"]


OWN = """
import torch
from torch import nn
from overlap import ProgramBuilder

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("calls", torch.zeros(()))

    def program(self):
        b = ProgramBuilder()
        x = b.input("x")
        with b.layer(0):
            (y,) = b.compute("mix", self.{forward}, x, outputs=("y",), parameters=({parameters}){more})
        (loss,) = b.compute("loss", torch.sum, y, outputs=("loss",))
        b.loss(loss)
        return b.build()

    def plain(self, x):
        return x * self.weight

    def counts(self, x):
        self.calls += 1
        return x * self.weight

    def draws(self, x):
        return x * self.weight * torch.rand(())

    def adjoint(self, grads, pinned):
        return (grads[0][:1],)

def build(seed, microbatches):
    return Model(), [{{"x": torch.randn(3, 4)}} for _ in range(microbatches)]
"""


@pytest.mark.parametrize(
    ("forward", "parameters", "more", "message"),
    [
        ("counts", "self.weight,", "", "stage 0.mix changes buffer 'calls' in place: declare it in state="),
        ("draws", "self.weight,", "", "stage 0.mix draws random numbers: declare draws_rng=True"),
        ("plain", "", "", "stage 0.mix reads parameter 'weight': declare it in parameters="),
        ("plain", "", ", adjoint=self.adjoint", "reads parameter 'weight'"),
        ("plain", "self.weight,", ", adjoint=self.adjoint", "has an adjoint and parameters"),
    ],
)
def test_own_model_that_does_not_say_what_it_does(
    forward: str, parameters: str, more: str, message: str, capsys: Capsys, tmp_path: Path, monkeypatch
) -> None:
    name = f"own_{forward}_{len(parameters)}_{len(more)}"
    (tmp_path / f"{name}.py").write_text(OWN.format(forward=forward, parameters=parameters, more=more))
    monkeypatch.syspath_prepend(tmp_path)
    assert message in refused(capsys, f"verify --json --program {name}:build")


def test_own_model_that_is_honest(capsys: Capsys, tmp_path: Path, monkeypatch) -> None:
    """Negative control of the test above; also found from the current folder, as `python -m` does."""
    (tmp_path / "honest.py").write_text(OWN.format(forward="plain", parameters="self.weight,", more=""))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != ""])
    result = command(capsys, "verify --json --program honest:build --method uniform --num-layers 1")
    assert result.status == 0
    assert result.json["gradients"] == {"compared": 1, "different": []}


def test_leaves_the_generator_alone(capsys: Capsys) -> None:
    before = torch.get_rng_state()
    command(capsys, f"verify --layers 2 --dropout 0.1 --method uniform --num-layers 1 --json {TINY}")
    assert torch.equal(torch.get_rng_state(), before)
