"""Nothing goes while it is needed: saved tensors, values and gradients keep their bytes until their last use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlap import ModelChunk, ProgramBuilder, reference_step
from overlap.check import same_bits
from overlap.dispatch import LocalTransport
from overlap.dispatch.host_loopback import HostLoopback
from overlap.dispatch.symmetric_memory import SymmetricMemory, Traffic
from overlap.engine import Feeds
from overlap.model import Decoder
from overlap.parallel.collective_log import NoLog
from overlap.parallel.layout import ParallelLayout
from overlap.parallel.world import SOLO, World, open_world
from recompute import RecomputeConfig, Replay
from tests.cases.model import NONE, B, U, different, m0, make_feeds, run
from tests.cases.untouched import AddsInPlace, FreesGradients, FreesReads, Untouched, noted, watched
from tests.dispatch.file_peers import FilePeers
from tests.distributed.ranks import RankPool
from tests.overlap.programs import Own, tiny_chunk, tiny_feeds

HIDDEN = RecomputeConfig.uniform(1, replay=Replay.HIDDEN)
RULES = [U(1), B(2), NONE, HIDDEN]
OWN = ["itself", "view", "skip"]
ONE, TWO, DENSE = {"experts": 1, "topk": 1}, {"experts": 2, "topk": 1}, {"dense_layers": 2}


def make(
    rule: RecomputeConfig, shape: dict[str, int], transport: Any, *, world: World = SOLO, delay_wgrad: bool = False
) -> ModelChunk:
    """Three layers of M0: one before, and one behind, the one that controls break."""
    module = Decoder(m0(layers=3, **shape), transport=transport)
    return ModelChunk(module, recompute=rule, delay_wgrad=delay_wgrad, world=world)


def enough(seen: Untouched) -> bool:
    """Whether enough was compared, of all kinds that every step has."""
    return all(seen.checks[kind] >= least for kind, least in (("saved", 200), ("value", 35), ("gradient", 35)))


def assert_untouched(chunk: ModelChunk, feeds: list[Feeds]) -> Untouched:
    """The watched step compares all that it noted, finds nothing changed, and equals the reference."""
    expected = run(chunk, feeds, reference_step)
    seen, found = watched(chunk, feeds)
    assert seen.faults == set()
    assert seen.unused() == []
    assert enough(seen)
    assert different(expected, found) == []
    return seen


@pytest.mark.parametrize("transport", [LocalTransport, HostLoopback])
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("shape", [ONE, TWO], ids=["one expert", "two experts"])
def test_experts_keep_what_they_saved(shape: dict[str, int], rule: RecomputeConfig, transport: Any) -> None:
    """Rows 41 and B17: with one expert the sort is the identity; rows are copied on their way, or are not."""
    assert_untouched(make(rule, shape, transport()), make_feeds(2))


@pytest.mark.parametrize("rule", [B(2), NONE], ids=str)
def test_dense_layers_keep_what_they_saved(rule: RecomputeConfig) -> None:
    """Row 45: a dense layer's products save their very inputs; both kinds replayed, and both not."""
    assert_untouched(make(rule, DENSE, LocalTransport()), make_feeds(2))
    assert_untouched(tiny_chunk("DMDM", recompute=rule), tiny_feeds(3))


@pytest.mark.parametrize("shape", [ONE, DENSE], ids=["one expert", "dense"])
def test_delayed_weight_gradients_keep_theirs(shape: dict[str, int]) -> None:
    """Rows 41 and 45: what a W slot needs outlives the backward that left it."""
    seen = assert_untouched(make(HIDDEN, shape, LocalTransport(), delay_wgrad=True), make_feeds(2))
    assert seen.checks["pending"] >= 80


@pytest.mark.parametrize("rule", [U(1), NONE], ids=str)
@pytest.mark.parametrize(
    ("shape", "transport"), [(ONE, LocalTransport), (TWO, HostLoopback), (DENSE, LocalTransport)],
    ids=["one expert", "two experts", "dense"],
)  # fmt: skip
def test_reads_freed_by_name_are_seen(shape: dict[str, int], transport: Any, rule: RecomputeConfig) -> None:
    """Rows 41, 45 and B17, negative control: what a slot reads last is what its graph saved."""
    seen, _ = watched(make(rule, shape, transport()), make_feeds(2), FreesReads)
    assert seen.faults == {("saved", "1.attn"), ("saved", "1.experts")}


