"""ChunkModel: the layers of one model chunk of a pipeline, between a stage that receives and one that sends.

For dry runs on fake tensors: `receive` and `send` allocate what point-to-point transfers would, lazily (R20).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from overlap.builder import ProgramBuilder, Value
from overlap.ir import Program
from overlap.model import Decoder, MoELayer
from overlap.model.config import ModelConfig
from overlap.model.layers import DecoderEntry, DenseLayer
from overlap.model.weights import Weights
from overlap.planning.chunks import ChunkShape
from overlap.planning.fake_transport import transport_of
from overlap.planning.job import Job

RECEIVE, SEND = "receive", "send"
"""Names of the stages at the ends of a chunk."""


class ChunkModel(Decoder):
    """A chunk.

    Args:
        job: The job.
        shape: Of the chunk.
    """

    def __init__(self, job: Job, shape: ChunkShape) -> None:
        super().__init__(_config(job, shape), transport=transport_of(job), init=_leave)
        self.shape = shape
        self._job = job
        if not shape.first and not (shape.last and job.model.mtp):
            del self.embedding
        if not shape.last:
            del self.head

    def program(self) -> Program:
        """The stages of one microbatch; feeds: `arrived` (a scalar), `ids`, `labels`, as the chunk needs them."""
        shape = self.shape
        b = ProgramBuilder()
        ids = [b.input("ids")] if shape.first or (shape.last and self.config.mtp) else []
        labels = [b.input("labels")] if shape.last else []
        arrived = [] if shape.first else [b.input("arrived", needs_grad=True)]
        weights = Weights(b, self._shared() if shape.last else {}, self)
        if shape.first:
            state = self._build_embed(b, weights, ids[0]) if shape.last else self._build_own_embed(b, ids[0])
        else:
            (state,) = b.compute(RECEIVE, self.receive, *arrived, outputs=("received",), adjoint=_give_up)
        entry = DecoderEntry(self.config)
        for index, layer in enumerate(self.layers):
            with b.layer(index):
                state = cast("DenseLayer | MoELayer", layer).build(b, weights, entry, (state,))
        if shape.last:
            outputs = self._build_depths(b, weights, state, {"ids": ids[0]}, ()) if self.config.mtp else []
            self._build_head(b, weights, state, outputs, labels[0])
        else:
            (sent,) = b.compute(SEND, _send, state, outputs=("sent",), adjoint=self.arrive)
            b.loss(sent)
        return b.build()

    def receive(self, arrived: Tensor) -> Tensor:
        """The residual state, from the rank before."""
        job = self._job
        streams = () if self.config.mhc is None else (self.config.mhc,)
        return arrived.new_empty(job.batch, job.seq, *streams, self.config.hidden)

    def arrive(self, grads: Sequence[Tensor | None], pinned: Sequence[Any]) -> tuple[Tensor | None]:
        """The gradient of what was sent, from the rank behind."""
        (grad,) = grads
        return (None if grad is None else self.receive(grad.to(next(self.parameters()).dtype)),)

    def _build_own_embed(self, b: ProgramBuilder, ids: Value) -> Value:
        (state,) = b.compute("embed", self._embed_own, ids, outputs=("embedded",), parameters=(self.embedding,))
        return state

    def _build_head(
        self, b: ProgramBuilder, weights: Weights, state: Value, outputs: Sequence[Value], labels: Value
    ) -> None:
        tied = (weights.value(self.embedding),) if self.config.tied else ()
        bound = weights.bind(self.head, (state, *outputs, labels, *tied), (self.head,))
        losses = b.compute(
            "head", bound.forward, *bound.reads, outputs=self.head.loss_names, wgrad=True, parameters=bound.parameters
        )
        for name, loss in zip(self.head.loss_names, losses, strict=True):
            b.loss(loss, self.head.loss_weight(name))


def feeds_of(job: Job, shape: ChunkShape) -> dict[str, Tensor]:
    """A microbatch's feeds, without meaning."""
    tokens = torch.zeros(job.batch, job.seq, dtype=torch.int64)
    feeds = {}
    if shape.first or (shape.last and job.model.mtp):
        feeds["ids"] = tokens
    if shape.last:
        feeds["labels"] = tokens.clone()
    if not shape.first:
        feeds["arrived"] = torch.zeros((), dtype=getattr(torch, job.model.dtype))
    return feeds


def _config(job: Job, shape: ChunkShape) -> ModelConfig:
    model = replace(job.model, layers=shape.layers, dense_layers=shape.dense)
    if shape.last or not model.mtp:
        return model
    defaults = ModelConfig()
    names = ("mtp", "mtp_repeat", "mtp_dense", "mtp_widths", "mtp_scale", "mtp_detach")
    return replace(model, **{name: getattr(defaults, name) for name in names})


def _leave(model: nn.Module, seed: int) -> None:
    """Weights without values."""


def _send(state: Tensor) -> Tensor:
    """Stands for a send, which allocates nothing."""
    return state.new_zeros(())


def _give_up(grads: Sequence[Tensor | None], pinned: Sequence[Any]) -> tuple[Tensor | None]:
    """The gradient goes to the rank before, and is let go."""
    (grad,) = grads
    return (None if grad is None else grad.new_zeros(()),)
