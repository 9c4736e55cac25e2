"""Collectives are waited for at the first slot that needs them: not at launch, not too late."""

from __future__ import annotations

import copy
import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from overlap import ModelChunk, get_order, reference_step, train_step
from overlap.builder import ProgramBuilder
from overlap.check import same_bits
from overlap.dispatch.arrival import Arrival
from overlap.dispatch.local import LocalTransport
from overlap.dispatch.routing import Routing
from overlap.ir import Lane, Program
from overlap.lanes import Owner
from overlap.lower import Issue
from overlap.model import Decoder, ModelConfig
from overlap.parallel.work_lanes import WorkLanes
from overlap.parallel.works import Launched, Works
from recompute import RecomputeConfig, Replay


class LateCopy:
    """A transfer that reads at its launch and writes when it is waited for; until then the target is not a number."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self.source, self.target = source.clone(), target.fill_(math.nan)
        self.done = False

    def wait(self) -> bool:
        assert not self.done
        self.target.copy_(self.source)
        self.done = True
        return True


class LateTransport:
    """One rank; every row makes a late copy."""

    def __init__(self, works: Works) -> None:
        self.works = works
        self.made: list[LateCopy] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> LateTransport:
        return self

    def held(self, experts: int) -> range:
        return range(experts)

    def send(self, rows: Tensor | None) -> Tensor | None:
        if rows is None:
            return None
        work = LateCopy(rows.detach(), torch.empty_like(rows))
        self.made.append(work)
        self.works.add(work, (work.source, work.target))
        return work.target

    def dispatch(self, tokens: Tensor, probs: Tensor, routing: Routing, *, pinned: Any = None) -> tuple[Any, ...]:
        return self.send(tokens), self.send(probs), Arrival(routing.counts, routing.ends)

    def dispatch_adjoint(self, grads: Any, pinned: Any) -> tuple[Any, ...]:
        return self.send(grads[0]), self.send(grads[1]), None

    def combine(self, rows: Tensor, routing: Routing, arrival: Arrival) -> Any:
        return self.send(rows)

    def combine_adjoint(self, grads: Any, pinned: Any) -> tuple[Any, ...]:
        return self.send(grads[0]), None, None


class Impatient(WorkLanes):
    """Control: nobody waits before the step is over."""

    def _wait(self, number: int) -> None:
        return


CONFIG = ModelConfig(layers=3, hidden=16, heads=2, expert_width=8, shared_width=8, vocab=32)
HIDDEN = RecomputeConfig.uniform(1, replay=Replay.HIDDEN)


def chunk_with(transport: Any, lanes: Any, rule: RecomputeConfig, delayed: bool) -> ModelChunk:
    order = get_order("multi_queue", rule.replay)
    return ModelChunk(
        Decoder(CONFIG, transport=transport), recompute=rule, order=order, delay_wgrad=delayed, lanes=lanes
    )


def microbatches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(32, (3, 1, 9), generator=generator)
    return [{"ids": row[:, :-1].contiguous(), "labels": row[:, 1:].contiguous()} for row in tokens]


def gradients(chunk: ModelChunk) -> dict[str, Tensor]:
    return {name: p.grad for name, p in chunk.named_parameters() if p.grad is not None}


def late_step(kind: type[WorkLanes], rule: RecomputeConfig, delayed: bool) -> tuple[ModelChunk, LateTransport]:
    works = Works()
    transport = LateTransport(works)
    chunk = chunk_with(transport, kind(works), rule, delayed)
    chunk.checked = True
    train_step(chunk, microbatches())
    return chunk, transport


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("rule", [RecomputeConfig.none(), RecomputeConfig.uniform(2), HIDDEN])
def test_every_result_is_there_when_it_is_read(rule: RecomputeConfig, delayed: bool) -> None:
    found, transport = late_step(WorkLanes, rule, delayed)
    expected = chunk_with(LocalTransport(), WorkLanes(Works()), rule, delayed)
    reference_step(expected, microbatches())
    wanted = gradients(expected)
    assert gradients(found).keys() == wanted.keys()
    assert all(same_bits(gradients(found)[name], wanted[name]) for name in wanted)
    assert all(work.done for work in transport.made)


def test_without_waiting_results_are_missing() -> None:
    """Negative control of the test above."""
    found, _ = late_step(Impatient, HIDDEN, False)
    assert any(not gradient.isfinite().all() for gradient in gradients(found).values())


def test_compute_runs_between_launch_and_wait() -> None:
    """While a transfer is under way the host issues compute slots, and its tensors are held."""
    works = Works()
    under_way: dict[str, int] = {}

    class Watch:
        def before(self, issue: Issue, owner: Owner) -> None:
            return

        def after(self, issue: Issue, owner: Owner) -> None:
            if issue.lane is Lane.COMPUTE and lanes._pending:
                key = f"{issue.slot.op.value}.{issue.slot.stage}"
                under_way[key] = under_way.get(key, 0) + 1
                assert sum(not work.done for work in transport.made) == len(lanes._pending)

    lanes = WorkLanes(works)
    transport = LateTransport(works)
    chunk = chunk_with(transport, lanes, HIDDEN, True)
    chunk.checked = True
    train_step(chunk, microbatches(), observers=(Watch(),))
    assert not lanes._pending
    # of 3 layers and 3 microbatches: always where both slots are in one plan, in pairs only where they are of two sides
    hidden = {stage: under_way[stage] for stage in ("N.shared", "W.experts", "B.experts", "R.attn")}
    assert hidden == {"N.shared": 9, "W.experts": 9, "B.experts": 6, "R.attn": 6}


def test_outside_such_lanes_a_collective_is_waited_for_at_once() -> None:
    works = Works()
    work = LateCopy(torch.ones(2), torch.empty(2))
    works.add(work, (work.source, work.target))
    assert work.done
    works.start()
    other = LateCopy(torch.ones(2), torch.empty(2))
    works.add(other, (other.source, other.target))
    assert not other.done
    (launched,) = works.stop()
    launched.work.wait()
    assert other.done


def test_a_transfer_of_a_transfer_waits_for_the_first() -> None:
    """Nothing orders two launches, so what reads a result that is under way waits for it."""
    works = Works()
    transport = LateTransport(works)

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))

        def program(self) -> Program:
            b = ProgramBuilder()
            x = b.input("x")
            with b.layer(0):
                (y,) = b.compute("attn", lambda x: x * self.weight, x, outputs=("y",), parameters=(self.weight,))
                (one,) = b.comm(
                    "first", transport.send, y, outputs=("one",), adjoint=lambda g, pinned: (transport.send(g[0]),)
                )
                (two,) = b.comm(
                    "second", transport.send, one, outputs=("two",), adjoint=lambda g, pinned: (transport.send(g[0]),)
                )
                (loss,) = b.compute("sum", torch.sum, two, outputs=("loss",))
            b.loss(loss)
            return b.build()

    twice = Twice()
    chunk = ModelChunk(twice, order="plain", lanes=WorkLanes(works))
    chunk.checked = True
    (losses,) = train_step(chunk, [{"x": torch.tensor([3.0, 4.0])}])
    assert losses["0.loss"].item() == 11.0
    assert twice.weight.grad is not None
    assert twice.weight.grad.tolist() == [3.0, 4.0]


def test_copies_of_a_chunk_share_their_lanes() -> None:
    lanes = WorkLanes(Works())
    assert copy.deepcopy(lanes) is lanes


def test_a_transfer_that_fails_leaves_none_behind() -> None:
    class Lost(LateCopy):
        def wait(self) -> bool:
            raise RuntimeError("connection closed")

    works = Works()
    lanes = WorkLanes(works)
    chunk = chunk_with(LateTransport(works), lanes, RecomputeConfig.none(), False)
    chunk.checked = True

    class Cut:
        def before(self, issue: Issue, owner: Owner) -> None:
            return

        def after(self, issue: Issue, owner: Owner) -> None:
            if issue.lane is Lane.COMM:
                # One stops the step, the next one the end of it, the last one would stop the step after.
                for _ in range(3):
                    lost = Lost(torch.ones(1), torch.ones(1))
                    lanes._pending.append((lanes._issued, Launched(cast(Any, lost), ())))

    with pytest.raises(RuntimeError, match="connection closed"):
        train_step(chunk, microbatches(), observers=(Cut(),))
    assert not lanes._pending
    for parameter in chunk.parameters():
        parameter.grad = None
    train_step(chunk, microbatches())
    wanted = chunk_with(LocalTransport(), WorkLanes(Works()), RecomputeConfig.none(), False)
    reference_step(wanted, microbatches())
    assert all(same_bits(gradients(chunk)[name], gradient) for name, gradient in gradients(wanted).items())


def test_after_a_launch_that_fails_nothing_is_collected() -> None:
    works = Works()

    class Broken(LateTransport):
        def send(self, rows: Tensor | None) -> Tensor | None:
            if len(self.made) == 3:
                raise RuntimeError("no route")
            return super().send(rows)

    chunk = chunk_with(Broken(works), WorkLanes(works), RecomputeConfig.none(), False)
    chunk.checked = True
    with pytest.raises(RuntimeError, match="no route"):
        train_step(chunk, microbatches())
    work = LateCopy(torch.ones(2), torch.empty(2))
    works.add(cast(Any, work), (work.source, work.target))
    assert work.done
