"""Weights: which parameters of a program are values, and stage functions that read them as such (R3).

A parameter that several stages read (tied embedding, repeated MTP layer) is a value. The modules that use it do not
know: a stage function runs with the value in the parameter's place (torch.func.functional_call).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.func import functional_call

from overlap.builder import ProgramBuilder, Value
from overlap.model.in_place import ChangesInPlace
from recompute.errors import ConfigError


class Bound(NamedTuple):
    """A stage function, what it reads, and what it declares: parameters that it reads past the values, and state."""

    forward: Callable[..., Any]
    reads: tuple[Value, ...]
    parameters: tuple[nn.Parameter, ...]
    state: tuple[Tensor, ...]
    """Buffers that the function's modules change in place."""


class Weights:
    """The parameters that are values in one program.

    Args:
        b: The program's builder.
        shared: These parameters, by name.
        owner: The module that they are registered in, where a step finds what stands in their place.

    Raises:
        ConfigError: One is computed from others and not registered.
    """

    def __init__(self, b: ProgramBuilder, shared: Mapping[str, nn.Parameter], owner: nn.Module) -> None:
        paths = {id(parameter): path for path, parameter in owner.named_parameters()}
        for name, parameter in shared.items():
            if id(parameter) not in paths:
                rule = "several stages read it as a value, so it must be a parameter: no parametrisation goes with it"
                raise ConfigError(field=name, value=type(parameter).__name__, rule=rule)
        self._values = {
            id(parameter): b.parameter(name, parameter, partial(owner.get_parameter, paths[id(parameter)]))
            for name, parameter in shared.items()
        }

    def value(self, parameter: nn.Parameter) -> Value:
        """Handle of a shared parameter."""
        return self._values[id(parameter)]

    def bind(self, function: Callable[..., Any], reads: Sequence[Value], modules: Sequence[nn.Module]) -> Bound:
        """Make a stage function.

        Args:
            function: Called with what `reads` hold; uses the parameters of `modules` and no others.
            reads: Values it takes.
            modules: Where its parameters are.

        Returns:
            The function, which takes shared parameters as further arguments, and what the stage declares.
        """
        body = _Body(function, modules)
        named = dict(body.named_parameters())
        shared = {name: self.value(p) for name, p in named.items() if id(p) in self._values}
        own = tuple(p for p in named.values() if id(p) not in self._values)
        changing = [part for part in body.modules() if isinstance(part, ChangesInPlace)]
        state = tuple(buffer for part in changing for buffer in part.state)
        if not shared:
            return Bound(function, tuple(reads), own, state)
        return Bound(_Swapped(body, tuple(shared)), (*reads, *shared.values()), own, state)


class _Body(nn.Module):
    """A stage function as a module that owns the modules it uses."""

    def __init__(self, function: Callable[..., Any], modules: Sequence[nn.Module]) -> None:
        super().__init__()
        # a module in here twice would be swapped twice, and put back wrong; a partial is no module
        self.function = partial(function)
        self.parts = nn.ModuleList(modules)

    def forward(self, *args: Any, **keywords: Any) -> Any:
        """Call the function."""
        return self.function(*args, **keywords)


class _Swapped:
    """Calls a body with its last arguments in place of the parameters of these names."""

    def __init__(self, body: _Body, names: tuple[str, ...]) -> None:
        self._body = body
        self._names = names

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        cut = len(args) - len(self._names)
        return functional_call(self._body, dict(zip(self._names, args[cut:], strict=True)), args[:cut], keywords)