@pytest.mark.parametrize(
    ("transport", "readers"),
    [(LocalTransport, ("attn", "shared", "experts")), (HostLoopback, ("attn", "shared"))],
)
@pytest.mark.parametrize("rule", [U(1), NONE], ids=str)
def test_gradients_freed_by_name_are_seen(rule: RecomputeConfig, transport: Any, readers: tuple[str, ...]) -> None:
    """B31, negative control: `post` hands one gradient on to all that it adds, and rows may stay where they are."""
    seen, _ = watched(make(rule, ONE, transport()), make_feeds(2), FreesGradients)
    assert seen.faults == {("gradient", f"{layer}.{name}") for layer in range(3) for name in readers}


def test_pending_gradients_freed_by_name_are_seen() -> None:
    """Rows 41 and 45, negative control: a delayed weight gradient needs the gradient that its backward was given."""
    chunk = make(HIDDEN, DENSE, LocalTransport(), delay_wgrad=True)
    seen, _ = watched(chunk, make_feeds(2), partial(FreesGradients, only="experts"))
    assert {("pending", "0.experts"), ("pending", "1.experts")} <= seen.faults


def test_an_emptied_storage_is_seen() -> None:
    """Negative control: a storage of size zero, however many bytes the tensor says it has."""
    tensor = torch.ones(8)
    note = noted(tensor[2:4])
    assert note.intact()
    tensor.untyped_storage().resize_(0)
    assert not note.intact()


def through(how: str, hidden: Tensor) -> Tensor:
    """The very tensor, or another one of its storage."""
    return hidden if how == "itself" else hidden.view_as(hidden)


def hand_on(how: str, module: Any, b: ProgramBuilder) -> None:
    """In each layer the first stage hands its input on beside its output, and the last gives nothing but its input."""
    hidden = b.input("x", needs_grad=True)
    for index, weight in enumerate(module.weights):
        with b.layer(index):
            mixed, kept = b.compute(
                "attn", partial(lambda w, h: (torch.tanh(h @ w), through(how, h)), weight), hidden,
                outputs=("mixed", "kept"), parameters=(weight,),
            )  # fmt: skip
            (product,) = b.compute("experts", torch.mul, mixed, kept, outputs=("product",))
            (hidden,) = b.compute("post", partial(through, how), product, outputs=("out",))
    (loss,) = b.compute("head", lambda h: h.square().sum(), hidden, outputs=("loss",))
    b.loss(loss)


def skip(module: Any, b: ProgramBuilder) -> None:
    """In each layer the last stage adds up all that came before it, and gives one gradient to all of that."""
    hidden = b.input("x", needs_grad=True)
    for index, weight in enumerate(module.weights):
        with b.layer(index):
            (mixed,) = b.compute(
                "attn", partial(lambda w, h: torch.tanh(h @ w), weight), hidden, outputs=("mixed",),
                parameters=(weight,),
            )  # fmt: skip
            (square,) = b.compute("experts", torch.square, mixed, outputs=("square",))
            (hidden,) = b.compute(
                "post", lambda h, m, s: h + m + s, hidden, mixed, square, outputs=("out",),
                adjoint=lambda grads, pinned: (grads[0],) * 3,
            )  # fmt: skip
    (loss,) = b.compute("head", lambda h: h.square().sum(), hidden, outputs=("loss",))
    b.loss(loss)


def own(build: Callable[[Any, ProgramBuilder], None], rule: RecomputeConfig) -> ModelChunk:
    """Three layers of one of these."""
    weights = nn.ParameterList(nn.Parameter(torch.randn(8, 8)) for _ in range(3))
    return ModelChunk(Own(build, weights=weights), recompute=rule)


def fed(big: Tensor) -> list[Feeds]:
    """A microbatch per row of `big`: a part of it, in its storage."""
    return [{"x": rows[4:12].requires_grad_()} for rows in big]


