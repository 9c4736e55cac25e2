"""Does an arm of a comparison reproduce itself? Before two arms are compared, each is run twice (R3)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from overlap.chunk import ModelChunk
from overlap.engine import Engine, Feeds
from overlap.reference import reference_step
from overlap.step import train_step
from overlap.verify import Prepare, Step, Verdict, as_is, compare_steps

ATTENTION = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""torch's attention whose backward reproduces itself, the first that takes the shapes."""


def reproduce(
    chunk: ModelChunk,
    batches: Sequence[Sequence[Feeds]],
    *,
    engine_type: Callable[..., Engine] = Engine,
    prepare: Prepare = as_is,
) -> Mapping[str, Verdict]:
    """Run each arm of verify() twice and compare it with itself.

    Args:
        chunk: The model and its settings; left as it is.
        batches: The microbatches of each step.
        engine_type: What runs the plans of the overlapped arm.
        prepare: Applied to every copy before it trains.

    Returns:
        A verdict per arm, `reference` and `overlap`; where one is not equal, a comparison of the arms says nothing.
    """
    arms: Mapping[str, Step] = {
        "reference": reference_step,
        "overlap": partial(train_step, engine_type=engine_type),
    }
    return {name: compare_steps(chunk, batches, step, step, prepare=prepare) for name, step in arms.items()}


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Deterministic algorithms and attention inside, on a device that has others; on a CPU nothing changes."""
    if device.type == "cpu" or torch.are_deterministic_algorithms_enabled():
        yield
        return
    # Read when the library is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(ATTENTION):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
