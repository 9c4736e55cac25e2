"""The frontier's picture names the fastest choice that fits and the ends, and no two names overlap."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from overlap.draw_plan import _labelled, draw_frontier
from recompute.planner import Decision


def decision(*points: tuple[int, float], budget: int = 10) -> Decision:
    """Of candidates (peak in GiB, milliseconds)."""
    candidates = [SimpleNamespace(choice=f"{p} GiB", peak=p * 2**30, milliseconds=ms) for p, ms in points]
    return Decision(budget=budget * 2**30, candidates=cast(Any, candidates))


def names(found: Decision) -> set[str]:
    return {str(candidate.choice) for candidate in _labelled(found)}


def test_ends_the_fastest_that_fits_and_what_has_room() -> None:
    found = decision((4, 2000.0), (6, 1500.0), (7, 1490.0), (8, 1480.0), (20, 1000.0), (21, 999.0), (30, 2500.0))
    assert found.fastest is not None
    assert str(found.fastest.choice) == "8 GiB"
    assert names(found) == {"4 GiB", "8 GiB", "21 GiB"}


def test_one_candidate_that_does_not_fit() -> None:
    assert names(decision((20, 1000.0))) == {"20 GiB"}


@pytest.mark.parametrize("points", [[(4, 2000.0), (20, 1000.0)], [(20, 1000.0)]])
def test_drawn(points, tmp_path) -> None:
    draw_frontier(decision(*points), tmp_path / "frontier.png")
    assert (tmp_path / "frontier.png").stat().st_size > 10_000
