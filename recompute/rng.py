"""Random numbers of a stage: the same in the first pass and in the replay, whatever runs in between (R4).

Every drawing stage draws from a seed of its own, derived by counting from the run's seed, so a draw does not depend
on issue order, ranks or pipelining, and nothing has to be kept for the replay. The live generators are as before
after every stage.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Protocol

import torch


def stage_seed(run_seed: int, step: int, microbatch: int, layer: int | None, stage: str) -> int:
    """Seed of one stage's draws: 63 bits of a hash of its place in the run.

    Args:
        run_seed: The run's seed.
        step: Steps done before this one.
        microbatch: Number within the step, through all data ranks.
        layer: Layer of the stage; None outside any layer.
        stage: Stage name.
    """
    return _hashed(f"{run_seed}/{step}/{microbatch}/{layer}/{stage}")


def _hashed(place: str) -> int:
    return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest()) >> 1


SeedAt = Callable[[int], int]
"""Gives the seed of a draw in another step."""


class DrawRecorder(Protocol):
    """Decides what a device's generator does for a draw while a step is recorded to be run again."""

    def begin(self, generator: torch.Generator, seed: int, seed_at: SeedAt | None) -> Callable[[], object]:
        """Let `generator` draw as from `seed`, in another step as from `seed_at`; returns what puts it back."""


class _Seeded:
    """A stretch of code that draws from a seed, and how many parts of it asked for one of their own."""

    __slots__ = ("generators", "given", "seed", "seed_at")

    def __init__(self, seed: int, generators: Sequence[torch.Generator], seed_at: SeedAt | None) -> None:
        self.seed = seed
        self.generators = generators
        self.seed_at = seed_at
        self.given = 0


_open: list[_Seeded] = []
_recorders: list[DrawRecorder] = []


@contextmanager
def recorded_by(recorder: DrawRecorder) -> Iterator[None]:
    """Hand the draws inside, as far as they are a CUDA generator's, to a recorder."""
    _recorders.append(recorder)
    try:
        yield
    finally:
        _recorders.pop()


def is_recorded() -> bool:
    """Whether a recorder takes the draws: what runs now is recorded to be launched again, or is about to be."""
    return bool(_recorders)


@contextmanager
def seeded(seed: int, generators: Sequence[torch.Generator], seed_at: SeedAt | None = None) -> Iterator[None]:
    """Draw from `seed` inside; the generators continue afterwards as if nothing had been drawn.

    Args:
        seed: Seed for each of the generators.
        generators: The live generators that the code inside may draw from (CPU default, device defaults, named ones).
        seed_at: Gives this draw's seed in another step, for a recorder; None: unknown.
    """
    restores: list[Callable[[], object]] = []
    _open.append(_Seeded(seed, generators, seed_at))
    try:
        for generator in generators:
            restores.append(_begin(generator, seed, seed_at))
        yield
    finally:
        _open.pop()
        for restore in restores:
            restore()


def _begin(generator: torch.Generator, seed: int, seed_at: SeedAt | None) -> Callable[[], object]:
    if _recorders and generator.device.type == "cuda":
        return _recorders[-1].begin(generator, seed, seed_at)
    return begin_at(generator, seed)


def begin_at(generator: torch.Generator, seed: int) -> Callable[[], object]:
    """Set a generator to a seed; returns what puts it back to where it is now."""
    restore = _restorer(generator)
    generator.manual_seed(seed)
    return restore


def draws_inside(name: str) -> Callable[[], AbstractContextManager[None]] | None:
    """Contexts that draw from a seed derived from that of the `seeded` around: the same one, however often entered.

    So a part of a stage can draw again without the rest of it, and nothing has to be kept.

    Args:
        name: Of the part. Parts of one name are told apart by the order in which they ask.

    Returns:
        None if no `seeded` is around.
    """
    if not _open:
        return None
    around = _open[-1]
    around.given += 1
    inside = partial(_inside, name, around.given)
    seed_at = around.seed_at
    later = None if seed_at is None else lambda step: inside(seed_at(step))
    return partial(seeded, inside(around.seed), around.generators, later)


def _inside(name: str, number: int, seed: int) -> int:
    return _hashed(f"{seed}/{name}/{number}")


def _restorer(generator: torch.Generator) -> Callable[[], object]:
    """What puts a generator back to where it is now."""
    if generator.device.type != "cuda":
        return partial(generator.set_state, generator.get_state())
    # A CUDA generator counts: seed and offset are all of its state, and cost less than a state tensor.
    return partial(_put_counter, generator, generator.initial_seed(), generator.get_offset())


def _put_counter(generator: torch.Generator, seed: int, offset: int) -> None:
    generator.manual_seed(seed)
    generator.set_offset(offset)


def positions(generators: Sequence[torch.Generator]) -> tuple[object, ...]:
    """Where generators stand: tuples that differ once one of them has drawn. Waits for no device.

    A CUDA generator cannot be asked while a CUDA graph is recorded, and counts as standing still.
    """
    return tuple(_position(generator) for generator in generators)


def _position(generator: torch.Generator) -> object:
    if generator.device.type != "cuda":
        # As bytes from memory: an operator on the tensor would run under whatever mode is active.
        state = generator.get_state()
        return ctypes.string_at(state.data_ptr(), state.nbytes)
    if torch.cuda.is_current_stream_capturing():
        return None
    return generator.initial_seed(), generator.get_offset()


def default_generators(device: torch.device) -> tuple[torch.Generator, ...]:
    """The default generators that code on `device` draws from: the CPU's, and the device's own."""
    if device.type == "cuda":
        return (torch.default_generator, torch.cuda.default_generators[device.index or 0])
    return (torch.default_generator,)
