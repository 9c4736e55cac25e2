"""The cases: shapes, and the ways to run them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from overlap.model import DType, ModelConfig
from overlap.orders import Order
from recompute import RecomputeConfig, Replay

SEQ = 4096
NONE = RecomputeConfig.none()
MICROBATCHES = 6


def proxy(layers: int, experts: int) -> ModelConfig:
    """A DeepSeek-V3-shaped stand-in: hidden 2048, MLA, top-4 experts of width 1408, vocabulary 32000."""
    return ModelConfig(
        layers=layers,
        experts=experts,
        topk=4,
        hidden=2048,
        heads=16,
        q_rank=512,
        kv_rank=512,
        nope_dim=128,
        rope_dim=64,
        value_dim=128,
        expert_width=1408,
        shared_width=0,
        vocab=32000,
        max_seq=SEQ,
        dtype=DType.BFLOAT16,
    )


PROXIES = {"proxy-8": proxy(8, 32), "proxy-16": proxy(16, 16)}


class Path(StrEnum):
    """How a step runs."""

    OVERLAP = "overlap"
    """The overlap schedule."""
    CONTIGUOUS = "contiguous"
    """Layers whole, one microbatch after another, checkpoint_layers()."""


class Wire(StrEnum):
    """What moves the tokens."""

    LOCAL = "local"
    HOST_LOOPBACK = "host_loopback"
    SM_COPY = "sm_copy"
    ALL_TO_ALL = "all_to_all"
    SYMMETRIC_MEMORY = "symmetric_memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measured run."""

    proxy: str
    path: Path = Path.OVERLAP
    recompute: RecomputeConfig = NONE
    order: str = "multi_queue"
    table: str = ""
    """The text of an order that is not built in."""
    delay_wgrad: bool = False
    lead: int = 0
    wire: Wire = Wire.LOCAL
    wire_scale: float = 1.0
    graph: bool = False
    """Launched as one CUDA graph."""

    @property
    def issue_order(self) -> str | Order:
        """The order of `table`, or the name of a built-in one."""
        return Order.parse(self.order, self.table) if self.table else self.order

    @property
    def name(self) -> str:
        """As the result tables show it."""
        wgrad = ", delayed wgrad" if self.delay_wgrad else ""
        lead = f", lead {self.lead}" if self.lead else ""
        how = f"overlap {self.order}{wgrad}{lead}" if self.path is Path.OVERLAP else "contiguous"
        scale = f" x{self.wire_scale:g}" if self.wire in {Wire.HOST_LOOPBACK, Wire.SM_COPY} else ""
        wire = "" if self.wire is Wire.LOCAL else f", {self.wire}{scale}"
        graph = ", CUDA graph" if self.graph else ""
        return f"{self.proxy}: {self.recompute}, {how}{wire}{graph}"


def memory_cases() -> list[Case]:
    """Activation peaks of the contiguous path, exposed and hidden replay."""
    cases = []
    for name in PROXIES:
        for rule in (RecomputeConfig.none(), RecomputeConfig.uniform(1)):
            cases += _ways(name, rule)
        cases.append(Case(proxy=name, recompute=RecomputeConfig.uniform(1), order="early_release"))
        cases.append(Case(proxy=name, recompute=RecomputeConfig.uniform(1), order="single_queue", delay_wgrad=True))
        cases.append(Case(proxy=name, recompute=hidden(RecomputeConfig.uniform(1)), lead=4))
    for rule in (RecomputeConfig.uniform(2), RecomputeConfig.uniform(4), RecomputeConfig.block(4)):
        cases += _ways("proxy-8", rule)
    cases += _ways("proxy-16", RecomputeConfig.uniform(4))
    return cases


def rank_cases(name: str, wire: Wire) -> list[Case]:
    """Experts over ranks: without overlap, and overlapped in both orders; each without and with recompute."""
    rule = RecomputeConfig.uniform(1)
    base = Case(proxy=name, wire=wire)
    cases = [replace(base, path=Path.CONTIGUOUS, recompute=r) for r in (NONE, rule)]
    for order in ("multi_queue", "single_queue"):
        delay = order == "single_queue"
        cases += [replace(base, recompute=r, order=order, delay_wgrad=delay) for r in (NONE, rule, hidden(rule))]
    return cases


def _ways(name: str, rule: RecomputeConfig) -> list[Case]:
    cases = [Case(proxy=name, path=Path.CONTIGUOUS, recompute=rule), Case(proxy=name, recompute=rule)]
    if rule.enabled:
        cases.append(Case(proxy=name, recompute=hidden(rule)))
    return cases


def hidden(rule: RecomputeConfig) -> RecomputeConfig:
    """The same rule with hidden replay."""
    return RecomputeConfig(
        granularity=rule.granularity, method=rule.method, num_layers=rule.num_layers, replay=Replay.HIDDEN
    )
