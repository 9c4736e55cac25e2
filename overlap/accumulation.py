"""Calls of a step function that add up to one optimizer step: all scale their losses alike, or their sum is no mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from overlap.chunk import ModelChunk
from overlap.engine import Feeds
from overlap.scale import check_scale
from recompute.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call: what its scale was made from, and the scale."""

    microbatches: int
    accumulate: int
    total_tokens: int | None
    scale: float
    """Factor on the gradients of its losses."""


_begun: WeakKeyDictionary[object, Call] = WeakKeyDictionary()
"""The calls that wait for one with last=True: the newest of each model."""


def next_call(
    model: object,
    chunks: Sequence[ModelChunk],
    microbatches: Sequence[Feeds],
    accumulate: int,
    total_tokens: int | None,
) -> Call:
    """The call that is about to be made, checked against those before it of the same optimizer step.

    Where all gradients are gone (None), it begins another one.

    Args:
        model: What the calls are made for: the chunk, or the pipeline.
        chunks: Its chunks, with one loss scale.
        microbatches: As the call gets them.
        accumulate: As the call gets it.
        total_tokens: As the call gets them.

    Raises:
        ConfigError: Names the argument that would scale these losses otherwise than those before, or a loss scale that
            is not for the model's losses; or see LossScale.
    """
    for chunk in chunks:
        check_scale(chunk.module, chunk.loss_scale)
    scale = chunks[0].loss_scale.factor(microbatches, accumulate, total_tokens)
    call = Call(microbatches=len(microbatches), accumulate=accumulate, total_tokens=total_tokens, scale=scale)
    before = _begun.get(model)
    if before is None or before.scale == scale:
        return call
    if all(parameter.grad is None for chunk in chunks for parameter in chunk.module.parameters()):
        return call
    for field, value, earlier in (
        ("total_tokens", call.total_tokens, before.total_tokens),
        ("microbatches", call.microbatches, before.microbatches),
        ("accumulate", call.accumulate, before.accumulate),
    ):
        if value != earlier:
            rule = f"the calls before had {earlier}: up to the one with last=True all must scale their losses alike"
            raise ConfigError(field=field, value=value, rule=rule)
    return call


def begin_call(model: object, chunks: Sequence[ModelChunk]) -> None:
    """Forget the calls before: if this one fails, gradients are undefined, and the optimizer step begins anew.

    Args:
        model: What the call is made for.
        chunks: Its chunks. Where no call waits for its last one, gradients that are there are those of earlier steps.
    """
    if _begun.pop(model, None) is None:
        for chunk in chunks:
            chunk.parallel.keep_reduced(chunk.program)


def end_call(model: object, call: Call, *, last: bool) -> None:
    """Note a call that succeeded, for the next one to be checked against."""
    if not last:
        _begun[model] = call
