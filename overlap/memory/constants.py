"""What only the CPU allocator counts: constants in graphs, and the states of generators while a stage draws.

A Python number that multiplies a tensor becomes a CPU tensor that the graph keeps. Dispatch modes see neither, and on
an accelerator they take no device memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from recompute.tape import Tape

_SAVED = ("_raw_saved_other", "_raw_saved_self")
"""Where torch's binary operators keep an operand; raw, for asking for the operand would rebuild what is rebuilt."""


class SeenGenerator(torch.Generator):
    """A CPU generator of nobody, whose states are allocated where a tracker sees them; fake tensors draw nothing."""

    def get_state(self) -> Tensor:
        """As many bytes as a state takes, without meaning."""
        return torch.empty(super().get_state().nbytes, dtype=torch.uint8)

    def set_state(self, state: Tensor) -> Self:
        """Nothing to put back."""
        return self


def constants_of(tape: Tape) -> Iterator[tuple[int, Tensor]]:
    """The constants that a tape recorded on fake tensors holds, each with the sequence number of its node."""
    seen: set[Any] = set()
    todo = [edge.node for edge in tape.edges if edge is not None]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        for name in _SAVED:
            saved = getattr(node, name, None)
            # Hooks stand in for tensors only, never for numbers.
            value = None if saved is None or saved.unpack_hook is not None else saved.data
            if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
                yield node._sequence_nr(), value
        todo += [following for following, _ in node.next_functions if following is not None]
