"""Planner: which recompute setting fits a memory budget, and which of those is fastest. Never imports torch.

Owns the choice. What a setting needs and how long its step takes comes from whoever predicts it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from recompute.config import Granularity, Keep, Method, RecomputeConfig, Replay
from recompute.errors import ConfigError
from recompute.modules import STAGES_OF, RecomputeModule

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)
_ALL_UP_TO = 8
"""Layers of a short chunk: every number of layers is tried. Of a long one doublings are, and all of them."""

SELECTIONS = tuple(
    RecomputeConfig.selective(*names)
    for names in (
        ("attn",),
        ("experts",),
        ("attn", "experts"),
        ("core_attn",),
        ("moe_act",),
        ("layernorm", "moe_act"),
        ("mla_up_proj", "core_attn"),
        ("core_attn", "layernorm", "mla_up_proj", "moe_act"),
    )
)
"""Choices of modules that are tried, where a chunk has them."""


def parse_bytes(text: str, field: str = "budget") -> int:
    """Bytes of a size such as `80GiB`, `1.5 GB` or `4096`.

    Args:
        text: A number and a unit: B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (of 1024); none: bytes.
        field: Name of the setting, for the error.

    Raises:
        ConfigError: It is no size, or zero.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].upper() not in _UNITS:
        rule = "must be a number and a unit (B, KB, MB, GB, TB, KiB, MiB, GiB, TiB), as in 80GiB"
        raise ConfigError(field=field, value=text, rule=rule)
    nbytes = int(float(match[1]) * _UNITS[match[2].upper()])
    if nbytes < 1:
        raise ConfigError(field=field, value=text, rule="must be at least one byte")
    return nbytes


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run a step."""

    recompute: RecomputeConfig
    delay_wgrad: bool

    def __str__(self) -> str:
        """Print as `uniform 1 hidden, delayed wgrad`."""
        return f"{self.recompute}{', delayed wgrad' if self.delay_wgrad else ''}"


def choices(
    layers: int, *, mtp: bool, modules: Collection[RecomputeModule], keeps: Sequence[Keep] = (Keep.DEVICE, Keep.HOST)
) -> tuple[Choice, ...]:
    """The (method, num_layers, replay, modules, keep, wgrad) to try first.

    Of short chunks these are all there are. Of long ones they are those of one kind, whole layers or modules, with
    inputs on the device: `refinements` says what to try next.

    Args:
        layers: Decoder layers of the longest chunk.
        mtp: Whether a chunk has depths of multi-token prediction.
        modules: Those that a chunk has.
        keeps: Where segment inputs may wait.
    """
    selections = [config for config in SELECTIONS if set(config.modules) <= {*modules}]
    layered = [*_layered(layers, mtp)]
    if layers > _ALL_UP_TO:
        return _with_wgrad([RecomputeConfig.none(), *layered, *selections])
    mixed = [_mixed(block, selection) for block in layered if block.method is Method.BLOCK for selection in selections]
    return _with_wgrad(
        [RecomputeConfig.none(), *(config for base in (*layered, *selections, *mixed) for config in _kept(base, keeps))]
    )


def refinements(
    frontier: Iterable[Choice], layers: int, keeps: Sequence[Keep] = (Keep.DEVICE, Keep.HOST)
) -> tuple[Choice, ...]:
    """What to try next of long chunks: `block` with modules on the other layers, and inputs elsewhere.

    Only combinations of choices that no other beats are tried: of one that needs more and takes longer than another,
    more recompute makes nothing better, as a rule.

    Args:
        frontier: The best of `choices`; each keeps its setting of delayed weight gradients.
        layers: As `choices` takes them.
        keeps: The same.
    """
    if layers <= _ALL_UP_TO:
        return ()
    best = tuple(frontier)
    selections = [*dict.fromkeys(c.recompute for c in best if c.recompute.granularity is Granularity.SELECTIVE)]
    mixed = [
        Choice(_mixed(choice.recompute, selection), choice.delay_wgrad)
        for choice in best
        if choice.recompute.method is Method.BLOCK
        for selection in selections
    ]
    elsewhere = [
        Choice(config, choice.delay_wgrad)
        for choice in best
        for config in _kept(choice.recompute, keeps)
        if config != choice.recompute
    ]
    return (*mixed, *elsewhere)


def _with_wgrad(configs: Iterable[RecomputeConfig]) -> tuple[Choice, ...]:
    return tuple(Choice(config, delayed) for config in configs for delayed in (False, True))


def _layered(layers: int, mtp: bool) -> Iterator[RecomputeConfig]:
    """Every config of whole layers, inputs on the device."""
    for replay in Replay:
        for count in _counts(layers):
            yield RecomputeConfig.uniform(count, replay=replay)
        for count in _counts(layers):
            yield RecomputeConfig.block(count, replay=replay)
            # The block of all layers and MTP depths is `uniform 1`. In a long chunk one depth more matters little.
            if mtp and count < layers <= _ALL_UP_TO:
                yield RecomputeConfig.block(count, recompute_mtp=True, replay=replay)


def _mixed(block: RecomputeConfig, selection: RecomputeConfig) -> RecomputeConfig:
    """The first layers whole, modules in the others."""
    return replace(block, granularity=Granularity.SELECTIVE, modules=selection.modules)


def _kept(config: RecomputeConfig, keeps: Iterable[Keep]) -> Iterator[RecomputeConfig]:
    """The config with its inputs in each of these places, if it has inputs."""
    kept = config.method is not None or set(config.modules) & STAGES_OF.keys()
    return (replace(config, keep=keep) for keep in (keeps if kept else (Keep.DEVICE,)))


def _counts(layers: int) -> list[int]:
    """Numbers of layers to try."""
    if layers <= _ALL_UP_TO:
        return list(range(1, layers + 1))
    return [*(2**power for power in range(layers.bit_length()) if 2**power < layers), layers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A choice with what is predicted of it."""

    choice: Choice
    bins: Mapping[str, int]
    """Bytes at the peak of the fullest rank, by kind; they add up to the peak."""
    milliseconds: float
    """Of a step."""

    @property
    def peak(self) -> int:
        """Bytes."""
        return sum(self.bins.values())


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What fits a budget."""

    budget: int
    """Bytes of one device."""
    candidates: Sequence[Candidate]
    """At least one."""

    @cached_property
    def fitting(self) -> tuple[Candidate, ...]:
        """Those that fit, fastest first; of equally fast ones the smaller first."""
        fits = (candidate for candidate in self.candidates if candidate.peak <= self.budget)
        return tuple(sorted(fits, key=_speed))

    @cached_property
    def frontier(self) -> tuple[Candidate, ...]:
        """Those that no other beats in both memory and time, smallest first."""
        found: list[Candidate] = []
        for candidate in sorted(self.candidates, key=lambda c: (c.peak, c.milliseconds)):
            if not found or candidate.milliseconds < found[-1].milliseconds:
                found.append(candidate)
        return tuple(found)

    @property
    def fastest(self) -> Candidate | None:
        """The fastest that fits; None if none does."""
        return self.fitting[0] if self.fitting else None

    @property
    def smallest(self) -> Candidate:
        """The one that needs least."""
        return min(self.candidates, key=lambda c: (c.peak, c.milliseconds))

    @property
    def missing(self) -> int:
        """Bytes by which even the smallest exceeds the budget; 0 if it fits."""
        return max(self.smallest.peak - self.budget, 0)

    @property
    def largest_bin(self) -> str:
        """The kind of memory that is largest in the smallest candidate."""
        bins = self.smallest.bins
        return max(bins, key=lambda kind: bins[kind])


def _speed(candidate: Candidate) -> tuple[float, int]:
    return (candidate.milliseconds, candidate.peak)
