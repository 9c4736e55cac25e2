"""What is alive at the highest point, from a list of events."""

from __future__ import annotations

from typing import Any

from benchmarks.memory.peak import alive_at_peak, grouped


def event(action: str, addr: int, size: int, place: str = "/x/overlap/a.py") -> dict[str, Any]:
    frames = [{"filename": "/lib/torch.py", "line": 1, "name": "empty"}, {"filename": place, "line": 7, "name": "f"}]
    return {"action": action, "addr": addr, "size": size, "frames": frames, "user_metadata": "B0.1.experts"}


def test_the_highest_point():
    events = [
        event("free_requested", 9, 100),  # from before
        event("alloc", 1, 4),
        event("alloc", 2, 6, "/x/other.py"),
        event("free_requested", 2, 6),
        event("alloc", 2, 8),
        event("segment_alloc", 2, 99),
        event("free_requested", 1, 4),
        event("alloc", 3, 3),
    ]
    assert [(found["addr"], found["size"]) for found in alive_at_peak(events)] == [(1, 4), (2, 8)]


def test_nothing_alive():
    assert alive_at_peak([event("free_requested", 1, 4)]) == []


def test_groups():
    events = [event("alloc", 1, 4), event("alloc", 2, 5), event("alloc", 3, 20, "/x/other.py")]
    assert grouped(events) == [
        (20, 1, "B0.1.experts  elsewhere"),
        (9, 2, "B0.1.experts  a.py:7 f"),
    ]
