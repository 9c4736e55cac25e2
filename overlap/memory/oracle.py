"""The oracle: the highest point of a whole step, every temporary included, without running it; and its measurement.

Prediction: each stage's slots run once on fake tensors and leave a trace; the plans say who else holds what dies there.
Measurement: the CPU allocator's own events.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from torch.profiler import ProfilerActivity, profile

from overlap.check import check_stages
from overlap.chunk import ModelChunk, check_chunk
from overlap.engine import Feeds
from overlap.memory.bins import Highest
from overlap.memory.facts import Footprint
from overlap.memory.fake import fake_chunk, zero_gradients
from overlap.memory.gap import gaps_of
from overlap.memory.predict import Walk, footprints_of
from overlap.step import step_plans, train_step
from overlap.step_feeds import check_feeds


def predict_peak(build: Callable[[], ModelChunk], microbatches: Sequence[Feeds]) -> Highest:
    """The slot where a CPU step holds most, and what it then holds.

    Exact for float32 and float64. In bfloat16 some CPU kernels take scratch memory that depends on the processor.

    Args:
        build: Makes the chunk; called under FakeTensorMode: it must not look at tensor data.
        microbatches: Of the step; only shapes and types are used.

    Raises:
        ConfigError: The microbatches do not feed the program.
        ProgramError: A stage keeps memory that no table of the engine holds.
    """
    with fake_chunk(build) as chunk:
        check_feeds(chunk.program, microbatches)
        return highest_of(chunk, footprints_of(chunk, microbatches, constants=True))


def highest_of(chunk: ModelChunk, footprints: Sequence[Footprint], *, streams: bool = False) -> Highest:
    """The highest point of a step.

    Args:
        chunk: Gives plans and configs; a fake chunk serves.
        footprints: Of each microbatch, in order; taken with the chunk's setting of `delay_wgrad`.
        streams: Whether lanes are streams, which hold each other's memory (StreamLanes).
    """
    gaps = gaps_of(chunk, len(footprints))
    ranks = 1 if chunk.shards is None else chunk.shards.ranks
    walk = Walk(footprints, gaps, delayed=chunk.delay_wgrad, ranks=ranks, streams=streams)
    walk.run(step_plans(chunk, len(footprints)))
    walk.finish()
    return max((*walk.tops, _end_of_step(chunk, walk)), key=lambda top: top.bytes)


def _end_of_step(chunk: ModelChunk, walk: Walk) -> Highest:
    """While effects are applied the step keeps copies of all buffers, for the case that one fails."""
    stages, moving = chunk.program.stages, chunk.program.step_states
    changes = any(stage.effects for stage in stages) or moving
    copies = sum(buffer.numel() * buffer.element_size() for buffer in chunk.module.buffers()) if changes else 0
    return Highest(slot="end of step", bytes=walk.live + copies)


def measure_peak(chunk: ModelChunk, microbatches: Sequence[Feeds]) -> int:
    """Run one training step and return the highest sum of the CPU allocator's allocations less its frees, in bytes.

    Feeds, parameters, their `.grad` and buffers are there before and do not count.
    """
    check_chunk(chunk)
    chunk.bind_replaced()
    check_feeds(chunk.program, microbatches)
    zero_gradients(chunk)
    # Here, so that tables which a stage makes at its first call do not count as the step's.
    check_stages(chunk, microbatches[0])
    chunk.checked = True
    return allocator_peak(lambda: train_step(chunk, microbatches))


def allocator_peak(run: Callable[[], object]) -> int:
    """Highest sum of what the CPU allocator gives out, less what it takes back, while a call runs; bytes.

    What the call returns must be small: it counts until the profiler stops.
    """
    with ExitStack() as stack:
        with warnings.catch_warnings():
            # torch 2.11 warns that a later cycle would drop the events of this one; there is one. What it asks for,
            # acc_events, takes three times as long.
            warnings.filterwarnings("ignore", message=".*Profiler clears events")
            profiler = stack.enter_context(profile(activities=[ProfilerActivity.CPU], profile_memory=True))
        run()
    results = profiler.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    level = top = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        top = max(top, level)
    return top
