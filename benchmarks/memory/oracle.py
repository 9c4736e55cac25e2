"""The oracle beside a GPU: predicted and measured peak of every overlapped case, and of every kind of memory.

Predicted on fake tensors, without the GPU: `python -m benchmarks.memory.oracle` prints that column alone.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.memory.cases import MICROBATCHES, PROXIES, SEQ, Case, Path, memory_cases
from benchmarks.memory.measure import Bench
from overlap.chunk import ModelChunk
from overlap.memory import (
    Bin,
    MemoryRecorder,
    StorageTracker,
    fake_chunk,
    gaps_of,
    predict_step,
    take_footprint,
)
from overlap.memory.facts import Footprint
from overlap.memory.oracle import highest_of
from overlap.model import Decoder, ModelConfig
from overlap.planning.chunks import ChunkShape
from overlap.planning.device_kernels import INSIDE, DeviceKernels, register_flops
from overlap.planning.survey import CUDA_BLOCK, distinct_layers, spread, stand_in
from overlap.step import train_step

_MIB = 2**20
GRANULES = (1, CUDA_BLOCK)
"""What tensors say of themselves, and what the allocator gives out."""
TOLERANCE = 0.03
"""Share by which a prediction may miss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """One case, in MiB."""

    name: str
    peak: float
    """Highest point of the step, in-slot temporaries included, each allocation rounded up to 512 bytes."""
    bins: dict[str, float]
    """Highest border of each kind."""


def overlapped() -> list[Case]:
    """The cases that plans describe."""
    return [case for case in memory_cases() if case.path is Path.OVERLAP]


class Oracle:
    """Predictions for one proxy; its layers are alike, so that two of them stand for all.

    Args:
        proxy: Name of its shape.

    Attributes:
        footprints: By granule.
    """

    def __init__(self, proxy: str) -> None:
        register_flops()
        self._config = PROXIES[proxy]
        shape = ChunkShape(dense=0, moe=self._config.layers, first=True, last=True)
        few = distinct_layers(shape)
        layers = partial(stand_in, shape, few)
        with fake_chunk(lambda: _chunk(self._config, few.layers)) as chunk, DeviceKernels():
            found = {granule: take_footprint(chunk, _feeds(), granule=granule, inside=INSIDE) for granule in GRANULES}
        with fake_chunk(lambda: _chunk(self._config, shape.layers)) as chunk:
            self.footprints: dict[int, Footprint] = {
                granule: spread(one, chunk.program, layers) for granule, one in found.items()
            }
            self._module = chunk.module

    def chunk(self, case: Case) -> ModelChunk:
        """The model under a case's settings, without data."""
        return ModelChunk(
            self._module,
            recompute=case.recompute,
            order=case.issue_order,
            delay_wgrad=case.delay_wgrad,
            lead=case.lead,
        )

    def predict(self, case: Case) -> Predicted:
        """One case."""
        chunk = self.chunk(case)
        exact, rounded = ([self.footprints[granule]] * MICROBATCHES for granule in (1, CUDA_BLOCK))
        bins = predict_step(chunk, exact, streams=True).peaks.bins
        return Predicted(
            name=case.name,
            peak=highest_of(chunk, rounded, streams=True).bytes / _MIB,
            bins={kind.value: bins[kind] / _MIB for kind in Bin},
        )


def oracle() -> list[dict[str, Any]]:
    """Predict and measure every overlapped case; needs a GPU."""
    rows = []
    for proxy in PROXIES:
        predictions, bench = Oracle(proxy), Bench(proxy)
        for case in overlapped():
            if case.proxy == proxy:
                rows.append(compare(predictions.predict(case), *_measure(bench, case)))
                print("\n".join(lines(rows[-1])), flush=True)
        del bench
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def _measure(bench: Bench, case: Case) -> tuple[float, dict[str, float]]:
    """Highest allocated above what was there before the step, and the highest border of each kind; MiB."""
    step: Callable[[], None] = bench.step_of(case)
    step()
    step()
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = (torch.cuda.max_memory_allocated() - before) / _MIB
    chunk = bench.chunk(case)
    with StorageTracker() as tracker:
        recorder = MemoryRecorder(tracker, gaps_of(chunk, MICROBATCHES))
        train_step(chunk, bench.feeds, observers=(recorder,))
    bins = recorder.usage.peaks.bins
    return peak, {kind.value: bins[kind] / _MIB for kind in Bin}


def compare(predicted: Predicted, peak: float, bins: dict[str, float]) -> dict[str, Any]:
    """The row of one case.

    Args:
        predicted: Its prediction.
        peak: Measured, MiB.
        bins: Measured, MiB by kind.
    """
    ratios = {kind: predicted.bins[kind] / bins[kind] for kind in bins if bins[kind]}
    missing = [kind for kind in bins if not bins[kind] and predicted.bins[kind]]
    close = all(abs(ratio - 1) <= TOLERANCE for ratio in [*ratios.values(), predicted.peak / peak])
    return {
        "name": predicted.name,
        "activation_peak": peak,
        "predicted_peak": predicted.peak,
        "peak_ratio": predicted.peak / peak,
        "bins": bins,
        "predicted_bins": predicted.bins,
        "bin_ratios": ratios,
        "within": close and not missing,
    }


def lines(row: dict[str, Any]) -> Iterator[str]:
    """A row as text; with every kind of memory where the prediction misses."""
    figures = f"measured {row['activation_peak']:8.1f} MiB  predicted {row['predicted_peak']:8.1f}"
    worst = max((abs(ratio - 1) for ratio in row["bin_ratios"].values()), default=0.0)
    yield f"{row['name']:60s} {figures}  ratio {row['peak_ratio']:.4f}  worst bin {worst:.2%} off"
    if row["within"]:
        return
    for kind, measured in row["bins"].items():
        predicted = row["predicted_bins"][kind]
        if measured or predicted:
            ratio = row["bin_ratios"].get(kind, float("inf"))
            yield f"    {kind:16s} measured {measured:8.2f}  predicted {predicted:8.2f}  ratio {ratio:.4f}"


def _chunk(config: ModelConfig, layers: int) -> ModelChunk:
    return ModelChunk(Decoder(replace(config, layers=layers), init=lambda model, seed: None))


def _feeds() -> dict[str, Tensor]:
    tokens = torch.zeros(1, SEQ, dtype=torch.int64)
    return {"ids": tokens, "labels": tokens.clone()}


def main(names: Iterable[str]) -> int:
    """Print the predicted column."""
    for proxy in names:
        predictions = Oracle(proxy)
        for case in overlapped():
            if case.proxy == proxy:
                print(f"{case.name:60s} predicted {predictions.predict(case).peak:8.1f} MiB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or PROXIES))
