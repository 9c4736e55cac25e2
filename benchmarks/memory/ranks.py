"""Experts over several GPUs: `torchrun --nproc-per-node 2 -m benchmarks.memory.ranks --out benchmarks/memory/results`.

Step time, throughput, activation peak of every rank, and how much communication has no compute beside it, over NCCL's
all-to-all and over copy engines. Expert parallelism alone: gradients of what ranks hold in common are not reduced.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path as FilePath
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import sdpa_kernel

from benchmarks.memory.cases import MICROBATCHES, PROXIES, SEQ, Case, Path, Wire, rank_cases
from benchmarks.memory.measure import DEVICE, Feeds, init_on_device, random_feeds, timed
from benchmarks.memory.run import BACKEND, environment
from overlap.chunk import ModelChunk
from overlap.contiguous import contiguous_step
from overlap.dispatch import Transport
from overlap.dispatch.all_to_all import AllToAll
from overlap.dispatch.symmetric_memory import SymmetricMemory, mapped_peers
from overlap.ir import Lane
from overlap.model import Decoder, ModelConfig, MoELayer
from overlap.observe import TimedLanes
from overlap.parallel.agree import gather
from overlap.parallel.layout import ParallelLayout
from overlap.parallel.works import Works
from overlap.parallel.world import World, close_world, launched_processes, open_world
from overlap.simulate import exposure
from overlap.step import train_step
from overlap.streams import StreamLanes

_MIB = 2**20
WIRES = (Wire.ALL_TO_ALL, Wire.SYMMETRIC_MEMORY)
TIMEOUT = timedelta(minutes=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One case on all ranks. Memory in MiB, time in milliseconds."""

    name: str
    step: float
    """Median over rounds of the slowest rank's step."""
    tokens_per_second: float
    """Of all ranks together."""
    steps: tuple[tuple[float, ...], ...]
    """By round, then rank."""
    activation_peaks: tuple[float, ...]
    """By rank: highest allocated less what was allocated before the step (weights, gradients, buffers)."""
    reserved: tuple[float, ...]
    """By rank: reserved by the caching allocator, over all cases so far."""


