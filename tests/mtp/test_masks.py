"""Padding, packing and positions: the same in first pass, replay and eager layers, each microbatch its own."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlap import ModelChunk, Op
from overlap.builder import ProgramBuilder
from overlap.contiguous import contiguous_step
from overlap.engine import Engine, Feeds, MicrobatchState
from overlap.errors import ProgramError
from overlap.ir import Program
from overlap.lower import Issue
from overlap.model import Routed, Router, Routing
from overlap.reference import reference_step
from overlap.step import forward_only, step_plans, train_step
from overlap.verify import verify
from recompute import RecomputeConfig
from tests.mtp.tools import NONE, B, U, chunk_feeds, config_of, different, make, verdict_of

CUT = {"padding": True, "packed": True}


def with_padding_at_the_end(chunk: ModelChunk, count: int, padded: int = 3) -> list[Feeds]:
    feeds = chunk_feeds(chunk, count)
    mask = torch.arange(8).expand(2, 8) >= 8 - padded
    return [{**f, "padding_mask": mask.clone(), "labels": f["labels"].masked_fill(mask, -100)} for f in feeds]


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        *(({"mtp": 1}, rule) for rule in (U(1), U(2), B(2), B(1, recompute_mtp=True))),
        *(({"mtp": 2, "mhc": 2}, rule) for rule in (U(2), B(2))),
        *(({"mtp": 1, "per_token_loss": True}, rule) for rule in (U(1), B(1, recompute_mtp=True))),
    ],
    ids=str,
)
def test_padded_depths(settings: dict[str, Any], rule: RecomputeConfig) -> None:
    """Row 30: a depth and a mask whose last 3 tokens are padding, recomputed."""
    chunk = make(rule, padding=True, **settings)
    assert verify(chunk, [with_padding_at_the_end(chunk, 3)]).equal


def test_every_pass_is_the_same_call() -> None:
    """Row 30, as a signature test: N, F and R of a stage call one function with the same reads."""
    recomputed, eager = make(U(1), mtp=1, **CUT), make(NONE, mtp=1, **CUT)
    calls: dict[Any, set[tuple[Any, ...]]] = {}
    for chunk in (recomputed, eager):
        for plan, _ in step_plans(chunk, 2):
            for issue in plan.issues:
                if issue.slot.op in (Op.FORWARD, Op.NO_GRAD, Op.REPLAY):
                    assert issue.stage is chunk.program.by_key[issue.stage.key]
                    calls.setdefault(issue.stage.key, set()).add(tuple(name for name, _ in issue.reads))
    assert all(len(reads) == 1 for reads in calls.values())
    for layer in (0, 1, 2):
        (reads,) = calls[layer, "attn"]
        assert {"padding_mask", "cu_seqlens", "positions"} <= set(reads)


def outputs_by_layer(chunk: ModelChunk, feeds: list[Feeds]) -> tuple[dict[Any, Tensor], dict[str, Tensor]]:
    """Output of every layer and microbatch, and the counters, after a step."""
    chunk = copy.deepcopy(chunk)
    found: dict[Any, Tensor] = {}

    class Noting:
        def before(self, issue: Issue, owner: MicrobatchState) -> None:
            pass

        def after(self, issue: Issue, owner: MicrobatchState) -> None:
            for name in ("hidden", "residual"):
                key = (f"{issue.stage.layer}.{name}", 0)
                if issue.slot.op in (Op.FORWARD, Op.NO_GRAD) and key in owner.values:
                    found[owner.number, key] = owner.values[key].clone()

    train_step(chunk, feeds, observers=(Noting(),))
    return found, {name: buffer.clone() for name, buffer in chunk.module.named_buffers()}


@pytest.mark.parametrize("blocks", [1, 3, 5])
def test_mixed_layers_see_one_mask(blocks: int) -> None:
    """Row 32: with recomputed and eager layers, outputs and counts of all layers are the eager run's."""
    eager, mixed = make(NONE, layers=4, **CUT), make(B(blocks), layers=4, **CUT)
    feeds = chunk_feeds(eager, 2)
    (outputs, counters), (found, counted) = (outputs_by_layer(chunk, feeds) for chunk in (eager, mixed))
    assert outputs.keys() == found.keys()
    assert all(torch.equal(outputs[key], found[key]) for key in outputs)
    assert all(torch.equal(counters[name], counted[name]) for name in counters)
    assert verify(mixed, [feeds]).equal


