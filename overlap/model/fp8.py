"""Fp8Config: which low-precision recipe a model's products run in, and which layers stay in bfloat16. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from recompute.errors import ConfigError


class Recipe(StrEnum):
    """How tensors are scaled into 8 bits."""

    BLOCK = "block"
    """A scale per block of 128 (weights 128 x 128), from the tensor itself."""
    CURRENT = "current"
    """A scale per tensor, from the tensor itself."""
    DELAYED = "delayed"
    """A scale per tensor, from the largest values of earlier steps."""
    MXFP8 = "mxfp8"
    """A scale per block of 32, a power of two; needs hardware for it."""


ROW_MULTIPLE: dict[Recipe, int] = {Recipe.BLOCK: 16, Recipe.CURRENT: 16, Recipe.DELAYED: 16, Recipe.MXFP8: 32}
"""What rows of a product, and its widths, must be a multiple of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Config:
    """Low precision of a model.

    Raises:
        ConfigError: An unknown recipe, or a negative count of layers.
    """

    recipe: Recipe
    """Takes its text too."""
    first_bf16: int = 0
    """Leading decoder layers that stay in the model's own type."""
    last_bf16: int = 0
    """Trailing decoder layers that do; MTP depths are not counted and run in 8 bits."""
    amax_history: int = 1024
    """Steps that a scale of recipe `delayed` looks back on."""

    def __post_init__(self) -> None:
        if self.recipe not in [str(member) for member in Recipe]:
            raise ConfigError(field="fp8", value=self.recipe, rule="must be one of " + ", ".join(Recipe))
        object.__setattr__(self, "recipe", Recipe(self.recipe))
        for name, least in (("first_bf16", 0), ("last_bf16", 0), ("amax_history", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(field=f"fp8_{name}", value=value, rule=f"must be an integer, {least} or more")
        if self.recipe is not Recipe.DELAYED and self.amax_history != 1024:
            rule = f"has no effect with recipe {self.recipe}: leave it at its default"
            raise ConfigError(field="fp8_amax_history", value=self.amax_history, rule=rule)

    def covers(self, layer: int, layers: int) -> bool:
        """Whether a layer runs in 8 bits; layers from `layers` up are MTP depths."""
        return layer >= layers or self.first_bf16 <= layer < layers - self.last_bf16