class RankBench:
    """One model over the ranks of a world, run in many ways.

    Args:
        world: The ranks.
        proxy: Name of its shape.
        seq: Tokens of a sequence.
    """

    def __init__(self, world: World, proxy: str, seq: int) -> None:
        self._world = world
        self._seq = seq
        group = world.ep_group
        self.copies = SymmetricMemory(
            group, world.collectives, mapped_peers(group, world.device, TIMEOUT)
        )  # fmt: skip
        self._transports: dict[Wire, Transport] = {
            Wire.ALL_TO_ALL: AllToAll(group, Works(), world.collectives),
            Wire.SYMMETRIC_MEMORY: self.copies,
        }
        self.config: ModelConfig = PROXIES[proxy]
        with DEVICE:
            self._model = Decoder(self.config, transport=self.copies, seed=0, init=init_on_device)
        self._model.to(world.device)
        for parameter in self._model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._lanes = StreamLanes(world.device)
        self._feeds: list[Feeds] = random_feeds(self.config.vocab, seq, world.rank)

    def chunk(self, case: Case) -> ModelChunk:
        """The model under a case's settings; all cases share its weights."""
        for layer in self._model.layers:
            if isinstance(layer, MoELayer):
                layer.transport = self._transports[case.wire]
        return ModelChunk(
            self._model,
            recompute=case.recompute,
            order=case.order,
            delay_wgrad=case.delay_wgrad,
            lead=case.lead,
            lanes=self._lanes,
            world=self._world,
        )

    def step_of(self, case: Case) -> Callable[[], object]:
        """A call that runs one step of a case."""
        chunk = self.chunk(case)
        run = train_step if case.path is Path.OVERLAP else contiguous_step
        return lambda: run(chunk, self._feeds)

    def measure(self, cases: Sequence[Case], rounds: int) -> list[Measured]:
        """All cases in turns, so that drift hits all alike; each after two steps to warm up."""
        steps = [self.step_of(case) for case in cases]
        for step in steps:
            step()
            step()
        gc.collect()
        seen: list[list[tuple[float, float, float]]] = [[] for _ in cases]
        for number in range(rounds):
            # each round starts elsewhere, so that no case always follows the same one
            for place in (*range(number % len(steps), len(steps)), *range(number % len(steps))):
                seen[place].append(self._once(steps[place]))
        everyone: list[list[list[tuple[float, float, float]]]] = gather(self._world, seen)
        return [self._summary(case, [rank[place] for rank in everyone]) for place, case in enumerate(cases)]

    def _once(self, step: Callable[[], object]) -> tuple[float, float, float]:
        """Milliseconds, activation peak and reserved memory of one step that all ranks begin together."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        dist.barrier(self._world.formed.everyone)
        milliseconds = timed(step)
        peak = (torch.cuda.max_memory_allocated() - before) / _MIB
        return milliseconds, peak, torch.cuda.max_memory_reserved() / _MIB

    def _summary(self, case: Case, ranks: list[list[tuple[float, float, float]]]) -> Measured:
        rounds = tuple(tuple(rank[number][0] for rank in ranks) for number in range(len(ranks[0])))
        step = median(max(times) for times in rounds)
        return Measured(
            name=case.name,
            step=step,
            tokens_per_second=self._world.size * MICROBATCHES * self._seq / step * 1e3,
            steps=rounds,
            activation_peaks=tuple(max(peak for _, peak, _ in rank) for rank in ranks),
            reserved=tuple(max(reserved for _, _, reserved in rank) for rank in ranks),
        )

    def exposed(self, case: Case) -> dict[str, Any]:
        """Communication of a recorded step of this rank, and how much of it has no compute beside it."""
        chunk = self.chunk(case)
        lanes = TimedLanes(self._world.device)
        chunk.lanes = lanes
        for _ in range(2):
            dist.barrier(self._world.formed.everyone)
            lanes.forget()
            train_step(chunk, self._feeds)
        timeline = lanes.timeline(case.name)
        found = exposure(timeline, 0.0, timeline.end, ())
        total = timeline.busy(Lane.COMM, 0.0, timeline.end)
        alone = sum(found.exposed.values())
        return {
            "name": case.name,
            "step": timeline.end,
            "communication": total,
            "exposed": alone,
            "exposed_share": alone / total if total else 0.0,
            "exposed_by_kind": dict(found.exposed),
            "compute_idle": found.compute_idle,
        }


def report(results: Sequence[Measured]) -> None:
    """A line a case."""
    for result in results:
        peaks = " ".join(f"{peak:.0f}" for peak in result.activation_peaks)
        speed = f"{result.step:8.1f} ms  {result.tokens_per_second:9.0f} tokens/s  of first"
        print(f"{result.name:72s} {speed} {result.step / results[0].step:.3f}  peaks {peaks} MiB", flush=True)


def run(world: World, proxy: str, seq: int, rounds: int, wires: Sequence[Wire]) -> dict[str, Any]:
    """All measurements."""
    bench = RankBench(world, proxy, seq)
    cases = [case for wire in wires for case in rank_cases(proxy, wire)]
    measured = bench.measure(cases, rounds)
    if not world.rank:
        report(measured)
    recorded = []
    for case in cases:
        if case.path is Path.OVERLAP:
            recorded.append({"ranks": gather(world, bench.exposed(case))})
            if not world.rank:
                shares = " ".join(f"{rank['exposed_share']:.1%}" for rank in recorded[-1]["ranks"])
                print(f"{case.name:72s} communication exposed, by rank: {shares}", flush=True)
    return {
        "measured": [asdict(result) for result in measured],
        "exposed": recorded,
        "symmetric_buffer_mib": bench.copies.nbytes / _MIB,
    }


def main() -> int:
    """Measure, and write one JSON file on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="benchmarks/memory/results", metavar="DIR")
    parser.add_argument("--tag", default="", help="added to the file's name")
    parser.add_argument("--proxy", choices=PROXIES, default="proxy-8")
    parser.add_argument("--seq", type=int, default=SEQ, metavar="N", help="tokens of a sequence; fewer to try it out")
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="steps of each case (default 4)")
    parser.add_argument("--wires", choices=WIRES, nargs="+", type=Wire, default=WIRES)
    args = parser.parse_args()
    # NVLink multicast stays off: a program that uses it can put a host's GPUs out of service.
    for name, value in (("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")):
        os.environ.setdefault(name, value)
    ranks = launched_processes()
    world = open_world(ParallelLayout(world_size=ranks, ep=ranks), "cuda", TIMEOUT)
    payload: dict[str, Any] = {
        "environment": {
            **environment(f"torchrun --nproc-per-node {ranks} -m benchmarks.memory.ranks"),
            "ranks": ranks,
            "devices": torch.cuda.device_count(),
            "backend": str(dist.get_backend_config(world.ep_group)),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]  # torch's
            "seq": args.seq,
        }
    }
    with sdpa_kernel(BACKEND):
        payload |= run(world, args.proxy, args.seq, args.rounds, args.wires)
    if not world.rank:
        folder = FilePath(args.out)
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"ranks_{ranks}{args.tag}.json"
        target.write_text(json.dumps(payload, indent=1) + "\n")
        print(f"wrote {target}")
    close_world()
    return 0


if __name__ == "__main__":
    sys.exit(main())
