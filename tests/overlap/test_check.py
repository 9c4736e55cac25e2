"""check_stages: a stage that does not do what it declares is refused before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlap.builder import ProgramBuilder
from overlap.check import check_stages, same_bits
from overlap.chunk import ModelChunk
from overlap.errors import ProgramError
from overlap.ir import Program
from overlap.step import train_step
from tests.overlap.programs import Own, tiny_chunk, tiny_feeds

FEEDS = {"x": torch.ones(2, 3)}


def chunk_of(forward: Callable[..., Any], *, outputs: tuple[str, ...] = ("y",), **declared: Any) -> ModelChunk:
    """A chunk of two stages: a linear one, then `forward(module, h)` as declared."""

    def build(module: Any, b: ProgramBuilder) -> None:
        (h,) = b.compute("embed", lambda x: x * module.first, b.input("x"), outputs=("h",), parameters=(module.first,))
        values = b.compute("mine", lambda h, **kw: forward(module, h, **kw), h, outputs=outputs, **declared)
        (loss,) = b.compute("head", lambda y: y.square().sum(), values[0], outputs=("loss",))
        b.loss(loss)

    members = {"first": nn.Parameter(torch.ones(3)), "second": nn.Parameter(torch.ones(3)), "seen": torch.zeros(1)}
    return ModelChunk(Own(build, **members))


def counting(module: Any, h: Tensor) -> Tensor:
    module.seen.add_(1)
    return h * 2


def hidden_counting(module: Any, h: Tensor) -> Tensor:
    module.seen.data.add_(1)
    return h * 2


def drawing(module: Any, h: Tensor) -> Tensor:
    return h + torch.rand(3)


@pytest.mark.parametrize(
    ("forward", "declared", "message"),
    [
        (lambda m, h: h * m.second, {}, r"stage mine reads parameter 'second': declare it in parameters="),
        (
            lambda m, h: h * m.first,
            {},
            r"stage mine reads parameter 'first': declare it .*or pass it as a value",
        ),
        (lambda m, h: m.second * 1, {}, r"stage mine reads parameter 'second'"),
        (lambda m, h: m.second, {}, r"stage mine reads parameter 'second'"),
        (counting, {}, r"stage mine changes buffer 'seen' in place: declare it in state="),
        (counting, {"state": ("seen",)}, r"stage mine: state=\('seen',\) must be the tensors that it changes"),
        (hidden_counting, {}, r"stage mine changes buffer 'seen' in place"),
        (drawing, {}, r"stage mine draws random numbers: declare draws_rng=True"),
        (lambda m, h: (h, h, h), {"outputs": ("y", "z")}, r"stage mine returns 3 values, but writes 2"),
        (lambda m, h: h, {"outputs": ("y", "z")}, r"stage mine returns one Tensor, but writes 2"),
        (lambda m, h: None, {"outputs": ("y", "z")}, r"stage mine returns one NoneType, but writes 2"),
        (lambda m, h: (h,), {}, r"stage mine writes 'y', of type tuple, with a gradient: put it in nondiff="),
        (lambda m, h: h.argsort(), {}, r"stage mine writes 'y', of type torch.int64, with a gradient"),
        (lambda m, h: (h, h.sum()), {"nondiff": ("z",)}, r"stage mine writes 'z' as a value without gradient: detach"),
        (
            lambda m, h: h * 2,
            {"adjoint": lambda grads, pinned: (grads[0], None)},
            r"stage mine: its adjoint returns 2 gradients for 1 reads",
        ),
        (
            lambda m, h: h * 2,
            {"adjoint": lambda grads, pinned: (grads[0][:1],)},
            r"stage mine: its adjoint gives 'h' a gradient of shape \(1, 3\), but the value has shape \(2, 3\)",
        ),
        (
            lambda m, h: h * 2,
            {"adjoint": lambda grads, pinned: (grads[0] * torch.rand(3),)},
            r"stage mine draws random numbers",
        ),
    ],
)
def test_what_a_stage_does_not_declare_is_named(
    forward: Callable[..., Any], declared: dict[str, Any], message: str
) -> None:
    chunk = chunk_of(forward, **declared)
    state = torch.get_rng_state()
    with pytest.raises(ProgramError, match=message):
        train_step(chunk, [FEEDS])
    # Nothing of the check stays, and nothing of a step has happened.
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(chunk.get_buffer("module.seen"), torch.zeros(1))
    assert chunk.steps_done == 0
    assert all(parameter.grad is None for parameter in chunk.parameters())


def test_a_loss_is_a_scalar() -> None:
    def build(module: Any, b: ProgramBuilder) -> None:
        (h,) = b.compute("embed", lambda x: x * module.w, b.input("x"), outputs=("h",), parameters=(module.w,))
        b.loss(h)

    with pytest.raises(ProgramError, match=r"loss 'h' has shape \(2, 3\): a loss is a scalar"):
        train_step(ModelChunk(Own(build, w=nn.Parameter(torch.ones(3)))), [FEEDS])


def test_declared_is_accepted() -> None:
    def everything(module: Any, h: Tensor, *, pinned: tuple[Any, ...] | None) -> tuple[Tensor, Any]:
        module.seen.add_(1)
        return h * module.second + torch.rand(3), ("any", "object")

    chunk = chunk_of(everything, nondiff=("choice",), pins=("choice",), draws_rng=True)
    stage = chunk.program.by_key[None, "mine"]
    object.__setattr__(stage, "state", (chunk.get_buffer("module.seen"),))
    object.__setattr__(stage, "parameters", (chunk.get_parameter("module.second"),))
    state = torch.get_rng_state()
    check_stages(chunk, FEEDS)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(chunk.get_buffer("module.seen"), torch.zeros(1))


def test_stages_are_checked_in_their_own_context() -> None:
    """R15: a forward may rely on the context that it declares."""
    entered: list[bool] = []

    @contextmanager
    def context() -> Iterator[None]:
        entered.append(True)
        yield
        entered.pop()

    def needs_it(_: Any, h: Tensor) -> Tensor:
        if not entered:
            raise RuntimeError("outside the context")
        return h * 2

    train_step(chunk_of(needs_it, context=context), [FEEDS])


def test_a_parameter_of_a_submodule_is_named_from_the_root() -> None:
    chunk = chunk_of(lambda m, h: m.inner(h))
    chunk.module.add_module("inner", nn.Linear(3, 3))
    with pytest.raises(ProgramError, match=r"stage mine reads parameter 'inner\.(weight|bias)'"):
        check_stages(chunk, FEEDS)


def test_a_parameter_of_two_modules_is_known_by_its_first_name() -> None:
    chunk = chunk_of(lambda m, h: h * 2)
    inner = nn.Module()
    inner.register_parameter("weight", chunk.get_parameter("module.first"))
    chunk.module.add_module("inner", inner)
    check_stages(chunk, FEEDS)


def test_a_program_is_checked_once() -> None:
    chunk = tiny_chunk("M")
    assert not chunk.checked
    train_step(chunk, tiny_feeds(1))
    assert chunk.checked
    train_step(chunk, tiny_feeds(1))


def test_a_parameter_that_was_frozen_then_is_checked_when_it_trains() -> None:
    """A frozen parameter that a stage reads leaves no trace in the check."""
    chunk = chunk_of(lambda m, h: h * m.second)
    second = chunk.get_parameter("module.second").requires_grad_(False)
    train_step(chunk, [FEEDS])
    assert chunk.checked
    second.requires_grad_()
    with pytest.raises(ProgramError, match="stage mine reads parameter 'second'"):
        train_step(chunk, [FEEDS])


def test_freezing_in_turn_does_not_check_again_and_again() -> None:
    chunk = tiny_chunk("M")
    embedding, gate = chunk.get_parameter("module.embedding"), chunk.get_parameter("module.layers.0.gate")
    for seen in (False, False, True, True):
        for parameter in (embedding, gate):
            parameter.requires_grad_(parameter is not embedding)
        assert chunk.checked is seen
        train_step(chunk, tiny_feeds(1))
        embedding, gate = gate, embedding


def test_tiny_programs_pass() -> None:
    for shape in ({"tied": True, "shared": True, "dropout": 0.1}, {"stateful": True, "plain_post": True}):
        check_stages(tiny_chunk("MDM", shape=shape), tiny_feeds(1)[0])


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (torch.tensor([0.0]), torch.tensor([0.0]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), False),
        (torch.tensor([1.0]), torch.tensor([[1.0]]), False),
        (torch.tensor([[1, 2], [3, 4]]).T, torch.tensor([[1, 3], [2, 4]]), True),
        (torch.tensor(2.0), torch.tensor(2.0), True),
        (torch.tensor([True]), torch.tensor([False]), False),
    ],
)
def test_same_bits(left: Tensor, right: Tensor, same: bool) -> None:
    assert same_bits(left, right) is same


class PassesOn(nn.Module):
    """A compute stage behind a communication stage."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.copies = copies

    def post(self, h: Tensor) -> Tensor:
        return h + 0.0 if self.copies else h.view_as(h)

    def program(self) -> Program:
        b = ProgramBuilder()
        hidden = b.input("h", needs_grad=True)
        with b.layer(0):
            (sent,) = b.comm("send", torch.clone, hidden, outputs=("sent",), adjoint=lambda grads, pinned: grads)
            (out,) = b.compute("post", self.post, sent, outputs=("out",))
        (loss,) = b.compute("loss", torch.sum, out, outputs=("loss",))
        b.loss(loss)
        return b.build()


