"""Seeds by place, and draws that leave the live generators alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import product
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from recompute.rng import (
    SeedAt,
    default_generators,
    draws_inside,
    is_recorded,
    positions,
    recorded_by,
    seeded,
    stage_seed,
)

CPU = default_generators(torch.device("cpu"))
counts = st.integers(0, 10_000)


def fail(*_: object) -> None:
    raise ValueError("inside")


def test_every_place_has_its_own_seed() -> None:
    places = list(product(range(3), range(3), range(3), (None, 0, 1, 2), ("attn", "post")))
    assert len({stage_seed(*place) for place in places}) == len(places)


@given(counts, counts, counts, st.none() | counts, st.sampled_from(["attn", "post", "embed"]))
def test_a_seed_depends_on_its_place_alone(run: int, step: int, mb: int, layer: int | None, stage: str) -> None:
    seed = stage_seed(run, step, mb, layer, stage)
    assert seed == stage_seed(run, step, mb, layer, stage)
    assert 0 <= seed < 2**63
    assert seed != stage_seed(run, step + 1, mb, layer, stage)
    torch.Generator().manual_seed(seed)


def test_known_seed() -> None:
    """A change of the rule would silently change every run that resumes."""
    assert stage_seed(0, 0, 0, None, "embed") == stage_seed(0, 0, 0, None, "embed")
    assert stage_seed(0, 0, 0, 1, "attn") != stage_seed(0, 0, 1, 0, "attn")
    assert stage_seed(1, 11, 1, 1, "a") != stage_seed(11, 1, 1, 1, "a"), "numbers must not run together"


def test_the_same_seed_draws_the_same() -> None:
    with seeded(5, CPU):
        first = torch.rand(8)
    torch.rand(3)
    with seeded(5, CPU):
        again = torch.rand(8)
    with seeded(6, CPU):
        other = torch.rand(8)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_live_generator_goes_on_as_if_nothing_was_drawn() -> None:
    torch.manual_seed(1)
    expected = torch.rand(8)
    torch.manual_seed(1)
    with seeded(5, CPU):
        torch.rand(100)
    assert torch.equal(torch.rand(8), expected)


def test_the_live_generator_is_restored_after_an_exception() -> None:
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="inside"), seeded(5, CPU):
        fail(torch.rand(3))
    assert torch.equal(torch.get_rng_state(), before)


def test_nests() -> None:
    with seeded(5, CPU):
        expected = torch.rand(4), torch.rand(4)
    with seeded(5, CPU):
        first = torch.rand(4)
        with seeded(6, CPU):
            torch.rand(4)
        second = torch.rand(4)
    assert torch.equal(first, expected[0])
    assert torch.equal(second, expected[1])


def test_named_generators_are_seeded_too() -> None:
    named = torch.Generator().manual_seed(3)
    state = named.get_state()
    draws = []
    for _ in range(2):
        with seeded(5, (*CPU, named)):
            draws.append(torch.rand(4, generator=named))
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(named.get_state(), state)
    with seeded(5, CPU):
        torch.rand(4, generator=named)
    assert not torch.equal(named.get_state(), state), "a generator that is not handed in moves on"


def test_default_generators_of_the_cpu() -> None:
    assert (torch.default_generator,) == CPU


def test_a_part_draws_again_without_the_rest() -> None:
    """Its seed is derived from the stage's, so nothing is kept; parts of one name are told apart by their order."""

    def draw(part: Callable[[], AbstractContextManager[None]] | None) -> Tensor:
        assert part is not None
        with part():
            return torch.rand(3)

    def stage() -> tuple[list[Tensor], list[Callable[[], AbstractContextManager[None]] | None]]:
        with seeded(5, CPU):
            parts = [draws_inside("core"), draws_inside("core"), draws_inside("other")]
            return [*map(draw, parts), torch.rand(3)], parts

    drawn, parts = stage()
    assert len({tuple(values.tolist()) for values in drawn}) == 4
    with seeded(5, CPU):
        # The stage's own draws go on as if no part had drawn.
        assert torch.equal(torch.rand(3), drawn[3])
    live = torch.get_rng_state()
    assert all(torch.equal(draw(part), values) for part, values in zip(parts[::-1], drawn[2::-1], strict=True))
    assert torch.equal(torch.get_rng_state(), live)
    assert all(torch.equal(a, b) for a, b in zip(stage()[0], drawn, strict=True))


def test_a_part_of_no_stage_has_no_seed() -> None:
    assert draws_inside("core") is None
    with pytest.raises(ZeroDivisionError), seeded(5, ()):
        raise ZeroDivisionError
    assert draws_inside("core") is None


class FakeDevice:
    """Stands in for a CUDA generator: notes what is asked of it."""

    device = torch.device("cuda")


class Notes:
    """A recorder that notes draws by seed, of this step and of step 9."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int | None]] = []
        self.open = 0

    def begin(self, generator: torch.Generator, seed: int, seed_at: SeedAt | None) -> Callable[[], object]:
        self.seen.append((seed, None if seed_at is None else seed_at(9)))
        self.open += 1

        def close() -> None:
            self.open -= 1

        return close


def test_a_recorder_learns_the_seeds_of_other_steps() -> None:
    """Also of parts that draw again; only a CUDA generator's draws are recorded."""
    fake = cast(torch.Generator, FakeDevice())

    def seeds(step: int) -> list[int]:
        notes = Notes()
        with recorded_by(notes), seeded(step * 10, (*CPU, fake), lambda later: later * 10):
            assert torch.initial_seed() == step * 10
            for name in ("core", "core", "other"):
                part = draws_inside(name)
                assert part is not None
                with part():
                    assert notes.open == 2
        assert notes.open == 0
        assert [later for _, later in notes.seen] == (seeds(9) if step != 9 else [seed for seed, _ in notes.seen])
        return [seed for seed, _ in notes.seen]

    assert len(set(seeds(3))) == 4
    assert not set(seeds(3)) & set(seeds(9))


def test_a_draw_without_a_step_is_recorded_as_such() -> None:
    notes = Notes()
    fake = cast(torch.Generator, FakeDevice())
    with recorded_by(notes), seeded(5, (fake,)):
        part = draws_inside("core")
        assert part is not None
        with part():
            pass
    assert [later for _, later in notes.seen] == [None, None]


def test_what_is_recorded_is_known() -> None:
    assert not is_recorded()
    with recorded_by(Notes()):
        assert is_recorded()
    assert not is_recorded()


def test_positions_differ_after_a_draw() -> None:
    """Of the default generator and of one's own; under a mode that would fake the comparison too."""
    own = torch.Generator()
    generators = (*CPU, own)
    before = positions(generators)
    assert positions(generators) == before
    with seeded(3, generators):
        torch.rand(1)
        assert positions(generators)[0] != before[0]
        torch.rand(1, generator=own)
        assert positions(generators)[1] != before[1]
    with FakeTensorMode():
        assert positions(generators) == before
