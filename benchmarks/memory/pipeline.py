"""Peak of every pipeline rank, without a GPU and in one process: `python -m benchmarks.memory.pipeline`.

Each rank's step runs on tensors without data, in a process group that only pretends (R18). Counted are all storages
born in the step, gradients left out. Compared are four ways to run DualPipeV: nothing recomputed; recomputed, with all
weight gradients put off as the schedule has it; with those of recomputed layers in place (R13); and with receive
buffers that live only while their microbatch is in flight. Beside each stands what the design's prototype, a toy
layer of the same sizes, reached on its worst rank.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from overlap.chunk import ModelChunk
from overlap.cli.report import console, print_json, table
from overlap.engine import Feeds
from overlap.ir import Op
from overlap.lanes import NullLanes
from overlap.memory.fake import zero_gradients
from overlap.memory.tracker import StorageTracker
from overlap.model import Decoder, ModelConfig
from overlap.model.cut import Border, Cut
from overlap.pipelining import Pipeline, ScheduleKind, make_layout, placement_of, train_pipeline
from overlap.pipelining.channels import Wire
from overlap.pipelining.compat import DrySchedule
from overlap.pipelining.schedules import OrderedSchedule
from recompute import RecomputeConfig

GIB = 2**30
MODEL = ModelConfig(
    layers=32, hidden=1024, heads=8, kv_rank=256, nope_dim=128, rope_dim=64, value_dim=128, experts=8, topk=1,
    expert_width=2048, shared_width=0, vocab=256, max_seq=2048,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to run the pipeline."""

    name: str
    recompute: RecomputeConfig
    pin: bool
    """Whether weight gradients of recomputed layers are put off too."""
    lazy: bool
    """Whether receive buffers live only while in use; else one per microbatch and channel, for good, as torch's do."""
    prototype: float
    """GiB of the prototype's worst rank."""


NONE, UNIFORM = RecomputeConfig.none(), RecomputeConfig.uniform(1)
WAYS = (
    Way(name="nothing recomputed", recompute=NONE, pin=False, lazy=False, prototype=5.0),
    Way(name="recomputed, W put off", recompute=UNIFORM, pin=True, lazy=False, prototype=2.8),
    Way(name="recomputed, W in place", recompute=UNIFORM, pin=False, lazy=False, prototype=0.95),
    Way(name="the same, buffers as needed", recompute=UNIFORM, pin=False, lazy=True, prototype=0.55),
)


class KeptWire(Wire):
    """A channel that holds a receive buffer for each microbatch from the first message on, as torch's stages do."""

    def __init__(self, peer: int, *, count: int, **settings: object) -> None:
        super().__init__(peer, **settings)  # type: ignore[arg-type]
        self._count = count
        self._kept: list[Tensor] = []

    def allocate(self, microbatch: int, shape: Sequence[int]) -> Tensor:
        """One of the buffers."""
        if not self._kept:
            self._kept = [super(KeptWire, self).allocate(number, shape) for number in range(self._count)]
        return self._kept[microbatch]


class DryRuntime(DrySchedule, OrderedSchedule):
    """A schedule that does not look for its neighbours first."""


def peak_of(way: Way, rank: int, pp: int, model: ModelConfig, microbatches: int) -> int:
    """Bytes at the peak of one rank's step."""
    kind = ScheduleKind.DUALPIPEV
    layout = make_layout(pp=pp, vpp=2, layers=model.layers, placement=placement_of(kind))
    lanes = NullLanes()

    def make(cut: Cut, border: Border) -> ModelChunk:
        module = Decoder(model, cut=cut, border=border, init=lambda module, seed: None)
        chunk = ModelChunk(module, recompute=way.recompute, delay_wgrad=True, lanes=lanes)
        chunk.checked = True  # the check looks at data
        return chunk

    wire: Callable[..., Wire] = Wire if way.lazy else partial(KeptWire, count=microbatches)
    dist.init_process_group("fake", rank=rank, world_size=pp, store=FakeStore())
    try:
        with FakeTensorMode():
            pipeline = Pipeline(
                layout, kind, make, group=None, lanes=lanes, dtype=torch.float32, device=torch.device("cpu"),
                pin_activations=way.pin, wire=wire, runtime=DryRuntime,
            )  # fmt: skip
            for chunk in pipeline.chunks:
                zero_gradients(chunk)
            ids = torch.zeros(1, model.max_seq, dtype=torch.int64)
            feeds: list[Feeds] = [{"ids": ids, "labels": ids} for _ in range(microbatches)]
            tracker = StorageTracker()
            # anything but CALL: between slots counts too
            tracker.current = Op.FORWARD
            with tracker:
                train_pipeline(pipeline, feeds)
        return tracker.slot_peak
    finally:
        dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory.pipeline", description=__doc__)
    parser.add_argument("--pp", type=int, default=4, metavar="N", help="pipeline ranks (default 4)")
    parser.add_argument("--microbatches", type=int, default=16, metavar="N", help="of a step (default 16)")
    parser.add_argument("--layers", type=int, default=MODEL.layers, metavar="N", help=f"default {MODEL.layers}")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help="which ranks (default all)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args(argv)
    model = replace(MODEL, layers=args.layers)
    ranks = list(range(args.pp)) if args.ranks is None else args.ranks
    peaks: dict[str, list[int]] = {}
    for way in WAYS:
        peaks[way.name] = [peak_of(way, rank, args.pp, model, args.microbatches) for rank in ranks]
        print(f"{way.name}: {peaks[way.name]}", file=sys.stderr)
    if args.json:
        print_json({"ranks": ranks, "peak_bytes": peaks, "prototype_gib": {way.name: way.prototype for way in WAYS}})
        return 0
    rows = [
        (way.name, *(f"{peak / GIB:.2f}" for peak in peaks[way.name]), f"{max(peaks[way.name]) / GIB:.2f}",
         f"{way.prototype:.2f}")
        for way in WAYS
    ]  # fmt: skip
    columns = ("GiB at the peak", *(f"rank {rank}" for rank in ranks), "worst", "prototype")
    title = f"DualPipeV, {args.pp} ranks, {args.microbatches} microbatches of {model.max_seq} tokens"
    console.print(table(title, columns, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
