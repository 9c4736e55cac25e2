"""Explore: predict every choice for a job and decide under a budget."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from overlap.errors import ScheduleError
from overlap.planning.evaluate import Evaluation, Outcome, Setting
from overlap.planning.pieces import Form
from recompute.planner import Candidate, Choice, Decision, choices, refinements


def explore(setting: Setting, budget: int, progress: Callable[[str], None]) -> Decision:
    """Predict all choices; those that come to the same for every chunk are predicted once.

    Args:
        setting: The job and its dry runs.
        budget: Bytes of one device.
        progress: Told the name of each choice before it is predicted.

    Raises:
        ScheduleError: The order fits no choice.
    """
    longest = max(shape.layers for shape in setting.shapes)
    search = _Search(setting, progress)
    with _no_collection():
        search.add(choices(longest, mtp=setting.job.model.mtp > 0, modules=setting.modules, keeps=setting.keeps))
        if not search.found:
            raise search.refused[0]
        frontier = Decision(budget=budget, candidates=tuple(search.found)).frontier
        search.add(refinements((candidate.choice for candidate in frontier), longest, setting.keeps))
    return Decision(budget=budget, candidates=tuple(search.found))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Plans hold no cycles, and a fifth of the time would go into looking for some."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class _Search:
    """What was tried so far."""

    def __init__(self, setting: Setting, progress: Callable[[str], None]) -> None:
        self.found: list[Candidate] = []
        self.refused: list[ScheduleError] = []
        self._setting = setting
        self._progress = progress
        self._known: dict[tuple[Form, ...], Candidate] = {}

    def add(self, tried: Iterable[Choice]) -> None:
        """Predict these."""
        for choice in tried:
            evaluation = Evaluation(self._setting, choice)
            known = self._known.get(evaluation.forms)
            if known is not None:
                self.found.append(replace(known, choice=choice))
                continue
            self._progress(str(choice))
            try:
                self._known[evaluation.forms] = _candidate(choice, evaluation.outcome())
                self.found.append(self._known[evaluation.forms])
            except ScheduleError as error:
                # An order without R steps hides no replay.
                self.refused.append(error)


def _candidate(choice: Choice, outcome: Outcome) -> Candidate:
    bins = {kind.value: nbytes for kind, nbytes in outcome.fullest.bins.items()}
    return Candidate(choice=choice, bins=bins, milliseconds=outcome.milliseconds)


def _sharing(setting: Setting) -> tuple[str, ...]:
    job, device = setting.job, setting.device
    if job.shards == 1:
        return ()
    return (
        f"{job.shards} ranks of a host hold the same segment inputs and nothing else of a layer is cut; sharded inputs "
        f"are gathered at {device.link_share:.0%} of {device.link_gbytes:.0f} GB/s each way.",
    )


def assumptions(setting: Setting) -> tuple[str, ...]:
    """What the figures take for granted, as sentences."""
    job, device = setting.job, setting.device
    sends = "until the step ends" if job.keep_sends else "until the receiver has them"
    return (
        f"Routing is {job.routing}: {job.received} rows reach a rank's experts, which sends {job.copies}.",
        f"A microbatch is {job.batch} x {job.seq} tokens; a step has {job.microbatches} of them.",
        f"Schedule {job.schedule}, {job.virtual} chunk(s) a rank; forward and backward that meet run as a pair in "
        f"order {setting.order}; delayed weight gradients run within their backward's own action.",
        "Receive buffers are allocated when they are needed; what was sent stays " + sends + ".",
        "Gradients have the weights' type; AdamW keeps two float32 moments, and float32 master weights of narrower "
        f"ones, {'sharded over the ranks that share a weight' if job.optimizer == 'distributed' else 'all of it'}.",
        f"Allocations are rounded up to 512 bytes; fragmentation and communication libraries are not counted, "
        f"{device.workspace // 2**20} MiB are set aside for workspaces.",
        f"Times: {device.name}, {device.matmul_share:.0%} of {device.tensor_gflops / 1e3:.0f} TFLOP/s, "
        f"{device.memory_share:.0%} of {device.memory_gbytes:.0f} GB/s, all-to-all at {device.network_share:.0%} of "
        f"{device.network_gbytes:.0f} GB/s a rank, none of it within a host; the optimizer's step is left out.",
        "Segment inputs kept on the host leave and return over a link of "
        f"{device.host_gbytes:.0f} GB/s each way at {device.host_share:.0%}; host memory has no budget.",
        *_sharing(setting),
        "Attention is a fused kernel that keeps query, key, value, output and one float32 per row and head.",
    )