PACKINGS = ([0, 5, 8, 11, 16], [0, 3, 8, 16], [0, 8, 9, 16])


def packed_feeds(chunk: ModelChunk) -> list[Feeds]:
    """Three microbatches, each with boundaries of its own: rows of 5 and 3 tokens first."""
    result: list[Feeds] = []
    for feeds, ends in zip(chunk_feeds(chunk, 3), PACKINGS, strict=True):
        pairs = pairwise(ends)
        positions = torch.cat([torch.arange(last - first) for first, last in pairs]).view(2, 8)
        result.append({**feeds, "cu_seqlens": torch.tensor(ends), "positions": positions})
    return result


class Spoiler:
    """The caller prepares the next step's data in the buffers of this one, as soon as the first forward has run."""

    def __init__(self, feeds: list[Feeds], names: tuple[str, ...]) -> None:
        self._feeds = feeds
        self._names = names
        self.spoilt = 0

    def before(self, issue: Issue, owner: MicrobatchState) -> None:
        if issue.slot.op is Op.REPLAY:
            self.spoilt += 1
            for feeds in self._feeds[: owner.number + 1]:
                for name in self._names:
                    feeds[name].copy_(feeds[name].flip(-1)) if name != "cu_seqlens" else feeds[name][1:-1].add_(1)

    def after(self, issue: Issue, owner: MicrobatchState) -> None:
        pass


@pytest.mark.parametrize("rule", [U(1), U(2), B(2, recompute_mtp=True)], ids=str)
@pytest.mark.parametrize("mhc", [None, 2])
def test_a_replay_has_its_own_boundaries(mhc: int | None, rule: RecomputeConfig) -> None:
    """Row 33: another packing per microbatch, the fed tensors changed in place before each replay."""
    chunk = make(rule, mtp=1, mhc=mhc, **CUT)
    feeds = packed_feeds(chunk)
    expected, found = copy.deepcopy(chunk), copy.deepcopy(chunk)
    reference_step(expected, feeds)
    spoiler = Spoiler(feeds, ("cu_seqlens", "positions", "padding_mask"))
    train_step(found, feeds, observers=(spoiler,))
    assert spoiler.spoilt > 0
    gradients = [{name: p.grad for name, p in side.module.named_parameters()} for side in (expected, found)]
    assert different(*gradients) == ()


def test_the_spoiler_spoils() -> None:
    """Negative control of the test above: without the step's own copies the replay reads what the caller wrote."""
    chunk = make(U(1), mtp=1, **CUT)
    feeds = packed_feeds(chunk)
    expected, found = copy.deepcopy(chunk), copy.deepcopy(chunk)
    reference_step(expected, feeds)

    class Sharing(Engine):
        def issue(self, issue: Issue, owner: MicrobatchState) -> None:
            for name, value in feeds[owner.number].items():
                if (name, 0) in owner.values:
                    owner.values[name, 0] = value
            super().issue(issue, owner)

    train_step(found, feeds, observers=(Spoiler(feeds, ("cu_seqlens", "positions")),), engine_type=Sharing)
    gradients = [{name: p.grad for name, p in side.module.named_parameters()} for side in (expected, found)]
    assert different(*gradients) != ()


