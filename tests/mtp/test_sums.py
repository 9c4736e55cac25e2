"""R3: gradients of values with many readers, shared parameters among them, are summed in one fixed order."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlap import ModelChunk, Op
from overlap.engine import Engine, MicrobatchState
from overlap.ir import WEIGHTS
from overlap.lower import Issue
from overlap.pieces import Piece
from overlap.step import train_step
from recompute import RecomputeConfig
from tests.mtp.tools import NONE, U, chunk_feeds, different, gradients_of, make, reference_gradients, verdict_of

DEEP = [
    {"layers": 1, "mtp": 16, "mtp_dense": True, "mtp_repeat": True, "tied": True},
    {"layers": 16, "mtp": 3, "mhc": 2, "dense_layers": 14},
]


def readers_of_values(chunk: ModelChunk) -> dict[str, int]:
    """Readers of each value with a gradient."""
    program = chunk.program
    return {value: len(readers) for value, readers in program.readers.items() if not program.nondiff(value)}


class Reversed(Engine):
    """Adds the readers' pieces from first to last."""

    def _gradient(
        self, seed: float | None, pieces: Sequence[Piece], value: str, owner: MicrobatchState
    ) -> Tensor | None:
        return super()._gradient(seed, pieces[::-1], value, owner)


@pytest.mark.parametrize(
    ("settings", "delay"), [(DEEP[0], False), (DEEP[0], True), (DEEP[1], True)],
    ids=["16 depths", "16 depths, delayed", "16 layers, delayed"],
)  # fmt: skip
def test_sixteen_deep_in_bfloat16(settings: dict[str, Any], delay: bool) -> None:
    chunk = make(U(2), delay=delay, dtype="bfloat16", **settings)
    assert max(readers_of_values(chunk).values()) >= 4
    assert verdict_of(chunk, 2, length=20).equal


@pytest.mark.parametrize("settings", DEEP, ids=["16 depths", "16 layers"])
def test_another_order_differs(settings: dict[str, Any]) -> None:
    """Negative control: the same pieces added the other way round."""
    chunk = make(U(2), dtype="bfloat16", **settings)
    verdict = verdict_of(chunk, 2, engine_type=Reversed, length=20)
    assert verdict.loss_equal
    assert "embedding" in verdict.gradients.different


SHARED: list[dict[str, Any]] = [
    {"tied": True},
    {"mtp": 2, "mtp_repeat": True},
    {"mtp": 2, "mtp_repeat": True, "tied": True, "mhc": 2},
    {"mtp": 3},
]


