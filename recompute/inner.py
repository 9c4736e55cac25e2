"""Parts of a stage that are rebuilt in its own backward: what they save, and what they give, is let go in between.

NOTE [ How a part is rebuilt ]
1. The graph is the one that would be there anyway: same nodes, same edges, same hooks, weight gradients as ever. Only
   what its nodes save is replaced, through saved-tensor hooks.
2. A tensor that the part saves becomes a number: the n-th one saved. Its inputs are kept as they are.
3. A tensor that a later operation of the stage saves and that is an output of the part (by storage) becomes a view of
   that output, to be rebuilt: a projection behind an activation function keeps nothing.
4. The first of these that backward asks for runs the part again, with a graph that is thrown away, and collects all.
5. The part draws from a seed derived from its stage's, whether it is rebuilt or not (R4), and runs in the contexts of
   the first pass (R15).
torch.utils.checkpoint does 2 and 4, keeps the outputs that others saved (so nothing is won at an activation function),
and keeps generator states, which seeds make unnecessary.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from recompute.errors import RecomputeError
from recompute.modules import RecomputeModule
from recompute.rng import draws_inside

Contexts = Sequence[Callable[[], AbstractContextManager[object]]]


class _Saved(NamedTuple):
    """The n-th tensor that a part saved."""

    part: _Part
    place: int


class _View(NamedTuple):
    """A view of an output of a part, as a later operation saved it."""

    part: _Part
    place: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Foreign(NamedTuple):
    """What hooks that were there before made of a tensor."""

    packed: Any
    unpack: Callable[[Any], Tensor]


class _Part:
    """One call of a part: what it takes to run it again, and what was rebuilt and not yet fetched."""

    __slots__ = (
        "_built",
        "_call",
        "_contexts",
        "_inputs",
        "_left",
        "_module",
        "_outputs",
        "_shapes",
        "_views",
        "builds",
    )

    def __init__(self, module: RecomputeModule, call: Callable[..., Any], contexts: Contexts) -> None:
        self._module = module
        self._call = call
        self._contexts = contexts
        self._inputs: list[tuple[Any, bool]] = []
        self._shapes: list[tuple[torch.Size, torch.dtype]] = []
        self._views: dict[int, int] = {}
        """Per output, how many views of it were saved."""
        self._left: dict[int, int] = {}
        """How many of them were not fetched since the last build."""
        self._built: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self.builds = 0

    def first(self, scope: _Scope, inputs: Sequence[Any]) -> Any:
        """Run it with a graph that keeps the inputs and nothing else."""
        self._inputs = [
            (scope.pack(value.detach()), value.requires_grad) if torch.is_tensor(value) else (value, False)
            for value in inputs
        ]
        known = _storages(inputs)

        def pack(tensor: Tensor) -> Any:
            if _storage(tensor) in known:
                return scope.pack(tensor)
            self._shapes.append((tensor.shape, tensor.dtype))
            return _Saved(self, len(self._shapes) - 1)

        with saved_tensors_hooks(pack, _unpack):
            outputs = self._call(*inputs)
        for place, output in enumerate(_as_tuple(outputs)):
            if _storage(output) not in known:
                scope.register(output, self, place)
        return outputs

    def saved(self, place: int) -> Tensor:
        """The n-th tensor that it saved."""
        if place not in self._built:
            self._build()
        return self._built.pop(place)

    def view(self, view: _View) -> Tensor:
        """A view of one of its outputs."""
        if view.place not in self._outputs:
            self._build()
        result = self._outputs[view.place].as_strided(view.size, view.stride, view.offset)
        self._left[view.place] -= 1
        if not self._left[view.place]:
            del self._outputs[view.place]
        return result

    def await_view(self, place: int) -> None:
        """One more view of an output will be fetched."""
        self._views[place] = self._views.get(place, 0) + 1

    def _build(self) -> None:
        self.builds += 1
        inputs = [
            _unpack(packed).detach().requires_grad_(tracks) if _is_packed(packed) else packed
            for packed, tracks in self._inputs
        ]
        known = _storages(inputs)
        built: list[Tensor] = []

        def pack(tensor: Tensor) -> None:
            if _storage(tensor) not in known:
                built.append(tensor.detach())

        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for context in self._contexts:
                stack.enter_context(context())
            stack.enter_context(saved_tensors_hooks(pack, _never))
            outputs = _as_tuple(self._call(*inputs))
        if [(tensor.shape, tensor.dtype) for tensor in built] != self._shapes:
            raise RecomputeError(
                f"module {self._module.value} saved {self._shapes} in its first pass, and "
                f"{[(tensor.shape, tensor.dtype) for tensor in built]} when it was rebuilt"
            )
        self._built = dict(enumerate(built))
        self._outputs = {place: outputs[place].detach() for place in self._views}
        self._left = dict(self._views)


class _Scope:
    """One stage's forward: which modules are rebuilt, and whose outputs are which."""

    def __init__(self, modules: Collection[RecomputeModule], contexts: Contexts) -> None:
        self.modules = modules
        self._contexts = contexts
        self._outputs: dict[int, tuple[_Part, int]] = {}
        # Hooks do not add up, the last ones count: those of the caller go on through this scope.
        self._outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def run(self, module: RecomputeModule, call: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """Run a part and let go of what it saves."""
        return _Part(module, call, self._contexts).first(self, inputs)

    def pack(self, tensor: Tensor) -> Any:
        """What stands for a tensor that an operation outside any part saves."""
        found = self._outputs.get(_storage(tensor))
        if found is not None:
            part, place = found
            part.await_view(place)
            return _View(part, place, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        return tensor if self._outer is None else _Foreign(self._outer[0](tensor), self._outer[1])

    def register(self, output: Tensor, part: _Part, place: int) -> None:
        """Note whose output a storage is, for as long as it lives."""
        storage = output.untyped_storage()
        if storage._cdata not in self._outputs:
            self._outputs[storage._cdata] = (part, place)
            weakref.finalize(storage, self._outputs.pop, storage._cdata, None).atexit = False


_scopes: list[_Scope] = []


@contextmanager
def rebuilding(modules: Collection[RecomputeModule], contexts: Contexts = ()) -> Iterator[None]:
    """Run a stage's forward; parts of it that `rebuild` names and `modules` holds are rebuilt in its backward.

    Args:
        modules: Which.
        contexts: Entered around a part when it is rebuilt: those that the stage's forward runs in, but seeds.
    """
    scope = _Scope(modules, contexts)
    _scopes.append(scope)
    try:
        with saved_tensors_hooks(scope.pack, _unpack):
            yield
    finally:
        _scopes.pop()


def rebuilds(module: RecomputeModule) -> bool:
    """Whether `rebuild` would have a part of this name, called now, rebuilt in backward."""
    return bool(_scopes) and module in _scopes[-1].modules and torch.is_grad_enabled()


def rebuild(module: RecomputeModule, function: Callable[..., Any], *inputs: Any, draws: bool = False) -> Any:
    """Call `function(*inputs)`, a part of a stage that `rebuilding` may ask to rebuild in backward.

    Args:
        module: The part's name.
        function: Pure but for its draws; uses of parameters are fine. Its tensors go in through `inputs` only.
        inputs: Tensors, which are kept, and anything else.
        draws: Whether it draws random numbers: then from a seed of its own within the stage's.

    Returns:
        What `function` returns: a tensor or a tuple of tensors.

    Raises:
        RecomputeError: It draws, is to be rebuilt, and no stage's seed is set.
    """
    seeds = draws_inside(module.value) if draws else None
    call = function if seeds is None else partial(_call_in, seeds, function)
    if not rebuilds(module):
        return call(*inputs)
    if draws and seeds is None:
        raise RecomputeError(f"module {module.value} draws outside a seeded stage: the numbers cannot be drawn again")
    return _scopes[-1].run(module, call, inputs)


def _call_in(context: Callable[[], AbstractContextManager[object]], function: Callable[..., Any], *args: Any) -> Any:
    with context():
        return function(*args)


def _unpack(packed: Any) -> Tensor:
    if type(packed) is _Saved:
        return packed.part.saved(packed.place)
    if type(packed) is _View:
        return packed.part.view(packed)
    if type(packed) is _Foreign:
        return packed.unpack(packed.packed)
    result: Tensor = packed
    return result


def _is_packed(packed: Any) -> bool:
    return torch.is_tensor(packed) or type(packed) in (_View, _Foreign)


def _never(packed: Any) -> Tensor:
    raise RecomputeError("the graph of a rebuilt part is not for backward")


def _as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if torch.is_tensor(outputs) else tuple(outputs)


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _storages(values: Sequence[Any]) -> set[int]:
    return {_storage(value) for value in values if torch.is_tensor(value)}
