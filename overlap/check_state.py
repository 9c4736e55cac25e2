"""Does every stage that sees in-place state declare it? Part of check_stages.

Between a stage's first pass and its replay other microbatches move on what stages change in place. Who declares a
buffer in `state` sees it then as the first pass did; who reads it undeclared, or reads a value that shares its memory,
would see what the others left of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from overlap.errors import ProgramError
from overlap.ir import Program, Stage


class ChangingState:
    """The buffers that stages of a program change in place.

    Args:
        program: The stages.
        buffers: The module's, by name.
    """

    def __init__(self, program: Program, buffers: Mapping[str, Tensor]) -> None:
        changing = [(buffer, stage) for stage in reversed(program.stages) for buffer in stage.state]
        self._changed_by = {storage: stage for buffer, stage in changing for storage in _storages(buffer)}
        self._names = {storage: name for name, buffer in buffers.items() for storage in _storages(buffer)}

    @contextmanager
    def seen_by(self, stage: Stage) -> Iterator[None]:
        """Run a stage's forward inside.

        Raises:
            ProgramError: It reads a buffer that another stage changes, and does not declare it.
        """
        declared = {storage for buffer in stage.state for storage in _storages(buffer)}
        foreign = self._changed_by.keys() - declared
        if not foreign:
            yield
            return
        with _Reads() as reads:
            yield
        if found := foreign & reads.storages:
            storage = min(found, key=self._name)
            raise ProgramError(
                f"stage {stage.label} reads buffer {self._name(storage)!r}, which stage "
                f"{self._changed_by[storage].label} changes in place: declare it in state= of both (R5)"
            )

    def check_written(self, stage: Stage, outputs: Sequence[Any]) -> None:
        """Check that what a stage writes is not such a buffer, nor a view of one.

        Raises:
            ProgramError: It is.
        """
        for name, output in zip(stage.writes, outputs, strict=True):
            for storage in _storages(output):
                if storage in self._changed_by:
                    raise ProgramError(
                        f"stage {stage.label} writes {name!r}, which is buffer {self._name(storage)!r} itself, and "
                        f"stage {self._changed_by[storage].label} changes that in place: return a copy (R5)"
                    )

    def _name(self, storage: int) -> str:
        return self._names.get(storage, "of no module")


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Notes the storages of all that operations get."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the operation as it is."""
        keywords = kwargs or {}
        self.storages |= _storages((args, keywords))
        return func(*args, **keywords)


def _storages(value: Any) -> set[int]:
    """The storages of all tensors in a value; a sparse one has none of its own."""
    tensors = [leaf for leaf in tree_leaves(value) if torch.is_tensor(leaf) and leaf.layout is torch.strided]
    return {tensor.untyped_storage()._cdata for tensor in tensors}
