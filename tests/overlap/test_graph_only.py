"""A replay whose outputs nobody reads leaves its last product out: where, how many, and with the same bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

from overlap.builder import ProgramBuilder
from overlap.chunk import ModelChunk
from overlap.contiguous import contiguous_step
from overlap.engine import Engine, Feeds, MicrobatchState
from overlap.lower import Issue, lower
from overlap.model import Decoder, ModelConfig
from overlap.orders import get_order
from overlap.plan import BACKWARD_SIDE, make_schedule
from overlap.step import step_plans, train_step
from overlap.verify import compare_steps, verify
from recompute import RecomputeConfig
from tests.overlap.programs import nothing, side_of
from tests.overlap.test_operation_counts import Counting

uniform, selective = RecomputeConfig.uniform, RecomputeConfig.selective
MICROBATCHES = 3


def chunk(config: Any = uniform(1), *, delay: bool = False, **shape: object) -> ModelChunk:  # noqa: B008 (frozen)
    model = ModelConfig(vocab=17, **{"layers": 2, "dense_layers": 1, "hidden": 16, **shape})
    return ModelChunk(Decoder(model), recompute=config, delay_wgrad=delay)


def feeds(microbatches: int = MICROBATCHES) -> list[Feeds]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(17, (2, 7), generator=generator) for _ in range(microbatches)]
    return [{"ids": row[:, :-1].contiguous(), "labels": row[:, 1:].contiguous()} for row in rows]


def issues_of(model: ModelChunk, microbatches: int = 1) -> list[Issue]:
    return [issue for plan, _ in step_plans(model, microbatches) for issue in plan.issues]


def left_out(model: ModelChunk) -> list[str]:
    return [str(issue.slot) for issue in issues_of(model) if issue.graph_only]


@pytest.mark.parametrize(
    ("config", "shape", "slots"),
    [
        (uniform(1), {}, ["R0.1.shared", "R0.1.experts", "R0.0.experts"]),
        (uniform(1), {"shared_width": 0}, ["R0.1.experts", "R0.0.experts"]),
        # within a segment the next layer's replay reads them, through combine and post
        (uniform(2), {"layers": 4}, ["R0.3.shared", "R0.3.experts", "R0.1.shared", "R0.1.experts"]),
        # the backward of a layer's end reads them: hyper-connections' merge, an MTP depth's norm
        (uniform(1), {"mhc": 2}, []),
        (uniform(1), {"mtp": 1, "layers": 1}, ["R0.0.experts"]),
        (selective("experts"), {}, ["R0.1.experts", "R0.0.experts"]),
        (selective("shared_experts", "attn"), {}, ["R0.1.shared"]),
        (selective("core_attn", "moe_act"), {}, []),
        (RecomputeConfig.none(), {}, []),
    ],
    ids=str,
)
def test_where_nobody_reads(config: RecomputeConfig, shape: dict[str, object], slots: list[str]) -> None:
    assert left_out(chunk(config, **shape)) == slots


def test_what_it_writes_goes_at_once() -> None:
    for issue in issues_of(chunk(), MICROBATCHES):
        if issue.graph_only:
            assert set(issue.writes) <= set(issue.frees)


def test_where_every_stage_is_replayed() -> None:
    """The simulator's plans without R8: combine reads what experts write, and what leaves no graph has one form."""
    b = ProgramBuilder()
    x, frozen = b.input("x", needs_grad=True), b.input("frozen")
    with b.layer(0):
        (y,) = b.compute("attn", nothing, x, outputs=("y",), graph_only=nothing)
        (z,) = b.compute("experts", nothing, frozen, outputs=("z",), graph_only=nothing)
    (loss,) = b.compute("head", nothing, y, z, outputs=("loss",))
    b.loss(loss)
    for program, wanted in ((chunk().program, []), (b.build(), ["R0.0.attn"])):
        side = side_of(program, uniform(1))
        schedule = make_schedule(get_order("plain"), None, side, delayed=False, elide=False)
        issues = lower(schedule, {BACKWARD_SIDE: side}, {}).issues
        assert "R0.0.experts" in map(str, schedule)
        assert [str(issue.slot) for issue in issues if issue.graph_only] == wanted


