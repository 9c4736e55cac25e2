"""Fields of a program that hold something else than they declare are refused, by stage and field."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from overlap.errors import ProgramError
from overlap.ir import Effect, Input, Lane, Loss, Program, Stage, StepState
from tests.overlap.programs import Weight, nothing

STAGE: dict[str, Any] = {
    "layer": 0, "name": "attn", "lane": Lane.COMPUTE, "reads": ("x",), "writes": ("y",), "forward": nothing
}  # fmt: skip
BAD: dict[str, list[Any]] = {
    "layer": ["0", 0.0, True, [0]],
    "name": [None, 1],
    "lane": [None, "compute", Lane],
    "reads": [None, "x", ["x"], (1,)],
    "writes": [None, "y", ["y"], (1,)],
    "forward": [None, 1, "f"],
    "nondiff": [None, "y", {"y"}, frozenset({1})],
    "adjoint": [1, "f"],
    "wgrad": [None, "no", 1],
    "pins": [None, "y", ["y"]],
    "effects": [None, "y", (1,), (("y", nothing),), (Effect("y", None),), (Effect(1, nothing),)],
    "state": [None, []],
    "draws_rng": [None, "no", 0],
    "parameters": [None, (1,), [Weight()]],
    "context": [1],
    "inner": [None, frozenset({"attn"}), ("attn",)],
    "sheds": [None, [0], ("x",), (1,), (-1,)],
    "aliases": [None, 1],
}


def build(**changes: Any) -> Program:
    return Program(stages=(Stage(**{**STAGE, **changes}),), inputs=(Input("x"),))


def test_every_field_of_a_stage_is_tried() -> None:
    build()
    assert [field.name for field in fields(Stage)] == list(BAD)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_stage(name: str, value: Any) -> None:
    with pytest.raises(ProgramError, match=r"^stage .*=.* must be |^effect: .* must be "):
        build(**{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": None}, r"program: stages=None must be tuple\[Stage, ...\]"),
        ({"stages": [1]}, "program: stages"),
        ({"inputs": (1,)}, "program: inputs"),
        ({"inputs": (Input("x", "no"),)}, "input: needs_grad='no' must be bool"),
        ({"losses": "y"}, "program: losses"),
        ({"losses": (Loss("y", float("nan")),)}, "loss: weight=nan must be float"),
        ({"losses": (Loss("y", None),)}, "loss: weight=None must be float"),
        ({"outputs": "y"}, "program: outputs='y' must be tuple"),
        ({"mtp_layers": {0}}, "program: mtp_layers"),
        ({"first_layer": 0.0}, "program: first_layer=0.0 must be int"),
        ({"feed_checks": (1,)}, "program: feed_checks"),
        ({"step_states": (1,)}, "program: step_states"),
        ({"step_states": (StepState(buffers=(), advance=1),)}, "stepstate: advance=1 must be Callable"),
    ],
)
def test_program(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        Program(**{"stages": (Stage(**STAGE),), "inputs": (Input("x"),), **changes})