def test_another_lanes_memory_is_not_handed_on() -> None:
    """Row 44's kind: freed by name, the storage would go back to one lane while the other still reads it."""
    feeds = {"h": torch.ones(2, requires_grad=True)}
    train_step(ModelChunk(PassesOn(True), order="plain"), [feeds])
    with pytest.raises(ProgramError, match=r"0\.post hands on the storage of '0\.sent' as '0\.out'.*R14"):
        train_step(ModelChunk(PassesOn(False), order="plain"), [feeds])


Build = Callable[[Any, ProgramBuilder], None]


def wired(forward: Any, adjoint: Any, *, aliases: bool) -> Build:
    """A program with one transfer."""

    def build(module: Any, b: ProgramBuilder) -> None:
        (h,) = b.compute("embed", lambda x: x * module.first, b.input("x"), outputs=("h",), parameters=(module.first,))
        (y,) = b.comm("wire", forward, h, outputs=("y",), adjoint=adjoint, aliases=aliases)
        (loss,) = b.compute("head", lambda y: y.square().sum(), y, outputs=("loss",))
        b.loss(loss)

    return build


def expect(build: Build, message: str | None) -> None:
    """The check of a program's stages raises this; None: nothing."""
    chunk = ModelChunk(Own(build, first=nn.Parameter(torch.ones(3))))
    with nullcontext() if message is None else pytest.raises(ProgramError, match=message):
        check_stages(chunk, FEEDS)


