"""StageCosts: milliseconds of each slot kind, from a preset, a JSON file or a recorded timeline.

Owns the numbers only. What they mean for a step is simulate's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from overlap.ir import Lane, Op
from overlap.recordings import pick, read_json, split_name
from overlap.timeline import Timeline
from recompute.errors import ConfigError

Part = tuple[Op, str]
"""(op, stage name)."""

_FALLBACK = {Op.NO_GRAD: Op.FORWARD, Op.REPLAY: Op.FORWARD, Op.BACKWARD: Op.FORWARD}
"""What a part without a time of its own takes: the first pass and the replay run the forward; a transfer goes back at
the price of the way there. (A compute stage's backward has to be given.)"""
_SCHEMA = "must be {milliseconds: {'F.attn': 0.4, ...}, kernels: 20, host_milliseconds: 0.0}, the last two optional"
_FIELDS = frozenset({"milliseconds", "kernels", "host_milliseconds"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """How long slots take on their lane."""

    name: str
    milliseconds: Mapping[Part, float]
    """Per (op, stage name). N and R fall back to F; B to F for transfers. B is without the weight gradients, W is
    these alone: where they are not delayed, the slot takes both."""
    kernels: int = 20
    """Kernels of a compute slot; all take the same time. A transfer is one."""
    host_milliseconds: float = 0.0
    """Host time to launch one slot."""
    transfers: frozenset[str] = field(default=frozenset({"dispatch", "combine"}))
    """Stages that only communicate."""

    def of(self, op: Op, stage: str) -> float:
        """Milliseconds of one slot.

        Raises:
            ConfigError: No time is given for it.
        """
        if (op, stage) in self.milliseconds:
            return self.milliseconds[op, stage]
        fallback = _FALLBACK.get(op)
        if fallback is None or (op is Op.BACKWARD and stage not in self.transfers):
            rule = f"has no time for {op.value}.{stage}: give milliseconds for it"
            raise ConfigError(field="costs", value=self.name, rule=rule)
        return self.of(fallback, stage)

    def has(self, op: Op, stage: str) -> bool:
        """Whether a time is given for this very part."""
        return (op, stage) in self.milliseconds

    def scaled_transfers(self, factor: float) -> StageCosts:
        """The same with transfers that take `factor` times as long."""
        times = {
            (op, stage): ms * factor if stage in self.transfers else ms for (op, stage), ms in self.milliseconds.items()
        }
        return StageCosts(
            name=f"{self.name}, transfers x {factor:g}", milliseconds=MappingProxyType(times), kernels=self.kernels,
            host_milliseconds=self.host_milliseconds, transfers=self.transfers,
        )  # fmt: skip

    def as_json(self) -> dict[str, object]:
        """What `read_costs` reads."""
        times = {f"{op.value}.{stage}": ms for (op, stage), ms in self.milliseconds.items()}
        return {"milliseconds": times, "kernels": self.kernels, "host_milliseconds": self.host_milliseconds}


def _preset(name: str, **times: float) -> StageCosts:
    parts = {(Op(part[0]), part[2:]): ms for part, ms in times.items()}
    return StageCosts(name=name, milliseconds=MappingProxyType(parts))


PRESETS: Mapping[str, StageCosts] = MappingProxyType({
    # A layer pair measured on an H200: 3.90 ms of compute for its F + B + W + R, 0.63 ms for one all-to-all. How the
    # compute splits over stages was not measured: the split is fitted to the times measured for three orders (4.94,
    # 4.48 and 4.27 ms a pair). Take costs from a recorded run of the model in question where one is to be had.
    "h200": _preset(
        "h200", F_attn=0.64, F_experts=0.44, F_post=0.04, B_attn=0.65, B_experts=0.44, B_post=0.04, W_attn=0.13,
        W_experts=0.44, F_dispatch=0.63, F_combine=0.63, F_embed=0.02, B_embed=0.05, F_head=0.9, B_head=0.9, W_head=0.9,
    ),
    # The queue model's unit costs: 28.6 of compute and five transfers of 3 a pair.
    "units": _preset(
        "units", F_attn=3, F_experts=4, F_post=0.3, B_attn=4, B_experts=4, B_post=0.3, W_attn=2, W_experts=4,
        F_dispatch=3, F_combine=3, F_embed=0.1, B_embed=0.1, F_head=6, B_head=6, W_head=6,
    ),
})  # fmt: skip


def load_costs(name: str) -> StageCosts:
    """The preset of that name, or the costs in the JSON file of that name, or of a recorded run.

    Args:
        name: A preset; a file that `as_json` describes; or a trace, with `#N` at its end if it holds several timelines.

    Raises:
        ConfigError: There is neither, or the file breaks the schema.
    """
    if name in PRESETS:
        return PRESETS[name]
    path = Path(split_name(name)[0])
    if not path.is_file():
        rule = f"must be one of {', '.join(PRESETS)}, or a JSON file"
        raise ConfigError(field="costs", value=name, rule=rule)
    content = read_json("costs", str(path))
    if not isinstance(content, dict) or "traceEvents" not in content:
        return read_costs(path.stem, content)
    timelines = pick("costs", name, content)
    if len(timelines) != 1:
        rule = f"the file holds {len(timelines)} timelines: name one of them as {path}#0"
        raise ConfigError(field="costs", value=name, rule=rule)
    return costs_of(timelines[0])


def read_costs(name: str, content: Any) -> StageCosts:
    """Read what `as_json` writes.

    Raises:
        ConfigError: Names the entry that breaks the schema.
    """
    if not isinstance(content, dict) or not isinstance(content.get("milliseconds"), dict):
        raise ConfigError(field="costs", value=name, rule=_SCHEMA)
    for key in content:
        if key not in _FIELDS:
            raise ConfigError(field=f"costs.{key}", value=content[key], rule=f"is not known; {_SCHEMA}")
    kernels, host = content.get("kernels", 20), content.get("host_milliseconds", 0.0)
    if type(kernels) is not int or kernels < 1:
        raise ConfigError(field="costs.kernels", value=kernels, rule="must be an integer of at least 1")
    _check_time("costs.host_milliseconds", host)
    times: dict[Part, float] = {}
    for text, ms in content["milliseconds"].items():
        op, _, stage = text.partition(".")
        if op not in {"F", "R", "B", "W"} or not stage.isidentifier():
            rule = "must be F, R, B or W, a dot, a stage name"
            raise ConfigError(field="costs.milliseconds", value=text, rule=rule)
        _check_time(f"costs.milliseconds.{text}", ms)
        times[Op(op), stage] = float(ms)
    return StageCosts(name=name, milliseconds=MappingProxyType(times), kernels=kernels, host_milliseconds=float(host))


def costs_of(timeline: Timeline) -> StageCosts:
    """The median time of every slot kind of a timeline.

    B includes the weight gradients where the run did not delay them; simulate such costs with delayed ones only if
    W was recorded too.
    """
    found: dict[Part, list[float]] = {}
    transfers: set[str] = set()
    for span in timeline.spans:
        op = Op.FORWARD if span.slot.op is Op.NO_GRAD else span.slot.op
        found.setdefault((op, span.slot.stage), []).append(span.milliseconds)
        if span.lane is Lane.COMM:
            transfers.add(span.slot.stage)
    times = {part: median(values) for part, values in found.items()}
    return StageCosts(name=timeline.name, milliseconds=MappingProxyType(times), transfers=frozenset(transfers))


def _check_time(field_name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ConfigError(field=field_name, value=value, rule="must be a number of milliseconds of at least 0")
