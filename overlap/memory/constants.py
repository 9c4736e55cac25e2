"""Constants in graphs: a Python number that multiplies a tensor becomes a CPU tensor that the graph keeps.

The CPU allocator counts it; dispatch modes never see it, and on an accelerator it takes no device memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from recompute.tape import Tape

_SAVED = ("_saved_other", "_saved_self")
"""Where torch's binary operators keep an operand."""


def constants_of(tape: Tape) -> Iterator[Tensor]:
    """The constants that a tape recorded on fake tensors holds."""
    seen: set[Any] = set()
    todo = [edge.node for edge in tape.edges if edge is not None]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        for name in _SAVED:
            saved = getattr(node, name, None)
            if isinstance(saved, Tensor) and not isinstance(saved, FakeTensor):
                yield saved
        todo += [following for following, _ in node.next_functions if following is not None]
