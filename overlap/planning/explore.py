"""Explore: predict every choice for a job and decide under a budget."""

from __future__ import annotations

from collections.abc import Callable

from overlap.errors import ScheduleError
from overlap.planning.evaluate import Evaluation, Setting
from recompute.planner import Candidate, Choice, Decision, choices


def explore(setting: Setting, budget: int, progress: Callable[[str], None]) -> Decision:
    """Predict all choices.

    Args:
        setting: The job and its dry runs.
        budget: Bytes of one device.
        progress: Told the name of each choice before it is predicted.

    Raises:
        ScheduleError: The order fits no choice.
    """
    job = setting.job
    longest = max(shape.layers for shape in setting.shapes)
    found: list[Candidate] = []
    refused: list[ScheduleError] = []
    for choice in choices(longest, mtp=job.model.mtp > 0, modules=setting.modules):
        progress(str(choice))
        try:
            found.append(candidate(setting, choice))
        except ScheduleError as error:
            # An order without R steps hides no replay.
            refused.append(error)
    if not found:
        raise refused[0]
    return Decision(budget=budget, candidates=tuple(found))


def candidate(setting: Setting, choice: Choice) -> Candidate:
    """Predict one choice."""
    outcome = Evaluation(setting, choice).outcome()
    bins = {kind.value: nbytes for kind, nbytes in outcome.fullest.bins.items()}
    return Candidate(choice=choice, bins=bins, milliseconds=outcome.milliseconds)


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
        "Attention is a fused kernel that keeps query, key, value, output and one float32 per row and head.",
    )
