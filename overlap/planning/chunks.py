"""Chunks: which layers each model chunk of a pipeline holds."""

from __future__ import annotations

from dataclasses import dataclass

from overlap.planning.job import V_SHAPED, Job


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkShape:
    """A model chunk; two of equal shape need the same memory."""

    dense: int
    """Dense layers; they come first."""
    moe: int
    first: bool
    """Whether it embeds the tokens."""
    last: bool
    """Whether it holds the head and the depths of multi-token prediction."""

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return self.dense + self.moe

    def __str__(self) -> str:
        """Print as `embed+1D1M`, `2M`, `2M+head`."""
        kinds = "".join(f"{count}{letter}" for count, letter in ((self.dense, "D"), (self.moe, "M")) if count)
        return f"{'embed+' if self.first else ''}{kinds}{'+head' if self.last else ''}"


def chunk_shapes(job: Job) -> tuple[ChunkShape, ...]:
    """The chunks of a pipeline, in order.

    Layers are spread evenly; chunks at the end, then at the start, get the smaller share: they hold the head, the
    depths of multi-token prediction, and the embedding.
    """
    least, extra = divmod(job.model.layers, job.stages)
    short = job.stages - extra
    # The last chunk is short first, then the first, then the ones before the last.
    order = [job.stages - 1, 0, *range(job.stages - 2, 0, -1)]
    shorts = set(order[:short])
    counts = [least if stage in shorts else least + 1 for stage in range(job.stages)]
    shapes, begin = [], 0
    for stage, count in enumerate(counts):
        dense = min(max(job.model.dense_layers - begin, 0), count)
        shapes.append(ChunkShape(dense=dense, moe=count - dense, first=stage == 0, last=stage == job.stages - 1))
        begin += count
    return tuple(shapes)


def stages_of_rank(job: Job, rank: int) -> tuple[int, ...]:
    """The chunks of a pipeline rank, by number."""
    if job.schedule in V_SHAPED:
        return (rank, job.stages - 1 - rank)
    return tuple(range(rank, job.stages, job.pp))
