"""Measuring a case on a GPU: activation peak, reserved memory, step time."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn

from benchmarks.memory.cases import MICROBATCHES, PROXIES, SEQ, Case, Path, Wire
from overlap.chunk import ModelChunk
from overlap.contiguous import contiguous_step
from overlap.cuda_graph import WARM_UP, GraphedStep
from overlap.dispatch import LocalTransport, Transport
from overlap.dispatch.host_loopback import HostLoopback
from overlap.dispatch.sm_copy import SmCopy
from overlap.ir import Lane
from overlap.model import Decoder, ModelConfig, MoELayer
from overlap.observe import TimedLanes, graph_event
from overlap.step import step_plans, train_step
from overlap.streams import StreamLanes
from overlap.timeline import Timeline

_MIB = 2**20
_SHORT = 64
"""Tokens of a sequence whose kernels take less time than their launch."""
DEVICE = torch.device("cuda")
Feeds = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One case, measured. Memory in MiB, time in milliseconds."""

    name: str
    activation_peak: float
    """Highest allocated less weights and gradients."""
    reserved: float
    """Highest reserved by the caching allocator, all of it."""
    step: float
    """Median step."""
    steps: tuple[float, ...]


def transport_of(case: Case) -> Transport:
    """The transport that a case names."""
    makers: dict[Wire, Callable[[], Transport]] = {
        Wire.LOCAL: LocalTransport,
        Wire.HOST_LOOPBACK: lambda: HostLoopback(case.wire_scale),
        Wire.SM_COPY: lambda: SmCopy(rounds=max(round(case.wire_scale), 1)),
    }
    return makers[case.wire]()


class Bench:
    """One model on the GPU, run in many ways.

    Args:
        proxy: Name of its shape.
        batch: Sequences of a microbatch.
    """

    def __init__(self, proxy: str, batch: int = 1) -> None:
        self.config: ModelConfig = PROXIES[proxy]
        with DEVICE:
            self._model = Decoder(self.config, seed=0, init=init_on_device)
        self._model.to(DEVICE)
        for parameter in self._model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._lanes = StreamLanes(DEVICE)
        self.batch = batch
        self.feeds = random_feeds(self.config.vocab, batch=batch)

    def chunk(self, case: Case) -> ModelChunk:
        """The model under a case's settings; all cases share its weights."""
        transport = transport_of(case)
        for layer in self._model.layers:
            if isinstance(layer, MoELayer):
                layer.transport = transport
        return ModelChunk(
            self._model,
            recompute=case.recompute,
            order=case.issue_order,
            delay_wgrad=case.delay_wgrad,
            lead=case.lead,
            lanes=self._lanes,
        )

    def step_of(self, case: Case) -> Callable[[], None]:
        """A call that runs one step of a case."""
        return self._step_on(self.chunk(case), case)

    def _step_on(self, chunk: ModelChunk, case: Case) -> Callable[[], None]:
        run = train_step if case.path is Path.OVERLAP else contiguous_step
        graphed = GraphedStep(chunk, run) if case.graph else partial(run, chunk)

        def step() -> None:
            graphed(self.feeds)

        return step

    def measure(self, case: Case, steps: int = 3) -> Measured:
        """Two steps to warm up, then `steps` measured ones; a CUDA graph is recorded in the first of these."""
        step = self.step_of(case)
        step()
        step()
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        fixed = sum(p.nbytes * 2 for p in self._model.parameters())
        torch.cuda.reset_peak_memory_stats()
        times = [timed(step) for _ in range(steps)]
        return Measured(
            name=case.name,
            activation_peak=(torch.cuda.max_memory_allocated() - fixed) / _MIB,
            reserved=torch.cuda.max_memory_reserved() / _MIB,
            step=median(times),
            steps=tuple(times),
        )

    def forward_working_set(self) -> Measured:
        """Peak of one MoE layer's forward without a graph, above its input."""
        program = self.chunk(Case(proxy="")).program
        hidden = torch.randn(1, SEQ, self.config.hidden, device=DEVICE, dtype=torch.bfloat16)
        stages = program.layer_stages[self.config.layers - 1]
        values: dict[str, object] = {stages[0].reads[0]: hidden}
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            for stage in stages:
                result = stage.forward(
                    *(values[name] for name in stage.reads), **({"pinned": None} if stage.pins else {})
                )
                values.update(zip(stage.writes, result if len(stage.writes) > 1 else (result,), strict=True))
        peak = (torch.cuda.max_memory_allocated() - before) / _MIB
        return Measured(name="one layer's forward working set", activation_peak=peak, reserved=0.0, step=0.0, steps=())

    def communication_ms(self, case: Case) -> float:
        """A step's communication alone: its trips one after another, nothing beside them."""
        chunk = self.chunk(case)
        trips = [
            issue for plan, _ in step_plans(chunk, MICROBATCHES) for issue in plan.issues if issue.lane is Lane.COMM
        ]
        rows = torch.randn(self.batch * SEQ * self.config.topk, self.config.hidden, device=DEVICE, dtype=torch.bfloat16)
        transport = HostLoopback(case.wire_scale)

        def run() -> None:
            for _ in trips:
                transport.round_trip(rows)

        run()
        return median([timed(run) for _ in range(3)])

    def record(self, case: Case) -> Timeline:
        """A step of a case, slot by slot."""
        lanes = TimedLanes(DEVICE, event=graph_event if case.graph else None)
        chunk = self.chunk(case)
        chunk.lanes = lanes
        step = self._step_on(chunk, case)
        for _ in range(WARM_UP + 1):
            lanes.forget()
            step()
        if case.graph:  # the launch after the one that follows the recording
            step()
        return lanes.timeline(case.name)

    def host_ms(self, case: Case) -> tuple[int, float]:
        """Slots of a step, and the milliseconds that the host takes to issue them (median of 5).

        On short sequences: with long ones the host waits for room in the launch queue, which is the device's time.
        """
        chunk = self.chunk(case)
        feeds = random_feeds(self.config.vocab, _SHORT)
        slots = sum(len(plan.issues) for plan, _ in step_plans(chunk, MICROBATCHES))
        times = []
        for _ in range(7):
            torch.cuda.synchronize()
            begin = perf_counter()
            train_step(chunk, feeds)
            times.append((perf_counter() - begin) * 1e3)
        torch.cuda.synchronize()
        return slots, median(times[2:])


@torch.no_grad()
def init_on_device(model: nn.Module, seed: int) -> None:
    """Fill the parameters on the device itself: billions of them take minutes on a CPU."""
    torch.cuda.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=parameter.shape[1] ** -0.5)


def timed(step: Callable[[], object]) -> float:
    """Milliseconds of one call, the device's work included."""
    begin, end = torch.Event(DEVICE, enable_timing=True), torch.Event(DEVICE, enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def random_feeds(vocab: int, seq: int = SEQ, seed: int = 0, batch: int = 1) -> list[Feeds]:
    """The microbatches of one step, each a sequence of `seq` tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Feeds:
        tokens = torch.randint(vocab, (batch, seq + 1), generator=generator).to(DEVICE)
        return {"ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    return [draw() for _ in range(MICROBATCHES)]
