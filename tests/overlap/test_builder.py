"""ProgramBuilder names values, and refuses what would be ambiguous."""

from __future__ import annotations

import doctest
from typing import Any

import pytest

from overlap import builder
from overlap.builder import ProgramBuilder, Value
from overlap.errors import ProgramError
from overlap.ir import Lane
from tests.overlap.programs import Weight, nothing


def test_the_example_in_its_docstring_runs() -> None:
    assert doctest.testmod(builder).failed == 0


def test_values_are_named_after_their_layer() -> None:
    b = ProgramBuilder()
    x = b.input("x")
    (first,) = b.compute("embed", nothing, x, outputs=("h",))
    with b.layer(0):
        h, ids = b.compute("attn", nothing, first, outputs=("h",), nondiff=("ids",), pins=("ids",))
        (sent,) = b.comm("dispatch", nothing, h, ids, outputs=("sent",), adjoint=nothing)
    (loss,) = b.compute("head", nothing, sent, outputs=("loss",))
    b.loss(loss, 0.5)
    program = b.build(outputs=(h,))
    assert [value.name for value in (first, h, ids, sent, loss)] == ["h", "0.h", "0.ids", "0.sent", "loss"]
    assert [stage.label for stage in program.stages] == ["embed", "0.attn", "0.dispatch", "head"]
    assert [stage.lane for stage in program.stages] == [Lane.COMPUTE, Lane.COMPUTE, Lane.COMM, Lane.COMPUTE]
    assert program.by_key[0, "attn"].pins == ("0.ids",)
    assert (program.outputs, program.losses[0].weight) == (("0.h",), 0.5)


def test_communication_may_hand_out_and_pin_a_handle() -> None:
    b = ProgramBuilder()
    x = b.input("x", needs_grad=True)
    with b.layer(0):
        sent, handle = b.comm(
            "send", nothing, x, outputs=("sent",), nondiff=("handle",), pins=("handle",), adjoint=nothing
        )
    stage = b.build().by_key[0, "send"]
    assert (sent.name, handle.name) == ("0.sent", "0.handle")
    assert (stage.writes, stage.nondiff, stage.pins) == (("0.sent", "0.handle"), frozenset({"0.handle"}), ("0.handle",))
    with b.layer(1), pytest.raises(ProgramError, match="'other' is pinned or has an effect but is not written"):
        b.comm("send", nothing, sent, outputs=("sent",), pins=("other",), adjoint=nothing)


def test_a_shared_parameter_is_written_by_the_first_stage() -> None:
    b = ProgramBuilder()
    tied, bias = b.parameter("tied", Weight()), b.parameter("bias", Weight())
    (h,) = b.compute("embed", nothing, b.input("x"), tied, outputs=("h",))
    b.compute("head", nothing, h, tied, bias, outputs=("loss",))
    first = b.build().stages[0]
    assert (first.label, first.writes) == ("weights", ("weight.tied", "weight.bias"))
    assert first.forward() == first.parameters


def test_the_name_of_that_stage_is_taken_outside_layers() -> None:
    b = ProgramBuilder()
    x = b.input("x")
    with pytest.raises(ProgramError, match=r"stage weights .* choose another name"):
        b.compute("weights", nothing, x, outputs=("h",))
    with b.layer(0):
        b.compute("weights", nothing, x, outputs=("h",))


def test_mtp_depths_are_marked() -> None:
    b = ProgramBuilder()
    x = b.input("x")
    with b.layer(0):
        (h,) = b.compute("attn", nothing, x, outputs=("h",))
    with b.layer(1, mtp=True):
        b.compute("attn", nothing, h, outputs=("h",))
    assert b.build().mtp_layers == {1}


def test_values_of_another_builder_are_unknown() -> None:
    b = ProgramBuilder()
    b.compute("a", nothing, Value("elsewhere"), outputs=("y",))
    with pytest.raises(ProgramError, match="stage a reads 'elsewhere', which no earlier stage writes"):
        b.build()


def test_a_name_is_written_once() -> None:
    b = ProgramBuilder()
    x = b.input("x")
    with pytest.raises(ProgramError, match="stage a names a written value twice"):
        b.compute("a", nothing, x, outputs=("y", "y"))
    with b.layer(3), pytest.raises(ProgramError, match=r"stage 3.a names a written value twice: \('y', 'y'\)"):
        b.compute("a", nothing, x, outputs=("y",), nondiff=("y",))


@pytest.mark.parametrize("declared", [{"pins": ("z",)}, {"effects": (("z", print),)}])
def test_pins_and_effects_name_what_is_written(declared) -> None:
    b = ProgramBuilder()
    with pytest.raises(ProgramError, match="stage a: 'z' is pinned or has an effect but is not written"):
        b.compute("a", nothing, b.input("x"), outputs=("y",), **declared)


def test_layers_do_not_nest() -> None:
    b = ProgramBuilder()
    with b.layer(0), pytest.raises(ProgramError, match="layer 1 begins inside layer 0: layers do not nest"), b.layer(1):
        pass


def test_a_parameter_becomes_a_value_once() -> None:
    b, weight = ProgramBuilder(), Weight()
    b.parameter("tied", weight)
    for name, parameter in (("tied", Weight()), ("again", weight)):
        with pytest.raises(ProgramError, match=f"parameter '{name}' is made a value twice"):
            b.parameter(name, parameter)


@pytest.mark.parametrize("names", ["out", None, 1, (1,)])
@pytest.mark.parametrize("argument", ["outputs", "nondiff", "pins"])
def test_names_are_lists(argument: str, names: Any) -> None:
    """A text would be taken for its letters."""
    b = ProgramBuilder()
    x = b.input("x", needs_grad=True)
    for add, more in ((b.compute, {}), (b.comm, {"adjoint": nothing})):
        given: Any = {"outputs": ("y",), **more, argument: names}
        with (
            b.layer(0),
            pytest.raises(ProgramError, match=rf"stage attn: {argument}=.* must be a tuple or list of names"),
        ):
            add("attn", nothing, x, **given)


def test_only_handles_are_read() -> None:
    b = ProgramBuilder()
    name: Any = "x"
    for use in (
        lambda: b.compute("attn", nothing, name, outputs=("y",)),
        lambda: b.comm("send", nothing, name, outputs=("y",), adjoint=nothing),
        lambda: b.loss(name),
        lambda: b.build(outputs=(name,)),
    ):
        with pytest.raises(ProgramError, match=r"'x' must be a Value, as input\(\), compute\(\) and comm\(\) return"):
            use()


def test_functions_are_functions() -> None:
    b = ProgramBuilder()
    x, none = b.input("x"), as_any(None)
    with pytest.raises(ProgramError, match=r"stage send: adjoint=None must be a function \(R11\)"):
        b.comm("send", nothing, x, outputs=("y",), adjoint=none)
    with pytest.raises(ProgramError, match="two forms of a stage function: graph_only=1 must be Callable"):
        b.compute("attn", nothing, x, outputs=("y",), graph_only=as_any(1))


def as_any(value: Any) -> Any:
    return value
