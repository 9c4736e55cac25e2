"""Measuring a case on a GPU: activation peak, reserved memory, step time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from benchmarks.memory.cases import MICROBATCHES, PROXIES, SEQ, Case, Path, Wire
from overlap.chunk import ModelChunk
from overlap.contiguous import contiguous_step
from overlap.dispatch import LocalTransport, Transport
from overlap.dispatch.host_loopback import HostLoopback
from overlap.dispatch.sm_copy import SmCopy
from overlap.model import Decoder, ModelConfig
from overlap.orders import get_order
from overlap.step import train_step
from overlap.streams import StreamLanes

_MIB = 2**20
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
    """

    def __init__(self, proxy: str) -> None:
        self.config: ModelConfig = PROXIES[proxy]
        with DEVICE:
            self._model = Decoder(self.config, seed=0)
        self._model.to(DEVICE)
        for parameter in self._model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._lanes = StreamLanes(DEVICE)
        self.feeds = random_feeds(self.config.vocab)

    def chunk(self, case: Case) -> ModelChunk:
        """The model under a case's settings; all cases share its weights."""
        transport = transport_of(case)
        for layer in self._model.layers:
            if layer.is_moe:
                layer.transport = transport
        return ModelChunk(
            self._model,
            recompute=case.recompute,
            order=get_order(case.order, case.recompute.replay),
            delay_wgrad=case.delay_wgrad,
            lanes=self._lanes,
        )

    def step_of(self, case: Case) -> Callable[[], None]:
        """A call that runs one step of a case."""
        chunk = self.chunk(case)
        run = train_step if case.path is Path.OVERLAP else contiguous_step

        def step() -> None:
            run(chunk, self.feeds)

        return step

    def measure(self, case: Case, steps: int = 5) -> Measured:
        """Two steps to warm up, then `steps` measured ones."""
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

    def paired(self, cases: Sequence[Case], rounds: int = 9) -> list[Measured]:
        """Step times of several cases, measured in turns so that drift hits all alike."""
        steps = [self.step_of(case) for case in cases]
        for step in steps:
            step()
            step()
        times: list[list[float]] = [[] for _ in cases]
        for _ in range(rounds):
            for place, step in enumerate(steps):
                times[place].append(timed(step))
        return [
            Measured(name=case.name, activation_peak=0.0, reserved=0.0, step=median(t), steps=tuple(t))
            for case, t in zip(cases, times, strict=True)
        ]


def timed(step: Callable[[], None]) -> float:
    """Milliseconds of one call, the device's work included."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def random_feeds(vocab: int) -> list[Feeds]:
    """The microbatches of one step."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> Feeds:
        tokens = torch.randint(vocab, (1, SEQ + 1), generator=generator).to(DEVICE)
        return {"ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    return [draw() for _ in range(MICROBATCHES)]
