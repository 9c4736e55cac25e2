"""Verify on several ranks, many cases in one start.

`torchrun --standalone --nproc-per-node 2 -m tests.gpu.ranks_sweep` prints a line per case; exit status 1 if one is not
as it should be. NCCL where every rank has a GPU of its own; ranks that share one go through gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from overlap import ModelChunk, get_order, reference_step, train_step
from overlap.contiguous import contiguous_step
from overlap.controls import make_control
from overlap.dispatch import Transport
from overlap.dispatch.all_to_all import AllToAll
from overlap.dispatch.symmetric_memory import MappedPeers, SymmetricMemory, mapped_peers
from overlap.engine import Engine
from overlap.model import Decoder, ModelConfig
from overlap.model.routes import fix_route
from overlap.parallel.agree import gather
from overlap.parallel.attach import DataSettings, make_parallel
from overlap.parallel.collective_log import NoLog
from overlap.parallel.layout import ParallelLayout
from overlap.parallel.works import Works
from overlap.parallel.world import World, close_world, launched_processes, open_world
from overlap.streams import StreamLanes
from overlap.verify import merged, verify
from tests.gpu.conftest import BACKEND
from tests.gpu.ranks_cases import CASES, Case
from tests.gpu.test_verify import RULES, SHAPE, LateComm, LateCompute

MICROBATCHES, STEPS = 4, 2
LANES = {"plain": StreamLanes, "late_comm": LateComm, "late_compute": LateCompute}
STEPS_OF = {"reference": reference_step, "contiguous": contiguous_step}
DATA: dict[str, Callable[[ModelChunk], ModelChunk]] = {
    "none": lambda chunk: chunk,
    "replicas": make_parallel,
    "fsdp": partial(make_parallel, settings=DataSettings(fsdp=True, reduce_dtype=torch.float32)),
}
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}
"""Read when cuBLAS, NCCL and symmetric memory start; the last lets ranks share a GPU."""
Batches = list[list[dict[str, Tensor]]]


class UnorderedPeers(MappedPeers):
    """Control: rank 1 is late, and nobody waits for it."""

    def put(self, rank: int, at: int, source: Tensor) -> None:
        """Sleep first."""
        if dist.get_rank():
            torch.cuda._sleep(5_000_000)
        super().put(rank, at, source)

    def barrier(self) -> None:
        """Go on."""


class Transports:
    """The transports of this start: one of each kind serves all cases."""

    def __init__(self, world: World, timeout: timedelta) -> None:
        group = world.ep_group
        self._open_unordered = partial(UnorderedPeers, group, world.device, timeout)
        self._group = group
        self._made: dict[str, Transport] = {
            "all_to_all": AllToAll(group, Works(), NoLog()),
            "symmetric_memory": SymmetricMemory(group, NoLog(), mapped_peers(group, world.device, timeout)),
        }

    def of(self, case: Case) -> Transport:
        """The transport that a case names."""
        if case.broken == "no_barrier":
            return SymmetricMemory(self._group, NoLog(), self._open_unordered)
        return self._made[case.transport]


def make_chunk(case: Case, world: World, config: ModelConfig, transport: Transport) -> ModelChunk:
    """The model and its settings."""
    model = Decoder(config, transport=transport, seed=0)
    if case.first_rank:
        fix_route(model, case.experts_per_rank)
    rule = RULES[case.rule]
    return ModelChunk(
        model.to(world.device),
        recompute=rule,
        order=get_order(case.order, rule.replay),
        delay_wgrad=case.delay_wgrad,
        lead=case.lead,
        lanes=LANES[case.lanes](world.device),
        world=world,
    )


def draw(case: Case, world: World, config: ModelConfig) -> Batches:
    """The data of a rank."""
    generator = torch.Generator().manual_seed(1 + world.data_rank)
    length = case.lengths[world.data_rank % len(case.lengths)]

    def one() -> dict[str, Tensor]:
        tokens = torch.randint(config.vocab, (2, length + 1), generator=generator).to(world.device)
        return {"ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    return [[one() for _ in range(MICROBATCHES)] for _ in range(STEPS)]


def backend_of(world: World) -> str:
    """As `cpu:gloo,cuda:nccl`."""
    return str(dist.get_backend_config(world.ep_group))


def step_without_waits(chunk: ModelChunk, data: Batches) -> None:
    """A step in which waiting for the device raises.

    Raises:
        RuntimeError: The host waits.
    """
    train_step(chunk, data[0])  # checks the stages once, and makes the buffers
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_step(chunk, data[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run(case: Case, world: World, transports: Transports) -> dict[str, Any]:
    """Verify on all ranks; what came of it, the same on all."""
    if case.data == "fsdp" and "nccl" not in backend_of(world):
        return {"name": case.name, "ok": True, "skipped": "ranks share a GPU, and gloo has no reduce-scatter there"}
    begin = time.perf_counter()
    experts = case.experts_per_rank * world.layout.ep
    config = ModelConfig(layers=4, dtype=case.dtype, **{**SHAPE, "experts": experts, **case.model})
    try:
        chunk = make_chunk(case, world, config, transports.of(case))
        engine: Any = Engine
        if case.broken and case.broken != "no_barrier":
            engine = make_control(case.broken, chunk, MICROBATCHES).engine_type
        data = draw(case, world, config)
        own: Any = verify(chunk, data, engine_type=engine, reference=STEPS_OF[case.against], prepare=DATA[case.data])
        # gloo moves a GPU's rows through the host, which waits for them
        if case.never_waits and (case.transport == "symmetric_memory" or "nccl" in backend_of(world)):
            step_without_waits(chunk, data)
    except Exception as error:  # the other cases still count
        own = f"rank {world.rank}: {type(error).__name__}: {error}"
    everyone = gather(world, own)
    raised = [item for item in everyone if isinstance(item, str)]
    seconds = round(time.perf_counter() - begin, 1)
    if raised:
        return {"name": case.name, "ok": False, "raised": raised, "seconds": seconds}
    verdict = merged(everyone)
    return {
        "name": case.name,
        "ok": verdict.equal == (not case.broken),
        "equal": verdict.equal,
        "gradients": verdict.gradients.compared,
        "different": [*verdict.gradients.different, *verdict.buffers.different],
        "loss_equal": verdict.loss_equal,
        "rng_equal": verdict.rng_equal,
        "segments_alive": verdict.max_live_segments,
        "seconds": seconds,
    }


def line_of(result: dict[str, Any]) -> str:
    """One line."""
    if "skipped" in result:
        return f"skip {result['name']:60s} {result['skipped']}"
    if "raised" in result:
        found = f"raised: {' | '.join(result['raised'])}"
    else:
        found = f"{'equal' if result['equal'] else 'different'}, {result['gradients']} gradients"
        found += f", {len(result['different'])} tensors differ" if result["different"] else ""
    return f"{'ok' if result['ok'] else 'FAIL':4s} {result['name']:60s} {found} ({result['seconds']} s)"


def facts(world: World) -> dict[str, Any]:
    """What the results depend on."""
    return {
        "ranks": world.size,
        "devices": torch.cuda.device_count(),
        "device": torch.cuda.get_device_name(),
        "backend": backend_of(world),
        "torch": torch.__version__,
        "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset"),
    }


def main() -> int:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases whose name matches, as *hidden*")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="of collectives and barriers")
    args = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    ranks, timeout = launched_processes(), timedelta(seconds=args.timeout)
    world = open_world(ParallelLayout(world_size=ranks, ep=ranks), "cuda", timeout)
    torch.use_deterministic_algorithms(True)
    transports = Transports(world, timeout)
    results = []
    if not world.rank:
        print(facts(world), flush=True)
    with sdpa_kernel(BACKEND):
        for case in CASES:
            if fnmatch(case.name, args.only):
                results.append(run(case, world, transports))
                if not world.rank:
                    print(line_of(results[-1]), flush=True)
    well = sum(result["ok"] for result in results)
    status = 0 if results and well == len(results) else 1
    if not world.rank:
        print(f"{well} of {len(results)} as they should be", flush=True)
        if args.json:
            payload = {"facts": facts(world), "cases": results}
            Path(args.json).write_text(json.dumps(payload, indent=1) + "\n")
    # torchrun ends all ranks when the first one leaves with a failure
    gather(world, status)
    close_world()
    return status


if __name__ == "__main__":
    sys.exit(main())
