"""Backends: the only files that import optional packages."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from recompute.errors import ConfigError

if TYPE_CHECKING:
    from overlap.model.backend import Backend
    from overlap.model.fp8 import Fp8Config
    from overlap.parallel.world import World

BACKENDS = ("torch", "te", "te-modules")


def load_backend(name: str, fp8: Fp8Config | None = None, world: World | None = None) -> Backend:
    """A backend by name.

    Args:
        name: One of `BACKENDS`.
        fp8: Low precision; `te` and `te-modules` only.
        world: This rank, if others hold the same weights: scales of recipe `delayed` are theirs too.

    Raises:
        ConfigError: An unknown name, a package or a device that is missing, fp8 with torch.
    """
    if name not in BACKENDS:
        raise ConfigError(field="backend", value=name, rule="must be one of " + ", ".join(BACKENDS))
    if name == "torch":
        if fp8 is not None:
            raise ConfigError(field="fp8", value=str(fp8.recipe), rule="needs backend te")
        made: Backend = import_module("overlap.model.backend").TorchBackend()
        return made
    try:
        module = import_module("overlap.backends.te")
    except ImportError as error:
        rule = f"needs Transformer Engine: pip install moe-recompute-overlap[te] ({error})"
        raise ConfigError(field="backend", value=name, rule=rule) from error
    groups = None if world is None else world.groups
    data, expert_data = (None, None) if groups is None else (groups.data, groups.expert_data)
    made = module.TEBackend(fp8, data, expert_data, modules=name == "te-modules")
    return made
