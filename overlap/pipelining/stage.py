"""ChunkStage: a virtual stage of torch's pipelining whose chunk runs through our engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap.check import check_stages
from overlap.chunk import ModelChunk
from overlap.engine import Feeds, MicrobatchState
from overlap.ir import StageKey
from overlap.model.cut import Cut
from overlap.model.decoder import ARRIVING
from overlap.pipelining.border import StageBorder
from overlap.pipelining.compat import StaticStage
from overlap.pipelining.plans import Half
from overlap.step_feeds import snapshot_feeds
from recompute.config import RecomputeConfig


class Part(Protocol):
    """What a pipeline asks of a stage's module beside its program (overlap.model.Decoder has it)."""

    cut: Cut

    @property
    def feed_names(self) -> tuple[str, ...]:
        """What a microbatch feeds the whole model."""

    @property
    def late_name(self) -> str:
        """Name of the embedding as the last stage holds it."""

    @property
    def split_embedding(self) -> bool:
        """Whether the first stage's embedding and the last one's are copies of each other."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As nn.Module's."""

    def state_shape(self, ids: Tensor) -> tuple[int, ...]:
        """Shape of the state between two layers."""


class ChunkStage(StaticStage):
    """One virtual stage on its rank.

    Args:
        chunk: The part of the model, and how it runs.
        border: Its ends.
        index: Number of the stage.
        num_stages: Of the pipeline.
        group: The pipeline's process group; None: the default one.
    """

    def __init__(
        self, chunk: ModelChunk, border: StageBorder, index: int, num_stages: int, group: dist.ProcessGroup | None
    ) -> None:
        # Any shape will do: nothing of torch's reads it, but with one the start-up infers none.
        state = torch.empty(1, device="meta")
        # The runtime sees no parameters: it would gather and reduce sharded ones itself, at other moments.
        super().__init__(nn.Module(), index, num_stages, chunk.device, input_args=state, output_args=state, group=group)
        self.chunk = chunk
        self.border = border
        self.part = cast(Part, chunk.module)
        self.states: dict[int, MicrobatchState] = {}
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._configs: Sequence[RecomputeConfig] = ()
        self._trained: frozenset[StageKey] = frozenset()

    def open_step(self, microbatches: Sequence[Feeds], scale: float, kept: Sequence[frozenset[str]]) -> None:
        """Take the microbatches of a step.

        Args:
            microbatches: Feeds of the whole model.
            scale: Factor on every loss gradient.
            kept: Per microbatch, the feeds that are copied because a replay reads them again.
        """
        first = self.chunk.first_draw(len(microbatches))
        for number, feeds in enumerate(microbatches):
            own = snapshot_feeds(self._own(feeds), kept[number])
            self.states[number] = MicrobatchState(number, own, scale, first)
            self._shapes[number] = self.part.state_shape(feeds["ids"])
        self._configs = self.chunk.configs(len(microbatches))
        self._trained = self.chunk.program.trained()
        self.border.open = True

    def check(self, feeds: Feeds, dtype: torch.dtype) -> None:
        """Run every stage once, alone, and compare it with its declaration, before the first step (R16).

        Args:
            feeds: A microbatch of the whole model.
            dtype: Of the state, which is zeros here.

        Raises:
            ProgramError: See check_stages.
        """
        if not self.chunk.checked:
            arriving = torch.zeros(self.part.state_shape(feeds["ids"]), dtype=dtype, device=self.chunk.device)
            with self.chunk.parallel.whole():
                check_stages(self.chunk, {**self._own(feeds), **({} if self.is_first else {ARRIVING: arriving})})
            self.chunk.checked = True

    def _own(self, feeds: Feeds) -> Feeds:
        """The feeds that this stage reads."""
        own = {source.name for source in self.chunk.program.inputs}
        return {name: value for name, value in feeds.items() if name in own}

    def close_step(self) -> list[MicrobatchState]:
        """Give the microbatches back, in order."""
        states = [self.states[number] for number in sorted(self.states)]
        self.clear()
        return states

    def clear(self) -> None:
        """Hold nothing."""
        self.border.open = False
        self.states.clear()
        self._shapes.clear()

    def half(self, microbatch: int) -> Half:
        """The stage's side of a plan."""
        return Half(self.stage_index, self._configs[microbatch], self._trained)

    def halves(self) -> tuple[Half, ...]:
        """Of all microbatches of the step."""
        return tuple(self.half(microbatch) for microbatch in sorted(self.states))

    def shape(self, microbatch: int) -> tuple[int, ...]:
        """Of the state at its borders."""
        return self._shapes[microbatch]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Post the receive of a state on the P2P lane; nothing is left to post."""
        self.border.arrivals.expect(fwd_chunk_id, self._shapes[fwd_chunk_id])
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        """The same for a gradient."""
        if self.has_backward:
            self.border.gradients.expect(bwd_chunk_id, self._shapes[bwd_chunk_id])
        return []


def local_stages(stages: Sequence[ChunkStage]) -> Mapping[int, ChunkStage]:
    """Stages by number."""
    return {stage.stage_index: stage for stage in stages}