@pytest.mark.parametrize(("forward", "refused"), [(lambda h: h, True), (lambda h: h[:], True), (torch.clone, False)])
def test_a_transport_allocates_what_it_hands_on(forward: Any, refused: bool) -> None:
    """B19's kind: a reader on a third lane would be waited for by the wrong one, and the memory given out too early."""
    build = wired(forward, lambda grads, pinned: grads, aliases=False)
    expect(build, "stage wire hands on the storage of 'h' as 'y'.*R14" if refused else None)


@pytest.mark.parametrize(
    ("wire", "count", "message"),
    [
        (torch.clone, torch.clone, None),
        (lambda n: n, torch.clone, "stage wire hands on the storage of 'n' as 'm'"),
        (torch.clone, lambda m: m, "stage count hands on the storage of 'm' as 'c'"),
    ],
)
def test_a_value_without_gradient_is_never_passed_on(wire: Any, count: Any, message: str | None) -> None:
    """Plans give it to the lane that wrote it, also where the values with gradient beside it are passed on."""

    def build(module: Any, b: ProgramBuilder) -> None:
        h, n = b.compute(
            "embed", lambda x: (x * module.first, torch.ones(3)), b.input("x"), outputs=("h",), nondiff=("n",),
            parameters=(module.first,),
        )  # fmt: skip
        y, m = b.comm(
            "wire", lambda h, n: (h, wire(n)), h, n, outputs=("y",), nondiff=("m",),
            adjoint=lambda grads, pinned: (grads[0], None), aliases=True,
        )  # fmt: skip
        (c,) = b.compute("count", count, m, outputs=(), nondiff=("c",))
        (loss,) = b.compute("head", lambda y, c: (y * c).sum(), y, c, outputs=("loss",))
        b.loss(loss)

    expect(build, message and f"{message}.*R14")


@pytest.mark.parametrize(
    ("forward", "adjoint", "message"),
    [
        (lambda h: h, lambda grads, pinned: grads, None),
        (lambda h: h * 1, lambda grads, pinned: grads, "writes new memory"),
        (lambda h: h, lambda grads, pinned: (grads[0] * 1,), "gives gradients in new memory"),
    ],
)
def test_what_passes_on_memory_makes_none(forward: Any, adjoint: Any, message: str | None) -> None:
    build = wired(forward, adjoint, aliases=True)
    expect(build, message and rf"stage wire declares that it passes on memory, but {message} \(R14\)")