class OwnObject(nn.Module):
    """One layer that reads an object of the caller's: where sequences end."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def program(self) -> Program:
        b = ProgramBuilder()
        boundaries = b.input("boundaries")
        with b.layer(0):
            (out,) = b.compute("attn", self.cut, boundaries, outputs=("out",), parameters=(self.weight,))
        (loss,) = b.compute("head", torch.sum, out, outputs=("loss",))
        b.loss(loss)
        return b.build()

    def cut(self, boundaries: dict[str, list[int]]) -> Tensor:
        return self.weight[: boundaries["ends"][1]].exp()


def test_a_replay_has_its_own_object() -> None:
    """Row 33: boundaries in a mutable object that is no tensor."""
    chunk = ModelChunk(OwnObject(), recompute=U(1), order="plain")
    boundaries = {"ends": [0, 5, 8]}

    class Mutating:
        def before(self, issue: Issue, owner: MicrobatchState) -> None:
            if issue.slot.op is Op.REPLAY:
                boundaries["ends"][1] = 2

        def after(self, issue: Issue, owner: MicrobatchState) -> None:
            pass

    train_step(chunk, [{"boundaries": boundaries}], observers=(Mutating(),))
    (gradient,) = (p.grad for p in chunk.parameters())
    assert boundaries["ends"] == [0, 2, 8]
    assert gradient is not None
    assert gradient.count_nonzero() == 5


@pytest.mark.parametrize("rule", [U(1), U(2), B(1, recompute_mtp=True)], ids=str)
def test_fields_before_each_replay(rule: RecomputeConfig) -> None:
    """B7: ids, positions, mask and boundaries of a replay are those of its microbatch, rolled by nobody."""
    chunk = make(rule, mtp=2, mhc=2, **CUT)
    feeds = chunk_feeds(chunk, 3)
    before = copy.deepcopy(feeds)
    read: set[str] = set()

    class Comparing:
        def before(self, issue: Issue, owner: MicrobatchState) -> None:
            if issue.slot.op is Op.REPLAY:
                for name, _ in issue.reads:
                    if name in before[owner.number]:
                        read.add(name)
                        assert torch.equal(owner.values[name, 0], before[owner.number][name])

        def after(self, issue: Issue, owner: MicrobatchState) -> None:
            pass

    train_step(chunk, feeds, observers=(Comparing(),))
    assert read == {"ids", "padding_mask", "cu_seqlens", "positions"}
    for fed, kept in zip(feeds, before, strict=True):
        assert all(torch.equal(fed[name], kept[name]) for name in kept)


@pytest.mark.parametrize("settings", [{"mtp": 1}, {"mtp": 1, "mhc": 2}], ids=str)
def test_the_mask_reaches_every_router(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """B27: in first passes, eager ones and replays; a depth's router gets the mask moved by the depth."""
    calls: list[tuple[str, Tensor | None]] = []
    op: list[str] = []
    forward = Router.forward

    def spying(self: Router, x: Tensor, pinned: Routing | None = None, *, padding: Tensor | None = None) -> Routed:
        calls.append((op[-1], padding))
        return forward(self, x, pinned, padding=padding)

    class Noting:
        def before(self, issue: Issue, owner: MicrobatchState) -> None:
            op.append(f"{issue.slot.op}.{issue.stage.layer}")

        def after(self, issue: Issue, owner: MicrobatchState) -> None:
            pass

    chunk = make(B(1, recompute_mtp=True), padding=True, **settings)
    (feeds,) = with_padding_at_the_end(chunk, 1)
    chunk.checked = True
    monkeypatch.setattr(Router, "forward", spying)
    train_step(chunk, [feeds], observers=(Noting(),))
    wanted = [(name, 4 if name.endswith("2") else 3) for name in ("N.0", "F.1", "N.2", "R.2", "R.0")]
    assert [(name, 0 if mask is None else int(mask.sum()) // 2) for name, mask in calls] == wanted
    op.append("X")
    calls.clear()
    forward_only(chunk, [feeds])
    assert [int(mask.sum()) // 2 for _, mask in calls if mask is not None] == [3, 3, 4]


@pytest.mark.parametrize("rule", [NONE, U(1), B(1)], ids=str)
def test_counts_leave_padding_out(rule: RecomputeConfig) -> None:
    """Row 34: tokens per expert equal an explicit loop over tokens that are no padding, in every path, counted once."""
    chunk = make(rule, mtp=1, padding=True)
    feeds = with_padding_at_the_end(chunk, 2)
    train_step(chunk, feeds)
    routers = [module for module in chunk.modules() if isinstance(module, Router)]
    assert [int(router.tokens_per_expert.sum()) for router in routers] == [2 * 2 * 5 * 2, 2 * 2 * 5 * 2, 2 * 2 * 4 * 2]


@pytest.mark.parametrize("settings", [{}, {"mhc": 2}, {"tied": True, "mhc": 2}], ids=str)
def test_padding_changes_nothing_for_other_tokens(settings: dict[str, Any]) -> None:
    """The padded run's losses equal the run without those tokens."""
    padded = make(NONE, padding=True, dtype="float64", **settings)
    plain = make(NONE, dtype="float64", **settings)
    (feeds,) = with_padding_at_the_end(padded, 1)
    short = {name: feeds[name][:, :5].contiguous() for name in ("ids", "labels")}
    (found,), (expected,) = forward_only(padded, [feeds]), forward_only(plain, [short])
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])


@pytest.mark.parametrize("settings", [{"mtp": 2}, {"mtp": 1, "mhc": 2}], ids=str)
def test_a_packed_row_equals_its_sequences(settings: dict[str, Any]) -> None:
    """Losses of a packed row are the token-weighted means of its sequences' losses, depths included."""
    packed = make(NONE, packed=True, dtype="float64", per_token_loss=True, **settings)
    plain = make(NONE, dtype="float64", per_token_loss=True, **settings)
    tokens = torch.randint(32, (16,))
    labels = torch.randint(32, (16,))
    ends = [0, 5, 8, 16]
    pairs = list(pairwise(ends))
    feeds = {
        "ids": tokens.view(1, 16), "labels": labels.view(1, 16), "cu_seqlens": torch.tensor(ends),
        "positions": torch.cat([torch.arange(last - first) for first, last in pairs]).view(1, 16),
    }  # fmt: skip
    (found,) = forward_only(packed, [feeds])
    parts = forward_only(plain, [{"ids": tokens[None, a:b], "labels": labels[None, a:b]} for a, b in pairs])
    torch.testing.assert_close(found["loss"], sum(part["loss"] for part in parts))
    for depth in range(1, config_of(packed).mtp + 1):
        name, lengths = f"mtp{depth}_loss", [last - first for first, last in pairs]
        # the plain run's term is mean over its own targets times its tokens
        sums = [part[name] / n * (n - depth) for part, n in zip(parts, lengths, strict=True)]
        expected = sum(sums) / sum(n - depth for n in lengths) * 16
        torch.testing.assert_close(found[name], expected)


@pytest.mark.parametrize("settings", [{}, {"mhc": 2}, {"padding": True}, {"packed": True, "mhc": 2}], ids=str)
@pytest.mark.parametrize("rule", [NONE, U(2), B(1)], ids=str)
def test_the_contiguous_path(settings: dict[str, Any], rule: RecomputeConfig) -> None:
    """Plain checkpointing takes streams, masks and packings too."""
    chunk = make(rule, layers=3, dropout=0.1, **settings)
    assert verify(chunk, [chunk_feeds(chunk, 2)], reference=contiguous_step).equal


def test_the_contiguous_path_refuses_depths() -> None:
    """It hands on one value; depths read the embedding beside it."""
    chunk = make(U(1), mtp=1)
    with pytest.raises(ProgramError, match=r"layer 2 reads .* the contiguous path takes one each"):
        contiguous_step(chunk, chunk_feeds(chunk, 1))


def test_batches_of_any_size() -> None:
    for batch in (1, 2, 5):
        assert verdict_of(make(U(1), mtp=1, mhc=2, **CUT), 2, batch=batch).equal
