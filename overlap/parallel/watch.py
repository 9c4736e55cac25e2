"""Watch: where every rank is, so that the ranks that wait in vain can say for whom.

A collective that fails says that somebody was not there; who, and where that rank is, only the ranks themselves know.
So a thread of each rank writes the slot that it is in to the job's store, several times a second; nothing of it runs
in the step's own thread but the note of the slot.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

from overlap.engine import MicrobatchState
from overlap.errors import RankFailed
from overlap.lower import Issue
from overlap.parallel.world import World

_LOG = logging.getLogger(__name__)
INTERVAL = 0.2
"""Seconds between two notes of a rank."""
SILENT_AFTER = 5
"""A rank is silent that did not write for so many intervals."""


class State(StrEnum):
    """What a rank does."""

    RUNS = "runs"
    RAISED = "raised"
    """It failed by itself."""
    WAITED = "waited"
    """A collective of it failed: another rank did."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """One rank as it was seen last."""

    rank: int
    state: str
    where: str
    """The slot that it is in, or was in when it stopped."""
    beat: int
    """Counts its notes: a rank whose count stands still is gone."""
    why: str = ""
    """What it raised."""


class Watch:
    """Notes where this rank is and finds out where the others are. An engine.Observer.

    Args:
        world: The ranks; there are several.
        interval: Seconds between two notes.
        patience: Seconds in one slot after which a rank logs where all ranks are. Where a backend ends the process
            at its time limit instead of raising (NCCL), this is what names the rank; choose it below that limit.
    """

    def __init__(self, world: World, *, interval: float = INTERVAL, patience: float = math.inf) -> None:
        self._rank = world.rank
        self._size = world.size
        self._interval = interval
        self._patience = patience
        store: Any = distributed_c10d._get_default_store()
        # a client of its own: the other one may be waiting for something
        self._store: Any = PrefixStore("watch", store.clone())
        self._at: tuple[Issue, int] | None = None
        self._own = Sighting(rank=self._rank, state=State.RUNS, where="", beat=0)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep_writing, name="watch", daemon=True)

    def before(self, issue: Issue, owner: MicrobatchState) -> None:
        """Note the slot."""
        self._at = (issue, owner.number)

    def after(self, issue: Issue, owner: MicrobatchState) -> None:
        """The rank counts as being there until the next slot begins."""

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Watch what runs inside.

        Raises:
            RankFailed: What failed inside is another rank's fault. Any other exception passes through.
        """
        self._write(State.RUNS)
        self._thread.start()
        try:
            yield
        except Exception as error:
            if not is_collective(error):
                self._write(State.RAISED, f"{type(error).__name__}: {error}")
                raise
            self._write(State.WAITED, str(error))
            culprit = self._culprit()
            if culprit is None:
                raise
            raise RankFailed(culprit.rank, culprit.where, _reason(culprit)) from error
        else:
            self._write(State.ENDED)
        finally:
            self._over.set()
            self._thread.join()

    def sightings(self) -> Mapping[int, Sighting]:
        """The ranks that have written, as they wrote last."""
        keys = {rank: str(rank) for rank in range(self._size)}
        return {
            rank: Sighting(**json.loads(self._store.get(key))) for rank, key in keys.items() if self._store.check([key])
        }

    def _culprit(self) -> Sighting | None:
        """The rank that the others wait for: one that raised, else one that is gone, else one that does not arrive.

        Ranks that wait alike give up within moments of each other, so it takes a while until only that one is left.
        """
        before = self.sightings()
        running: list[Sighting] = []
        for look in range(2 * SILENT_AFTER):
            now = self.sightings().values()
            for seen in now:
                if seen.state == State.RAISED:
                    return seen
            running = [seen for seen in now if seen.state == State.RUNS]
            if not running or (len(running) == 1 and look >= SILENT_AFTER):
                break
            time.sleep(self._interval)
        for seen in running:
            if seen.beat == before[seen.rank].beat:
                return replace(seen, state=State.ENDED)
        return running[0] if running else None

    def _keep_writing(self) -> None:
        seen, since, told = self._at, time.monotonic(), False
        while not self._over.wait(self._interval):
            if self._at is not seen:
                seen, since, told = self._at, time.monotonic(), False
            try:
                with self._lock:
                    if self._own.state == State.RUNS:
                        self._put(State.RUNS, "")
                if not told and time.monotonic() - since > self._patience:
                    told = True
                    self._tell()
            except RuntimeError:
                return  # the store is gone, and with it whoever could read

    def _tell(self) -> None:
        """Log where the ranks are."""
        places = "; ".join(f"rank {rank} {seen.state} {seen.where}" for rank, seen in self.sightings().items())
        _LOG.warning("no slot ended for %g seconds: %s", self._patience, places)

    def _write(self, state: State, why: str = "") -> None:
        with self._lock:
            self._put(state, why)

    def _put(self, state: State, why: str) -> None:
        self._own = replace(self._own, state=state, where=self._where(), beat=self._own.beat + 1, why=why)
        self._store.set(str(self._rank), json.dumps(asdict(self._own)))

    def _where(self) -> str:
        if self._at is None:
            return "outside a step's slots"
        issue, number = self._at
        return f"in slot {replace(issue.slot, microbatch=number)}"


def is_collective(error: Exception) -> bool:
    """Whether an exception says that a collective failed. gloo raises plain RuntimeErrors that name its sources."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error))


def _reason(seen: Sighting) -> str:
    reasons = {
        State.RAISED: f"raised {seen.why}",
        State.ENDED: "ended without a word",
        State.RUNS: "did not arrive within the time limit",
    }
    return reasons[State(seen.state)]
