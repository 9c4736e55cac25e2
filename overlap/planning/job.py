"""Job: a model on a grid of ranks, as the planner sees it; every rule is checked when it is made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from overlap.model.config import DType, ModelConfig
from recompute.checks import check_kind, check_positive
from recompute.config import check_bool, check_count, parse_choice
from recompute.errors import ConfigError


class PipelineSchedule(StrEnum):
    """Pipeline schedule; where a rank's forward and backward meet, they run as an overlapped pair."""

    ONE_F_ONE_B = "1f1b"
    """Steady-state pairs of 1F1B (interleaved with `virtual` > 1), one more microbatch of warm-up."""
    DUALPIPEV = "dualpipev"
    """Two chunks a rank in V shape; pairs as the schedule gives them."""
    ZBV = "zbv"
    """Two chunks a rank in V shape; no pairs."""


class RoutingLoad(StrEnum):
    """How many rows reach one expert-parallel rank."""

    BALANCED = "balanced"
    """As many as it sends."""
    SKEWED = "skewed"
    """`skew` times as many."""
    WORST = "worst"
    """Every token of the group sends this rank all the copies that its experts can take."""


class Optimizer(StrEnum):
    """Where the optimizer keeps its state."""

    ADAMW = "adamw"
    """Moments and float32 master weights on every rank."""
    DISTRIBUTED = "distributed"
    """The same, sharded over the ranks that share the weights."""


V_SHAPED = frozenset({PipelineSchedule.DUALPIPEV, PipelineSchedule.ZBV})
ITEM_SIZE = {DType.FLOAT32: 4, DType.BFLOAT16: 2, DType.FLOAT64: 8}
_CHOICES: dict[str, type[StrEnum]] = {
    "schedule": PipelineSchedule, "routing": RoutingLoad, "optimizer": Optimizer
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job.

    Raises:
        ConfigError: A value breaks a rule; names field, value and rule.
    """

    model: ModelConfig
    pp: int = 1
    """Pipeline ranks."""
    virtual: int = 1
    """Model chunks of a pipeline rank (two for the V-shaped schedules)."""
    ep: int = 1
    """Ranks that share a layer's experts."""
    dp: int = 1
    """Ranks that hold the same dense weights; a multiple of `ep`."""
    microbatches: int = 2
    """Of a step, per data-parallel rank."""
    seq: int = 16
    """Tokens of a sequence."""
    batch: int = 1
    """Sequences of a microbatch."""
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    routing: RoutingLoad = RoutingLoad.BALANCED
    skew: float = 1.0
    """Received over sent rows, with routing `skewed`."""
    optimizer: Optimizer = Optimizer.DISTRIBUTED
    shards: int = 1
    """Ranks that hold the same segment inputs, as a tensor- or context-parallel group does: keep="sharded" cuts them
    over these. Nothing else is cut."""
    keep_sends: bool = False
    """Whether what a rank sent stays until the step ends, as torch's pipeline runtime keeps it."""

    def __post_init__(self) -> None:
        check_kind("model", self.model, ModelConfig, "a ModelConfig")
        check_positive("skew", self.skew)
        check_bool("keep_sends", self.keep_sends)
        for name, kind in _CHOICES.items():
            object.__setattr__(self, name, parse_choice(kind, name, getattr(self, name)))
        for name in ("pp", "virtual", "ep", "dp", "microbatches", "seq", "batch", "shards"):
            check_count(name, getattr(self, name), at_least=1)
        for name, holds, rule in self._rules():
            if not holds:
                raise ConfigError(field=name, value=getattr(self, name), rule=rule)

    @property
    def stages(self) -> int:
        """Model chunks of the whole pipeline."""
        return self.pp * self.virtual

    @property
    def tokens(self) -> int:
        """Of a microbatch."""
        return self.seq * self.batch

    @property
    def copies(self) -> int:
        """Rows that a rank sends to the experts: tokens times experts per token."""
        return self.tokens * self.model.topk

    @property
    def local_experts(self) -> int:
        """Experts of a layer on one rank."""
        return self.model.experts // self.ep

    @property
    def received(self) -> int:
        """Rows that reach a rank's experts."""
        if self.routing is RoutingLoad.WORST:
            return self.tokens * self.ep * min(self.model.topk, self.local_experts)
        return -(-int(self.copies * self.skew * 1000) // 1000)

    @property
    def sent(self) -> int:
        """Bytes that a chunk of a pipeline sends on, of a microbatch."""
        return self.tokens * (self.model.mhc or 1) * self.model.hidden * self.item_size

    @property
    def item_size(self) -> int:
        """Bytes of an element of the activations."""
        return ITEM_SIZE[self.model.dtype]

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        model = self.model
        yield "virtual", self.schedule not in V_SHAPED or self.virtual == 2, f"schedule {self.schedule} takes 2"
        yield "schedule", self.pp > 1 or self.schedule not in V_SHAPED, "needs more than one pipeline rank"
        yield "virtual", self.pp > 1 or self.virtual == 1, "needs more than one pipeline rank"
        yield "pp", self.stages <= max(model.layers, 1), f"more chunks than layers ({model.layers})"
        yield "ep", model.experts % self.ep == 0, f"must divide experts ({model.experts})"
        yield "dp", self.dp % self.ep == 0, f"must be a multiple of ep ({self.ep})"
        yield "skew", self.skew >= 1, "must be at least 1"
        rule = "has an effect with routing skewed only: leave it at 1"
        yield "skew", self.routing is RoutingLoad.SKEWED or self.skew == 1, rule
        yield "routing", self.ep > 1 or self.routing is RoutingLoad.BALANCED, "needs ep above 1: one rank gets all rows"
        least = self.stages if self.schedule in V_SHAPED else self.pp
        yield "microbatches", self.pp == 1 or self.microbatches >= least, f"the schedule needs {least} or more"
        whole = self.schedule in V_SHAPED or self.pp == 1 or self.microbatches % self.pp == 0
        yield "microbatches", whole, f"must be a multiple of pp ({self.pp})"
        yield "seq", self.seq <= model.max_seq, f"must not exceed max_seq ({model.max_seq})"
