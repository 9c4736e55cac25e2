"""The copy-engine transport on CPU ranks that map each other's files: the same bits as all_to_all."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from overlap import ModelChunk, get_order, train_step
from overlap.cli import main
from overlap.dispatch import Transport, make_routing
from overlap.dispatch.all_to_all import AllToAll
from overlap.dispatch.symmetric_memory import SymmetricMemory, check_device
from overlap.model import Decoder, ModelConfig
from overlap.model.routes import fix_route
from overlap.parallel.collective_log import CollectiveLog, NoLog
from overlap.parallel.layout import ParallelLayout
from overlap.parallel.works import Works
from overlap.parallel.world import open_world
from overlap.verify import compare, verify
from recompute import ConfigError, RecomputeConfig, Replay
from tests.dispatch.file_peers import FilePeers
from tests.dispatch.test_all_to_all import choice
from tests.distributed.ranks import RankPool

pytestmark = pytest.mark.distributed


def everything(
    transport: AllToAll, ids: Tensor, dtype: torch.dtype, experts: int, capacity: int | None
) -> list[Tensor]:
    """All that a transport gives, in one list: forward, backward by autograd, adjoints, a replay."""
    padding = torch.arange(ids.shape[0]) % 3 == 1
    routing = make_routing(ids, experts, padding, capacity)
    rows = routing.source.shape[0]
    generator = torch.Generator().manual_seed(ids.shape[0])
    tokens = torch.randn(rows, 128, generator=generator).to(dtype).requires_grad_()
    probs = torch.rand(rows, generator=generator).requires_grad_()
    sent, weights, arrival = transport.dispatch(tokens, probs, routing)
    home = transport.combine(sent * 3, routing, arrival)
    found = torch.autograd.grad((home, weights), (tokens, probs), (home.detach() / 7, weights.detach()))
    pinned = (routing, arrival)
    there = transport.combine_adjoint((home.detach(),), pinned)[0]
    back = transport.dispatch_adjoint((there, weights.detach(), None), pinned)
    again = transport.dispatch(tokens, probs, routing, pinned=(arrival,))
    assert again[2] is arrival
    assert transport.dispatch_adjoint((None, None, None), pinned) == (None, None, None)
    order = [] if arrival.order is None else [arrival.order, arrival.inverse]
    return [
        t for t in (sent, weights, arrival.counts, *order, home, *found, there, *back[:2], *again[:2]) if t is not None
    ]


def both(size: int, kind: str, dtype: torch.dtype, capacity: int | None) -> tuple[bool, int, list[str]]:
    world = open_world(ParallelLayout(world_size=size, ep=size))
    log = CollectiveLog()
    transport = SymmetricMemory(world.ep_group, log, partial(FilePeers, world.ep_group))
    first = transport.nbytes
    ids = choice(world.rank, kind, 2 * size, size)
    equal = []
    # the second time rows need a larger buffer
    for times in (1, 1500):
        args = (ids.repeat(times, 1), dtype, 2 * size, None if capacity is None else capacity * times)
        expected = everything(AllToAll(world.ep_group, Works(), NoLog()), *args)
        found = everything(transport, *args)
        equal.append(len(found) == len(expected) and all(map(torch.equal, found, expected)))
    return all(equal), transport.nbytes - first, log.entries


@pytest.mark.parametrize(
    ("size", "kind", "dtype", "capacity"),
    [
        (2, "random", torch.bfloat16, None),
        (3, "random", torch.float32, None),
        (2, "first", torch.float32, None),
        (2, "none_from_rank_1", torch.float64, None),
        (2, "random", torch.float32, 3),
    ],
)
def test_equal_to_all_to_all(ranks: RankPool, size: int, kind: str, dtype: torch.dtype, capacity: int | None) -> None:
    results = ranks(size, both, size, kind, dtype, capacity)
    assert all(equal for equal, _, _ in results)
    assert len({grown for _, grown, _ in results}) == 1
    assert results[0][1] > 0
    assert all(log == results[0][2] for _, _, log in results)
    # once per first pass, never in a replay or backward
    assert sum("counts" in entry for entry in results[0][2]) == (2 if capacity is None else 0)


def train(route: str) -> tuple[bool, bool]:
    """Whether the overlapped step equals plain autograd, and its gradients those over all_to_all."""
    world = open_world(ParallelLayout(world_size=2, ep=2))
    group = world.ep_group
    config = ModelConfig(
        layers=2, hidden=16, heads=2, experts=4, topk=2, expert_width=8, vocab=32, dropout=0.1, mtp=1, mhc=2,
        mhc_iterations=2,
    )  # fmt: skip
    rule = RecomputeConfig.uniform(1, replay=Replay.HIDDEN)
    generator = torch.Generator().manual_seed(world.rank)
    tokens = torch.randint(config.vocab, (3, 1, 9 + 4 * world.rank), generator=generator)
    data = [{"ids": t[:, :-1].contiguous(), "labels": t[:, 1:].contiguous()} for t in tokens]

    def make(transport: Transport) -> ModelChunk:
        model = Decoder(config, transport=transport)
        if route == "first":
            fix_route(model, 2)
        return ModelChunk(model, recompute=rule, order=get_order("multi_queue", rule.replay), world=world)

    chunk = make(SymmetricMemory(group, NoLog(), partial(FilePeers, group)))
    equal = verify(chunk, [data]).equal
    gradients = []
    for side in (chunk, make(AllToAll(group, Works(), NoLog()))):
        train_step(side, data)
        gradients.append({name: p.grad for name, p in side.named_parameters()})
    return equal, not compare(*gradients).different


@pytest.mark.parametrize("route", ["router", "first"])
def test_a_step_with_hidden_replay(ranks: RankPool, route: str) -> None:
    assert ranks(2, train, route) == [(True, True)] * 2


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_only_memory_of_gpus_is_mapped(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"symmetric_memory.*not of a {kind}"):
        check_device(kind)


def test_the_command_line_refuses_it_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["verify", "--ep", "2", "--transport", "symmetric_memory"]) == 2
    assert "maps the memory of GPUs, not of a cpu" in capsys.readouterr().err
    assert main(["verify", "--transport", "symmetric_memory", "--device", "cuda"]) == 2
    assert "needs --ep above 1" in capsys.readouterr().err