class Products(Counting):
    """Counts matrix products per slot kind and stage."""

    def ran(self, name: str) -> None:
        if name in ("aten.mm", "aten.bmm", "aten.linear", "overlap.grouped_mm"):
            super().ran(name)


def products(model: ModelChunk, **observed: Any) -> Mapping[str, int]:
    counting = Products()
    with counting:
        train_step(model, feeds(), observers=(counting,))
    return {slot: counter.total() for slot, counter in counting.found.items()}


def declares_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(import_module("overlap.model.layers"), "second_form", lambda function, last: None)


@pytest.mark.parametrize("delay", [False, True])
def test_products_of_a_step(delay: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One less in each of these replays, and no other slot's number moves."""
    found = products(checked(chunk(delay=delay)))
    declares_nothing(monkeypatch)
    before = products(checked(chunk(delay=delay)))
    fewer = {slot: before[slot] - found[slot] for slot in before if before[slot] != found[slot]}
    assert fewer == dict.fromkeys(("R 0 experts", "R 1 shared", "R 1 experts"), MICROBATCHES)
    assert [found[f"{op} 1 experts"] for op in "NR"] == [2 * MICROBATCHES, MICROBATCHES]
    assert sum(before.values()) - sum(found.values()) == 3 * MICROBATCHES


def checked(model: ModelChunk) -> ModelChunk:
    """Without the check of its stages, which runs products too."""
    model.checked = True
    return model


@pytest.mark.parametrize(
    ("config", "shape", "delay"),
    [
        (uniform(1), {}, False),
        (uniform(2), {"layers": 4, "dropout": 0.1, "shared_width": 8}, True),
        (uniform(1, replay="hidden"), {"dtype": "bfloat16"}, True),
        (selective("experts", "shared_experts"), {"dtype": "bfloat16"}, False),
        # its layers' weights are values
        (uniform(1), {"mtp": 2, "mtp_repeat": True, "dense_layers": 0, "layers": 1}, True),
    ],
    ids=str,
)
def test_same_bits_as_the_reference(config: RecomputeConfig, shape: dict[str, object], delay: bool) -> None:
    model = chunk(config, delay=delay, **shape)
    assert left_out(model)
    assert verify(model, [feeds(2)]).equal


def test_same_bits_as_contiguous_recompute_and_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare_steps(chunk(delay=True), [feeds(2)], contiguous_step, train_step).equal
    gradients = []
    for _ in range(2):
        model = chunk(delay=True)
        train_step(model, feeds(2))
        gradients.append([parameter.grad for parameter in model.module.parameters()])
        declares_nothing(monkeypatch)
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


class LeavesAllOut(Engine):
    """Every replay that can leave its product out does, whoever reads it."""

    def _replay(self, issue: Issue, owner: MicrobatchState) -> None:
        super()._replay(replace(issue, graph_only=issue.stage.graph_only is not None), owner)


@pytest.mark.parametrize(
    ("config", "shape", "equal"),
    [(uniform(1), {}, True), (uniform(2), {}, False), (uniform(1), {"mhc": 2, "mhc_iterations": 1}, False)],
)
def test_a_product_that_is_read_is_missed(config: RecomputeConfig, shape: dict[str, object], equal: bool) -> None:
    """Control: the same engine where the plan would not leave them out."""
    assert verify(chunk(config, **shape), [feeds(2)], engine_type=LeavesAllOut).equal is equal


def test_storage_of_what_nobody_reads() -> None:
    """One element."""
    sizes: Counter[int] = Counter()

    class Watch:
        def before(self, issue: Issue, owner: MicrobatchState) -> None:
            """Nothing yet."""

        def after(self, issue: Issue, owner: MicrobatchState) -> None:
            """Written and not yet freed."""
            if issue.graph_only:
                sizes.update(owner.values[key].untyped_storage().nbytes() for key in issue.writes if key is not None)

    train_step(chunk(), feeds(), observers=(Watch(),))
    assert sizes == {4: 3 * MICROBATCHES}


def test_a_wrapped_forward_computes_everything() -> None:
    """Whoever puts a function around a stage's forward may read what it returns."""
    stage = chunk().program.by_key[1, "experts"]
    assert stage.graph_only is not None
    inner = stage.forward
    assert replace(stage, forward=lambda *reads: inner(*reads)).graph_only is None
