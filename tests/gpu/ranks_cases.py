"""What several ranks verify on GPUs: one line a case. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

TRANSPORTS = ("all_to_all", "symmetric_memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One comparison of the overlapped step with another step, on all ranks."""

    what: str
    """Its name, without the transport."""
    transport: str = ""
    rule: str = "uniform1-hidden"
    """A name of test_verify.RULES."""
    order: str = "multi_queue"
    delay_wgrad: bool = False
    lead: int = 0
    model: Mapping[str, Any] = field(default_factory=dict)
    """Changes of test_verify.SHAPE."""
    dtype: str = "bfloat16"
    experts_per_rank: int = 4
    lengths: tuple[int, ...] = (64,)
    """Tokens of a sequence, by rank in turn."""
    first_rank: bool = False
    """All tokens go to the experts of the first rank."""
    lanes: str = "plain"
    """Or `late_comm`, `late_compute`: one stream lags."""
    against: str = "reference"
    """Or `contiguous`."""
    broken: str = ""
    """What is broken on purpose; then it must differ."""
    data: str = "replicas"
    """How ranks share what is no expert: `replicas`, `fsdp` (needs NCCL), or `none`: gradients stay apart."""
    never_waits: bool = False
    """Another step is run, in which the host must not wait for the device."""

    @property
    def name(self) -> str:
        """As results show it."""
        return f"{self.transport} {self.what}"


_DROPOUT = {"dropout": 0.1, "jitter": 0.05}
_DEPTHS = {"mtp": 1, "mhc": 4, **_DROPOUT}
_WHATS = (
    Case(what="none", rule="none", model=_DROPOUT),
    Case(what="exposed, multi_queue", rule="uniform1", model=_DROPOUT),
    Case(what="exposed, single_queue", rule="uniform2", order="single_queue", delay_wgrad=True, model=_DROPOUT),
    Case(what="hidden, multi_queue", model=_DROPOUT),
    Case(what="hidden, single_queue", order="single_queue", delay_wgrad=True, model=_DROPOUT),
    Case(what="hidden, lead 2", order="single_queue", delay_wgrad=True, lead=2, model=_DROPOUT),
    Case(what="hidden, segments of two", rule="uniform2-hidden", model=_DROPOUT),
    Case(what="hidden, block, a dense layer", rule="block3-hidden", model={"dense_layers": 1}),
    Case(what="mtp 1, exposed, multi_queue", rule="uniform1", model={"mtp": 1, **_DROPOUT}),
    Case(what="mtp 1, hidden, multi_queue", model={"mtp": 1, **_DROPOUT}),
    Case(what="mtp 1, hidden, single_queue", order="single_queue", delay_wgrad=True, model={"mtp": 1, **_DROPOUT}),
    Case(what="mhc 4, exposed, multi_queue", rule="uniform1", model={"mhc": 4, **_DROPOUT}),
    Case(what="mhc 4, hidden, multi_queue", model={"mhc": 4, **_DROPOUT}),
    Case(what="mtp 1, mhc 4, hidden, single_queue", order="single_queue", delay_wgrad=True, model=_DEPTHS),
    Case(what="float32, mtp 1, mhc 4, exposed", rule="uniform1", model=_DEPTHS, dtype="float32"),
    Case(what="float32, mtp 1, mhc 4, hidden", model=_DEPTHS, dtype="float32"),
    Case(what="tied embedding", model={"tied": True}),
    Case(what="all tokens to the first rank, exposed", rule="uniform1", first_rank=True),
    Case(what="all tokens to the first rank, hidden", first_rank=True),
    Case(what="one local expert", experts_per_rank=1),
    Case(what="uneven lengths", lengths=(64, 41), model=_DROPOUT),
    Case(what="capacity, the host never waits", model={"capacity": 40}, never_waits=True),
    Case(what="late communication", lanes="late_comm"),
    Case(what="late compute, none", lanes="late_compute", rule="none"),
    Case(what="late compute, hidden", lanes="late_compute"),
    Case(what="against the contiguous step", against="contiguous", data="none", model=_DROPOUT),
    Case(what="fsdp, none", rule="none", data="fsdp", model=_DROPOUT),
    Case(what="fsdp, exposed, multi_queue", rule="uniform1", data="fsdp", model=_DROPOUT),
    Case(what="fsdp, hidden, multi_queue", data="fsdp", model=_DROPOUT),
    Case(what="fsdp, hidden, single_queue", order="single_queue", delay_wgrad=True, data="fsdp", model=_DROPOUT),
    Case(what="fsdp, hidden, lead 2", lead=2, data="fsdp", model=_DROPOUT),
    Case(what="fsdp, mtp 1, mhc 4, hidden", data="fsdp", model=_DEPTHS),
    Case(what="fsdp, float32, hidden", data="fsdp", model=_DROPOUT, dtype="float32"),
    Case(what="fsdp, late communication", lanes="late_comm", data="fsdp"),
    Case(what="fsdp, late compute", lanes="late_compute", data="fsdp"),
    Case(what="control: no seeds", model=_DROPOUT, broken="no_rng"),
)

CASES = (
    *(replace(case, transport=transport) for transport in TRANSPORTS for case in _WHATS),
    Case(what="control: no barrier", transport="symmetric_memory", broken="no_barrier"),
)
