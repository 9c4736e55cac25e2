"""PipelineLayout: which rank runs which virtual stage, and which decoder layers that holds. Pure arithmetic.

Legend: P pipeline ranks, V virtual stages per rank; stages are numbered 0 to P*V - 1 in the order of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import NoneType

from recompute.checks import check_kind
from recompute.config import check_count, parse_choice
from recompute.errors import ConfigError


class Placement(StrEnum):
    """Which ranks hold the virtual stages."""

    LOOP = "loop"
    """Stage s on rank s mod P."""
    V = "v"
    """Two stages per rank: down the ranks and up again, so the first rank holds the first and the last stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLayout:
    """Virtual stages over pipeline ranks.

    Raises:
        ConfigError: A count is no positive integer, `layers` has not one count per stage, or a V has not two stages
            per rank.
    """

    pp: int
    """Pipeline ranks."""
    vpp: int
    """Virtual stages per rank."""
    layers: tuple[int, ...]
    """Decoder layers of each virtual stage; 0 is an empty stage. The first also holds the embedding, the last the MTP
    depths and the head."""
    placement: Placement = Placement.LOOP

    def __post_init__(self) -> None:
        check_count("pp", self.pp, at_least=1)
        check_count("vpp", self.vpp, at_least=1)
        # a frozen dataclass has no other way to normalise a field of its own
        object.__setattr__(self, "placement", parse_choice(Placement, "placement", self.placement))
        check_kind("pp_layout", self.layers, tuple, "a tuple of the layers of each virtual stage")
        for count in self.layers:
            check_count("pp_layout", count, at_least=0)
        if len(self.layers) != self.num_stages:
            rule = f"must give the layers of each of the {self.num_stages} virtual stages"
            raise ConfigError(field="pp_layout", value=self.layers, rule=rule)
        if self.placement is Placement.V and self.vpp != 2:
            rule = "must be 2 for a schedule whose stages go down the ranks and up again"
            raise ConfigError(field="vpp", value=self.vpp, rule=rule)

    @property
    def num_stages(self) -> int:
        """Virtual stages in all."""
        return self.pp * self.vpp

    @property
    def num_layers(self) -> int:
        """Decoder layers in all."""
        return sum(self.layers)

    def layers_of(self, stage: int) -> range:
        """The decoder layers of a virtual stage, by their number in the model."""
        first = sum(self.layers[:stage])
        return range(first, first + self.layers[stage])

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that runs a virtual stage."""
        if self.placement is Placement.V and stage >= self.pp:
            return self.num_stages - 1 - stage
        return stage % self.pp

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The virtual stages of a pipeline rank, in the order of the model."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)


def even_layers(layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage, as even as can be: the first stages take what is left over.

    >>> even_layers(5, 4)
    (2, 1, 1, 1)
    """
    each, left = divmod(layers, num_stages)
    return tuple(each + (stage < left) for stage in range(num_stages))


def parse_layers(text: str) -> tuple[int, ...]:
    """Read `3,2,0,3`.

    Raises:
        ConfigError: A word is no number.
    """
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        rule = "must be the layers of each virtual stage, as 3,2,0,3"
        raise ConfigError(field="pp_layout", value=text, rule=rule)
    return tuple(int(word) for word in words)


def make_layout(
    *, pp: int, vpp: int, layers: int, per_stage: Sequence[int] | None = None, placement: Placement = Placement.LOOP
) -> PipelineLayout:
    """A layout of a model's layers, even if `per_stage` is None.

    Raises:
        ConfigError: As PipelineLayout; `per_stage` does not add up to the model's layers.
    """
    check_count("pp", pp, at_least=1)
    check_count("vpp", vpp, at_least=1)
    check_count("layers", layers, at_least=0)
    check_kind("pp_layout", per_stage, (list, tuple, NoneType), "the layers of each virtual stage, or None")
    chosen = even_layers(layers, pp * vpp) if per_stage is None else tuple(per_stage)
    layout = PipelineLayout(pp=pp, vpp=vpp, layers=chosen, placement=placement)
    if layout.num_layers != layers:
        rule = f"must add up to the model's {layers} layers"
        raise ConfigError(field="pp_layout", value=chosen, rule=rule)
    return layout
