"""ParallelLayout: which rank holds what. Pure arithmetic; no process group is needed to ask.

Ranks are numbered with expert parallelism innermost, so that the ranks that exchange tokens in every layer stand
next to each other (on one node), then the replicas of an expert, then pipeline stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from recompute.errors import ConfigError

DIMENSIONS = ("pp", "expert_data", "ep")
"""Names of the mesh dimensions, outermost first."""


class Place(NamedTuple):
    """A rank's place along each dimension of the mesh."""

    pp: int
    """Pipeline stage."""
    expert_data: int
    """Which replica of its experts it holds."""
    ep: int
    """Which slice of the experts it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Sizes of the mesh dimensions.

    Raises:
        ConfigError: A size is no positive integer, or they do not divide each other as the fields say.
    """

    world_size: int = 1
    """Processes of the job."""
    ep: int = 1
    """Ranks that share the experts of a layer; divides the ranks of a pipeline stage."""
    pp: int = 1
    """Pipeline stages; divides `world_size`."""

    def __post_init__(self) -> None:
        for name in ("world_size", "ep", "pp"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(field=name, value=value, rule="must be an integer of at least 1")
        if self.world_size % self.pp:
            rule = f"must divide the number of processes ({self.world_size})"
            raise ConfigError(field="pp", value=self.pp, rule=rule)
        if self.data % self.ep:
            rule = f"must divide the number of processes of a pipeline stage ({self.data})"
            raise ConfigError(field="ep", value=self.ep, rule=rule)

    @property
    def data(self) -> int:
        """Ranks of one pipeline stage: each draws its own data and holds a replica of the dense parameters."""
        return self.world_size // self.pp

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same experts."""
        return self.data // self.ep

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sizes of DIMENSIONS."""
        return (self.pp, self.expert_data, self.ep)

    def place(self, rank: int) -> Place:
        """The place of a rank.

        Raises:
            ConfigError: There is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ConfigError(field="rank", value=rank, rule=f"must lie within 0 and {self.world_size - 1}")
        stage, within = divmod(rank, self.data)
        return Place(stage, *divmod(within, self.ep))

    def data_rank(self, rank: int) -> int:
        """Which data a rank draws: its number within its pipeline stage."""
        return rank % self.data

    def ep_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that exchange tokens, group by group."""
        return tuple(tuple(range(first, first + self.ep)) for first in range(0, self.world_size, self.ep))

    def data_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that hold the same dense parameters."""
        return tuple(tuple(range(first, first + self.data)) for first in range(0, self.world_size, self.data))

    def expert_data_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that hold the same experts."""
        return tuple(tuple(ranks[first :: self.ep]) for ranks in self.data_groups() for first in range(self.ep))

    def pp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that hand microbatches to each other, first stage first."""
        return tuple(tuple(range(first, self.world_size, self.data)) for first in range(self.data))

    def local_experts(self, experts: int, rank: int) -> range:
        """The experts of a layer that a rank holds.

        Raises:
            ConfigError: `ep` does not divide the number of experts.
        """
        if experts % self.ep:
            raise ConfigError(field="ep", value=self.ep, rule=f"must divide experts ({experts})")
        each = experts // self.ep
        first = self.place(rank).ep * each
        return range(first, first + each)
