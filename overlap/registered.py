"""Registered: what a module held when a program was made from it; says whether something else stands there now.

Stages may name a parameter or buffer (what trains, in-place state, what ranks reduce), so a program is bound to those
objects. A conversion, `load_state_dict(assign=True)` or an assignment may put others in their place at any time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

_dtype = attrgetter("dtype")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Registered:
    """Parameters, buffers and parts of a module and of all its parts, at one moment."""

    places: tuple[Collection[Any], ...]
    """Live views of the tables that they are registered in."""
    held: tuple[Any, ...]
    tensors: tuple[Tensor, ...]
    """Those of `held` that are tensors."""
    dtypes: tuple[torch.dtype, ...]
    """Theirs: a conversion may change a parameter's data and leave the object."""

    @classmethod
    def of(cls, module: nn.Module) -> Registered:
        """What a module holds now."""
        tables = (table for part in module.modules() for table in (part._parameters, part._buffers, part._modules))
        places = tuple(table.values() for table in tables)
        held = tuple(chain.from_iterable(places))
        tensors = tuple(item for item in held if isinstance(item, Tensor))
        return cls(places=places, held=held, tensors=tensors, dtypes=tuple(map(_dtype, tensors)))

    def still(self) -> bool:
        """Whether the module holds the same now, of the same types; asked in every step, so no walk over its parts."""
        now = tuple(chain.from_iterable(self.places))
        return (
            len(now) == len(self.held)
            and all(map(is_, now, self.held))
            and tuple(map(_dtype, self.tensors)) == self.dtypes
        )