class StraightToGrad(Engine):
    """Adds each use of a shared parameter to `.grad` when it comes, past the table."""

    def __init__(self, *args: Any, shared: dict[str, nn.Parameter], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._shared = shared

    def _backward(self, issue: Issue, owner: MicrobatchState) -> None:
        super()._backward(issue, owner)
        self._move(issue, owner)

    def _wgrad(self, issue: Issue, owner: MicrobatchState) -> None:
        super()._wgrad(issue, owner)
        self._move(issue, owner)

    def _move(self, issue: Issue, owner: MicrobatchState) -> None:
        for piece in issue.gives:
            if piece is not None and piece[0] in self._shared and piece in owner.grads:
                torch.autograd.backward((self._shared[piece[0]],), (owner.grads.pop(piece),))


def straight(chunk: ModelChunk) -> Any:
    """Gradients of a copy of the chunk that adds straight to `.grad`."""
    chunk = copy.deepcopy(chunk)
    stage = chunk.program.by_key[None, WEIGHTS]
    shared: dict[str, Any] = dict(zip(stage.writes, stage.parameters, strict=True))

    def run(count: int) -> dict[str, Any]:
        train_step(chunk, chunk_feeds(chunk, count), engine_type=lambda *a, **s: StraightToGrad(*a, shared=shared, **s))
        return {name: parameter.grad for name, parameter in chunk.module.named_parameters()}

    return run


def two_by_two(ones: tuple[Any, Any], others: tuple[Any, Any]) -> list[tuple[Any, Any, Any]]:
    """Each setting with two of the four pairs; a tied weight and a repeated depth, in two settings each, with all."""
    straight, crossed = ([*zip(ones, order, strict=True)] for order in (others, others[::-1]))
    pairs = (straight, straight, crossed, crossed)
    return [(settings, *pair) for settings, each in zip(SHARED, pairs, strict=True) for pair in each]


@pytest.mark.parametrize(("settings", "delay", "dtype"), two_by_two((False, True), ("float32", "bfloat16")), ids=str)
def test_uses_added_straight_to_grad_differ(settings: dict[str, Any], dtype: str, delay: bool) -> None:
    """Tied embedding and repeated layer at 3 microbatches: equal through the table, different past it."""
    chunk = make(U(1), delay=delay, dtype=dtype, **settings)
    expected = reference_gradients(chunk, chunk_feeds(chunk, 3))
    assert different(expected, gradients_of(chunk, chunk_feeds(chunk, 3))) == ()
    changed = different(expected, straight(chunk)(3))
    assert "embedding" in changed
    assert all(name == "embedding" or name.startswith(("mtp.", "head.norm")) for name in changed)
    if settings.get("mtp_repeat"):
        assert any(name.startswith("mtp.") for name in changed)


@pytest.mark.parametrize(
    ("settings", "delay", "rule"),
    [*two_by_two((False, True), (NONE, U(1))), ({**SHARED[2], "attention": "gqa"}, True, U(1))],
    ids=str,
)
def test_every_parameter_is_touched_once_per_microbatch(
    settings: dict[str, Any], delay: bool, rule: RecomputeConfig
) -> None:
    """Rows 22 and B20: each parameter's hook fires once per microbatch, its gradient is then whole, none is missing.

    A depth's values reach it as arguments of its stages; W slots drain projections of depths too.
    """
    chunk = make(rule, delay=delay, aux_coefficient=0.1, **settings)
    fired: Counter[str] = Counter()
    sums: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def fire(parameter: Tensor) -> None:
            fired[name] += 1
            assert parameter.grad is not None
            sums[name] = parameter.grad.clone()

        return fire

    for name, parameter in chunk.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(hook(name))
    feeds = chunk_feeds(chunk, 3)
    train_step(chunk, feeds)
    assert fired == Counter({name: 3 for name, _ in chunk.module.named_parameters()})
    expected = reference_gradients(make(rule, delay=delay, aux_coefficient=0.1, **settings), feeds)
    assert different(expected, dict(sums)) == ()


@pytest.mark.parametrize("attention", ["mla", "gqa"])
@pytest.mark.parametrize("mhc", [None, 2])
@pytest.mark.parametrize("repeat", [False, True])
def test_depths_have_weight_gradient_slots(mhc: int | None, repeat: bool, attention: str) -> None:
    """B20: the projections of a depth and its layer's weights are drained; the embedding waits for all its readers."""
    chunk = make(U(1), delay=True, mtp=2, mhc=mhc, mtp_repeat=repeat, attention=attention)
    ran: list[Any] = []

    class Noting:
        def before(self, issue: Issue, owner: MicrobatchState) -> None:
            ran.append((issue.slot.op, issue.stage.key))

        def after(self, issue: Issue, owner: MicrobatchState) -> None:
            assert issue.slot.op is not Op.WGRAD or issue.stage.key not in owner.pending

    train_step(chunk, chunk_feeds(chunk, 1), observers=(Noting(),))
    for layer in (2, 3):
        for stage in ("attn", "shared", "experts"):
            assert ran.count((Op.WGRAD, (layer, stage))) == 1
    last = max(place for place, (op, _) in enumerate(ran) if op is Op.WGRAD)
    assert ran.index((Op.BACKWARD, (None, WEIGHTS))) > last
    assert all(p.grad is not None for p in chunk.parameters())


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("settings", [{"tied": True}, {"tied": True, "mtp": 2}], ids=str)
def test_tied_weight_under_poison(settings: dict[str, Any], delay: bool) -> None:
    """Row 29: one use of the tied weight is put off, the others are not; nothing uninitialised is added."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        chunk = make(U(1), delay=delay, **settings)
        assert verdict_of(chunk).equal
        gradient = gradients_of(chunk, chunk_feeds(chunk, 3))["embedding"]
    finally:
        torch.use_deterministic_algorithms(before)
    assert gradient.isfinite().all()


@pytest.mark.parametrize(("frozen", "delay"), [("embedding", False), ("mtp.", True), ("layers.", True)])
@pytest.mark.parametrize("settings", SHARED[:3], ids=str)
def test_frozen_shared_parameters(settings: dict[str, Any], frozen: str, delay: bool) -> None:
    """A frozen parameter among the shared ones gets no gradient and changes no other's."""
    chunk = make(U(1), delay=delay, **settings)
    for name, parameter in chunk.module.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    chunk = copy.deepcopy(chunk)
    assert verdict_of(chunk).equal
    gradients = gradients_of(chunk, chunk_feeds(chunk, 1))
    assert all((gradients[name] is None) == name.startswith(frozen) for name in gradients)
