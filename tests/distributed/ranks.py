"""Ranks for tests: processes that wait for work, so that a test of several ranks need not start any.

A process costs seconds because it imports torch. So a fork server imports it once, workers are forked from it, and
one pool of workers serves the whole session. A test's function runs with a process group of its own; a test that
fails or hangs costs its workers, which are replaced. Tests of dying ranks use `start_ranks` and get processes that
nobody else uses.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

LIMIT = 60.0
"""Seconds that a function may run, unless the test says otherwise."""
_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = [
    "torch", "torch.distributed", "torch._dynamo", "overlap.cli", "overlap.parallel.attach", "tests.distributed.ranks",
]  # fmt: skip
"""torch imports _dynamo at the first call of an operator of ours, which takes as long as torch itself."""


class RankFailed(AssertionError):
    """A rank raised, died, or was not done in time; says which and shows its traceback."""


class Failure(NamedTuple):
    """What a rank raised."""

    rank: int
    kind: str
    """Name of the exception's class."""
    message: str
    trace: str


class Outcome(NamedTuple):
    """What came of a run, by rank; a rank that hung is in none of them."""

    results: dict[int, Any]
    failures: dict[int, Failure]
    """In the order in which they came."""
    exitcodes: dict[int, int | None]
    """Of ranks that are no longer there."""


class _Job(NamedTuple):
    rank: int
    size: int
    store: str
    timeout: float
    function: Callable[..., Any]
    args: tuple[Any, ...]


class Worker(NamedTuple):
    """One process and the line to it."""

    process: BaseProcess
    line: Connection

    def stop(self) -> None:
        """End it, whatever it does."""
        self.line.close()
        self.process.kill()
        self.process.join()


def _start_worker() -> Worker:
    _CONTEXT.set_forkserver_preload(_PRELOADED)
    mine, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return Worker(process, mine)


def _serve(line: Connection) -> None:
    """Run jobs until the other side hangs up."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    while True:
        try:
            job: _Job = line.recv()
        except EOFError:
            return
        _run(job, line)


def _run(job: _Job, line: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    # as torchrun says it
    os.environ.update(RANK=str(job.rank), LOCAL_RANK=str(job.rank), WORLD_SIZE=str(job.size))
    try:
        store = dist.FileStore(job.store, job.size)  # type: ignore[attr-defined]  # documented, but not in __all__
        limit = timedelta(seconds=job.timeout)
        dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.size, timeout=limit)
        # A rank that ends early would break into the others' connecting.
        dist.barrier()
        answer = job.function(*job.args)
    except Exception as error:
        answer = Failure(job.rank, type(error).__name__, str(error), traceback.format_exc())
    # Before the group goes: without it the others fail too, and the cause should come first.
    line.send(answer)
    if dist.is_initialized():
        dist.destroy_process_group()


def collect(workers: list[Worker], limit: float) -> Outcome:
    """Wait until every rank has answered or died, at most `limit` seconds."""
    results: dict[int, Any] = {}
    failures: dict[int, Failure] = {}
    exitcodes: dict[int, int | None] = {}
    open_lines = {worker.line: rank for rank, worker in enumerate(workers)}
    deadline = time.monotonic() + limit
    while open_lines and (left := deadline - time.monotonic()) > 0:
        for line in wait(list(open_lines), timeout=left):
            rank = open_lines.pop(line)  # type: ignore[call-overload]  # waited for nothing else
            try:
                answer = workers[rank].line.recv()
            except EOFError:
                workers[rank].process.join()
                exitcodes[rank] = workers[rank].process.exitcode
                continue
            if isinstance(answer, Failure):
                failures[rank] = answer
            else:
                results[rank] = answer
    return Outcome(results, failures, exitcodes)


def send(workers: list[Worker], store: Path, function: Callable[..., Any], args: Any, timeout: float) -> None:
    """Give every worker its rank of one run; `store` is a file that does not exist yet."""
    for rank, worker in enumerate(workers):
        worker.line.send(_Job(rank, len(workers), str(store), timeout, function, args))


class RankPool:
    """Workers that are started when first needed and kept."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._runs = 0

    def __call__(
        self, size: int, function: Callable[..., Any], *args: Any, limit: float = LIMIT, timeout: float | None = None
    ) -> list[Any]:
        """Run `function(*args)` on ranks 0 to size-1 of a fresh gloo process group.

        Args:
            size: Ranks.
            function: A function of a module, importable by its name.
            args: Handed to every rank; pickled.
            limit: Seconds until the run counts as hung.
            timeout: Seconds of the process group's own time limit; None: longer than `limit`.

        Returns:
            Each rank's result, in order; pickled.

        Raises:
            RankFailed: A rank raised (shows the first one's traceback), died or hung.
        """
        outcome = self.outcome(size, function, *args, limit=limit, timeout=timeout)
        # the others may have failed because this one did
        for failure in list(outcome.failures.values())[:1]:
            raise RankFailed(f"rank {failure.rank} of {size}:\n{failure.trace}")
        missing = sorted(set(range(size)) - set(outcome.results))
        if missing:
            raise RankFailed(f"ranks {missing} of {size} gave no answer in {limit} s; exit codes {outcome.exitcodes}")
        return [outcome.results[rank] for rank in range(size)]

    def outcome(
        self, size: int, function: Callable[..., Any], *args: Any, limit: float = LIMIT, timeout: float | None = None
    ) -> Outcome:
        """The same, for tests that expect failures; workers that are not well afterwards are replaced."""
        while len(self._workers) < size:
            self._workers.append(_start_worker())
        workers = self._workers[:size]
        self._runs += 1
        store = Path(self._folder.name, str(self._runs))
        send(workers, store, function, args, limit + 5 if timeout is None else timeout)
        outcome = collect(workers, limit)
        if len(outcome.results) < size:
            # A process group that failed may leave threads and sockets: do not use its processes again.
            self._workers = self._workers[size:]
            for worker in workers:
                worker.stop()
        return outcome

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.stop()
        self._workers = []
        self._folder.cleanup()


@contextmanager
def start_ranks(size: int, function: Callable[..., Any], *args: Any, timeout: float = LIMIT) -> Iterator[list[Worker]]:
    """Processes of their own for one run, for tests that kill some; ended on the way out.

    Yields:
        The workers, the run already begun; `collect` waits for them.
    """
    workers = [_start_worker() for _ in range(size)]
    try:
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            send(workers, Path(folder, "store"), function, args, timeout)
            yield workers
    finally:
        for worker in workers:
            worker.stop()
