"""The layers that are recomputed together: `RecomputeSegment` and the rule that forms them (DESIGN R1).

Owns layer numbers only. What a segment must keep to be replayed is read off the program elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from recompute.checks import check_kind
from recompute.config import Method, RecomputeConfig, check_count
from recompute.errors import ConfigError

Segments = tuple["RecomputeSegment", ...]


@dataclass(frozen=True, slots=True)
class RecomputeSegment:
    """Consecutive layers of one chunk that are replayed as one; prints as `[0 1]`.

    Raises:
        ConfigError: `layers` is empty, negative or not consecutive.
    """

    layers: tuple[int, ...]
    """Layer numbers within the chunk, ascending."""

    def __post_init__(self) -> None:
        """Check the layer numbers."""
        layers = self.layers
        if type(layers) is not tuple or not all(type(layer) is int for layer in layers):
            raise ConfigError(field="layers", value=layers, rule="must be a tuple of integers")
        if not layers or layers[0] < 0 or layers != tuple(range(layers[0], layers[0] + len(layers))):
            raise ConfigError(field="layers", value=layers, rule="must be consecutive layer numbers from 0 up")

    @property
    def first(self) -> int:
        """The layer whose inputs are kept."""
        return self.layers[0]

    @property
    def last(self) -> int:
        """The layer whose backward comes first."""
        return self.layers[-1]

    def __len__(self) -> int:
        """Count the layers."""
        return len(self.layers)

    def __contains__(self, layer: object) -> bool:
        """Tell whether a layer is in the segment."""
        return layer in self.layers

    def __str__(self) -> str:
        """Print as `[0 1]`."""
        return f"[{' '.join(map(str, self.layers))}]"


def plan_segments(num_decoder_layers: int, num_mtp_layers: int, config: RecomputeConfig) -> Segments:
    """Form the segments of one model chunk.

    Decoder layers are numbered 0..D-1 and MTP depths D..D+M-1. A segment never mixes the two, and each
    recomputed MTP depth is a segment of its own. The result depends on the arguments alone, so all ranks that
    share the chunk's collectives get the same segments.

    Args:
        num_decoder_layers: D, decoder layers of this chunk; may be 0.
        num_mtp_layers: M, MTP depths of this chunk; may be 0.
        config: What to recompute.

    Returns:
        The segments in layer order; empty if nothing is recomputed.

    Raises:
        ConfigError: A count is no integer of at least 0, or `config` no config.
    """
    check_kind("config", config, RecomputeConfig, "a RecomputeConfig")
    check_count("num_decoder_layers", num_decoder_layers, at_least=0)
    check_count("num_mtp_layers", num_mtp_layers, at_least=0)
    if config.method is None or config.num_layers is None:
        return ()
    decoder = _DECODER_RULE[config.method](num_decoder_layers, config.num_layers)
    if config.method is Method.BLOCK and not config.recompute_mtp:
        return decoder
    mtp = range(num_decoder_layers, num_decoder_layers + num_mtp_layers)
    return (*decoder, *(RecomputeSegment((layer,)) for layer in mtp))


def format_segments(segments: Iterable[RecomputeSegment]) -> str:
    """Print segments in a row: `[0 1][2 3][4]`."""
    return "".join(map(str, segments))


def _uniform(num_layers: int, group: int) -> Segments:
    """Cut all layers into groups; the last one is ragged."""
    starts = range(0, num_layers, group)
    return tuple(RecomputeSegment(tuple(range(start, min(start + group, num_layers)))) for start in starts)


def _block(num_layers: int, count: int) -> Segments:
    """Make each of the first `count` layers a segment."""
    return tuple(RecomputeSegment((layer,)) for layer in range(min(count, num_layers)))


_DECODER_RULE: Mapping[Method, Callable[[int, int], Segments]] = MappingProxyType(
    {Method.UNIFORM: _uniform, Method.BLOCK: _block}
)
