"""verify_pipeline: compare a pipeline's step with plain autograd over the whole model, bit for bit.

Every rank trains the whole model as the reference and compares what it holds of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from overlap.chunk import ModelChunk
from overlap.engine import Engine, Feeds
from overlap.model.router import update_expert_bias
from overlap.pipelining.pipeline import Pipeline
from overlap.pipelining.segments import LiveSegments
from overlap.pipelining.step import train_pipeline
from overlap.reference import reference_step
from overlap.verify import TensorsCompared, Verdict, compare


def verify_pipeline(
    pipeline: Pipeline,
    reference: ModelChunk,
    batches: Sequence[Sequence[Feeds]],
    *,
    engine_type: Callable[..., Engine] = Engine,
) -> Verdict:
    """Train both and compare after every step, before the optimizer.

    Args:
        pipeline: This rank's share; trained.
        reference: The whole model on this rank, its embedding split where the pipeline's is; its replicas or shards are
            those of the pipeline's stages. Trained.
        batches: The microbatches of each step.
        engine_type: What runs the plans; a control breaks one thing in it.

    Returns:
        This rank's verdict.
    """
    names = list(pipeline.named_parameters())
    optimizers = [
        torch.optim.AdamW(params, lr=1e-3)
        for params in (reference.parallel.parameter_groups(reference), pipeline.parameter_groups())
    ]
    loss_equal = rng_equal = True
    nothing = TensorsCompared(compared=0, different=())
    gradients, buffers = nothing, nothing
    counter = LiveSegments(pipeline)
    for microbatches in batches:
        before = torch.get_rng_state()
        expected = reference_step(reference, microbatches)
        merge_embedding(reference)
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        found = train_pipeline(pipeline, microbatches, observers=(counter,), engine_type=engine_type)
        rng_equal &= torch.equal(torch.get_rng_state(), after)
        for theirs, ours in zip(expected, found, strict=True):
            loss_equal &= not compare({name: theirs.get(name) for name in ours}, ours).different
        wanted = dict(reference.module.named_parameters())
        own = pipeline.named_parameters()
        gradients = gradients.merged(
            compare(*({name: held_gradient(reference, held[name]) for name in names} for held in (wanted, own)))
        )
        kept = dict(reference.module.named_buffers(remove_duplicate=False))
        held = dict(pipeline.named_buffers())
        buffers = buffers.merged(compare({name: kept.get(name) for name in held}, held))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for chunk in (reference, *pipeline.chunks):
            update_expert_bias(chunk, chunk.world)
    return Verdict(
        loss_equal=loss_equal,
        gradients=gradients,
        buffers=buffers,
        rng_equal=rng_equal,
        max_live_segments=counter.peak,
    )


def held_gradient(reference: ModelChunk, parameter: nn.Parameter) -> Tensor | None:
    """What this rank holds of a gradient; the reference is sharded as the pipeline is."""
    return None if parameter.grad is None else reference.parallel.local(parameter.grad)


def merge_embedding(reference: ModelChunk) -> None:
    """Give both copies of a split embedding the sum of their gradients, as SharedEmbedding does."""
    named = dict(reference.module.named_parameters())
    if "late_embedding" not in named:
        return
    copies = (named["embedding"], named["late_embedding"])
    parts: list[Tensor] = [copy.grad for copy in copies if copy.grad is not None]
    for copy in copies:
        copy.grad = sum(parts[1:], start=parts[0].clone()) if parts else None
