"""What microbatches feed a step: refused if it does not fit the program, and copied where a replay reads it again."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from overlap.chunk import ModelChunk
from overlap.engine import Feeds
from overlap.ir import Program
from recompute.errors import ConfigError
from recompute.keep import copied_feed


def check_feeds(program: Program, microbatches: Sequence[Feeds], *, trains: bool = True) -> None:
    """Refuse microbatches that do not feed the program.

    Args:
        program: What is fed.
        microbatches: Of a step.
        trains: Whether backward follows: a feed that requires grad must then be declared so.

    Raises:
        ConfigError: Names the microbatch and the feed.
    """
    check_names(microbatches, {source.name for source in program.inputs})
    for number, feeds in enumerate(microbatches):
        if trains:
            _check_gradients(program, number, feeds)
        for check in program.feed_checks:
            try:
                check(feeds)
            except ConfigError as error:
                error.add_note(f"in microbatch {number} of the step")
                raise


def check_names(microbatches: Sequence[Feeds], wanted: Collection[str]) -> None:
    """Refuse microbatches that are no list of mappings from these names.

    Raises:
        ConfigError: Names the microbatch.
    """
    if not isinstance(microbatches, Sequence) or not microbatches:
        raise ConfigError(field="microbatches", value=microbatches, rule="a step needs at least one, in a list")
    for number, feeds in enumerate(microbatches):
        if not isinstance(feeds, Mapping) or set(feeds) != wanted:
            given = sorted(map(str, feeds)) if isinstance(feeds, Mapping) else type(feeds).__name__
            rule = f"must feed exactly {sorted(wanted)}"
            raise ConfigError(field=f"microbatches[{number}]", value=given, rule=rule)


def _check_gradients(program: Program, number: int, feeds: Feeds) -> None:
    """A gradient that is not declared would arrive or not as recompute has it: a replay reads a copy of the feed."""
    for source in program.inputs:
        if source.needs_grad:
            _check_carries(number, source.name, feeds[source.name])
            continue
        for leaf in tree_leaves(feeds[source.name]):
            if torch.is_tensor(leaf) and leaf.requires_grad:
                value = f"{leaf.dtype} {tuple(leaf.shape)} that requires grad"
                rule = f"declare input({source.name!r}, needs_grad=True), or detach what is fed"
                raise ConfigError(field=f"microbatches[{number}][{source.name!r}]", value=value, rule=rule)


def _check_carries(number: int, name: str, value: Any) -> None:
    if not torch.is_tensor(value) or not (value.is_floating_point() or value.is_complex()):
        what = str(value.dtype) if torch.is_tensor(value) else type(value).__name__
        rule = f"is declared with needs_grad=True: feed a tensor of a type that can have a gradient, not {what}"
        raise ConfigError(field=f"microbatches[{number}][{name!r}]", value=what, rule=rule)


def replayed_feeds(chunk: ModelChunk, num_microbatches: int) -> list[frozenset[str]]:
    """Per microbatch, the fed values without gradient that its replays read again."""
    trained = chunk.program.trained()
    plain = {source.name for source in chunk.program.inputs if not source.needs_grad}
    return [
        frozenset(name for name, _ in chunk.planner.survivors(config, trained)) & plain
        for config in chunk.configs(num_microbatches)
    ]


def snapshot_feeds(feeds: Feeds, kept: frozenset[str]) -> Feeds:
    """The feeds, copied where a replay reads them: what the caller does to them later must not reach it.

    Raises:
        ConfigError: Names a feed that cannot be copied.
    """
    return {name: _copy(name, value) if name in kept else value for name, value in feeds.items()}


def _copy(name: str, value: Any) -> Any:
    if torch.is_tensor(value):
        return copied_feed(value)
    try:
        return copy.deepcopy(value)
    except Exception as error:
        rule = f"is read again by a replay, so a step copies it, which fails ({error}); feed tensors or plain data"
        raise ConfigError(field=name, value=type(value).__name__, rule=rule) from error
