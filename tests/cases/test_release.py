"""Nothing goes while it is needed: saved tensors, values and gradients keep their bytes until their last use."""

from __future__ import annotations

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
from overlap.engine import Engine, Feeds
from overlap.model import Decoder
from overlap.parallel.collective_log import NoLog
from overlap.parallel.layout import ParallelLayout
from overlap.parallel.world import SOLO, World, open_world
from recompute import RecomputeConfig, Replay
from tests.cases.model import NONE, B, U, different, m0, make_feeds, run
from tests.cases.untouched import FreesGradients, FreesReads, Untouched, noted, watched
from tests.dispatch.file_peers import FilePeers
from tests.distributed.ranks import RankPool
from tests.overlap.programs import Own, tiny_chunk, tiny_feeds

HIDDEN = RecomputeConfig.uniform(1, replay=Replay.HIDDEN)
RULES = [U(1), B(2), NONE, HIDDEN]
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


@pytest.mark.parametrize("rule", RULES, ids=str)
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


def aliasing(how: str, rule: RecomputeConfig) -> ModelChunk:
    """Three layers of stages that hand on what they are given."""
    weights = nn.ParameterList(nn.Parameter(torch.randn(8, 8)) for _ in range(3))
    return ModelChunk(Own(partial(hand_on, how), weights=weights), recompute=rule)


def fed(big: Tensor) -> list[Feeds]:
    """A microbatch per row of `big`: a part of it, in its storage."""
    return [{"x": rows[4:12].requires_grad_()} for rows in big]


@pytest.mark.parametrize("how", ["itself", "view"])
@pytest.mark.parametrize("rule", [U(1), U(2), B(2)], ids=str)
def test_what_shares_storage_stays(rule: RecomputeConfig, how: str) -> None:
    """Row 44: outputs that are inputs, and a segment's input that is a part of something larger."""
    chunk, big = aliasing(how, rule), torch.randn(3, 20, 8)
    copy, wanted, feeds = big.clone(), fed(big), fed(big)
    expected = run(chunk, wanted, reference_step)
    seen, found = watched(chunk, feeds)
    assert seen.faults == set()
    # the gradients of what was fed are handed to whoever made it
    assert {(kind, item[0]) for kind, _, item in seen.unused()} == {("gradient", "x")}
    assert (seen.checks["saved"], seen.checks["gradient"]) == (3 * (3 * 5 + 1), 3 * 3 * 4)
    assert different(expected, found) == []
    assert all(same_bits(theirs["x"].grad, ours["x"].grad) for theirs, ours in zip(wanted, feeds, strict=True))
    assert torch.equal(big, copy)


@pytest.mark.parametrize("how", ["itself", "view"])
@pytest.mark.parametrize("rule", [U(1), U(2), B(2)], ids=str)
def test_shared_storage_freed_by_name_is_seen(rule: RecomputeConfig, how: str) -> None:
    """Row 44, negative control: the value handed on, the tensors saved, and what lies around the fed part."""
    big = torch.randn(3, 20, 8)
    copy = big.clone()
    seen, _ = watched(aliasing(how, rule), fed(big), partial(FreesReads, layer=0))
    assert seen.faults == {("value", "0.experts"), ("saved", "0.attn"), ("saved", "0.experts")}
    assert not torch.equal(big, copy)


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


def over_ranks(transport: type[SymmetricMemory], engine_type: type[Engine]) -> tuple[Any, bool, bool]:
    """Faults, whether enough was compared, whether the step equals the reference; with one expert per rank."""
    world = open_world(ParallelLayout(world_size=2, ep=2))
    copies = transport(world.ep_group, NoLog(), partial(FilePeers, world.ep_group))
    chunk, feeds = make(HIDDEN, TWO, copies, world=world), make_feeds(2, seed=world.rank)
    expected = run(chunk, feeds, reference_step)
    seen, found = watched(chunk, feeds, engine_type)
    return seen.faults, enough(seen), different(expected, found) == []


@pytest.mark.distributed
def test_one_expert_per_rank(ranks: RankPool) -> None:
    """Rows 41 and B17: rows arrive in the order that the rank's expert wants, so it saves them as they came."""
    assert ranks(2, over_ranks, SymmetricMemory, Engine) == [(set(), True, True)] * 2


@pytest.mark.distributed
@pytest.mark.parametrize(("transport", "engine_type"), [(SymmetricMemory, FreesReads), (OneBuffer, Engine)])
def test_rows_lost_on_ranks_are_seen(ranks: RankPool, transport: Any, engine_type: type[Engine]) -> None:
    """Rows 41 and B17, negative control: freed by name, or overwritten by the next layer's and microbatch's."""
    for faults, _, equal in ranks(2, over_ranks, transport, engine_type):
        assert ("saved", "1.experts") in faults
        assert engine_type is Engine or not equal