@pytest.mark.parametrize("build", [partial(hand_on, "itself"), partial(hand_on, "view"), skip], ids=OWN)
@pytest.mark.parametrize("rule", [U(1), U(2), B(2)], ids=str)
def test_what_shares_storage_stays(rule: RecomputeConfig, build: Callable[[Any, ProgramBuilder], None]) -> None:
    """Rows 44 and B31: outputs that are inputs, gradients of many, an input that is a part of something larger."""
    chunk, big = own(build, rule), torch.randn(3, 20, 8)
    copy, wanted, feeds = big.clone(), fed(big), fed(big)
    expected = run(chunk, wanted, reference_step)
    seen, found = watched(chunk, feeds)
    assert seen.faults == set()
    # the gradients of what was fed are handed to whoever made it
    assert {(kind, item[0]) for kind, _, item in seen.unused()} == {("gradient", "x")}
    assert (seen.checks["saved"], seen.checks["gradient"]) == ((39, 42) if build is skip else (48, 36))
    assert different(expected, found) == []
    assert all(same_bits(theirs["x"].grad, ours["x"].grad) for theirs, ours in zip(wanted, feeds, strict=True))
    assert torch.equal(big, copy)


@pytest.mark.parametrize("how", ["itself", "view"])
@pytest.mark.parametrize("rule", [U(1), U(2), B(2)], ids=str)
def test_shared_storage_freed_by_name_is_seen(rule: RecomputeConfig, how: str) -> None:
    """Row 44, negative control: the value handed on, the tensors saved, and the caller's own memory."""
    big = torch.randn(3, 20, 8)
    copy = big.clone()
    seen, _ = watched(own(partial(hand_on, how), rule), fed(big), partial(FreesReads, layer=0))
    assert seen.faults == {("value", "0.experts"), ("saved", "0.attn"), ("saved", "0.experts")}
    assert not torch.equal(big, copy)


@pytest.mark.parametrize("rule", [U(1), NONE], ids=str)
def test_gradients_added_in_place_are_seen(rule: RecomputeConfig) -> None:
    """B31, negative control: what the skip connection still waits for."""
    seen, _ = watched(own(skip, rule), fed(torch.randn(3, 20, 8)), AddsInPlace)
    assert seen.faults == {("gradient", "0.post"), ("gradient", "1.post")}


class OneBuffer(SymmetricMemory):
    """Control: hands out the memory that rows arrive in, and uses it again."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._buffers: dict[torch.Size, Tensor] = {}

    def go(self, rows: Tensor, splits: Traffic, what: str) -> Tensor:  # type: ignore[override]  # as in its base
        out = super().go(rows, splits, what)
        buffer = self._buffers.setdefault(out.shape[1:], out.new_empty(100, *out.shape[1:]))[: out.shape[0]]
        buffer.data.copy_(out)
        return buffer


def over_ranks() -> tuple[bool, list[set[tuple[str, str]]], bool]:
    """With one expert per rank: EQ with the reference; faults of it and of two controls; whether enough was seen."""
    world = open_world(ParallelLayout(world_size=2, ep=2))
    feeds = make_feeds(2, seed=world.rank)

    def chunk(transport: type[SymmetricMemory]) -> ModelChunk:
        copies = transport(world.ep_group, NoLog(), partial(FilePeers, world.ep_group))
        return make(HIDDEN, TWO, copies, world=world)

    plain = chunk(SymmetricMemory)
    expected = run(plain, feeds, reference_step)
    seen, found = watched(plain, feeds)
    freed, _ = watched(plain, feeds, FreesReads)
    overwritten, _ = watched(chunk(OneBuffer), feeds)
    return different(expected, found) == [], [each.faults for each in (seen, freed, overwritten)], enough(seen)


@pytest.mark.distributed
def test_one_expert_per_rank(ranks: RankPool) -> None:
    """Rows 41 and B17: rows arrive in the order that the rank's expert wants, so it saves them as they came.

    Controls: they are freed by name; those of the next layer and microbatch overwrite them.
    """
    for equal, faults, compared in ranks(2, over_ranks):
        assert equal
        assert compared
        assert faults[:2] == [set(), {("saved", "1.attn"), ("saved", "1.experts")}]
        assert ("saved", "1.experts") in faults[2]
