"""checkpoint_layers(): the contiguous path. Same segments, same rules, no overlap: a segment is one autograd region.

Use it where layers run one after another; where overlap cuts them into stages, overlap/ drives the replay instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recompute import rng, state
from recompute.config import Granularity, Keep, RecomputeConfig, Replay
from recompute.errors import ConfigError
from recompute.precision import capture_precision, no_autocast
from recompute.segments import plan_segments
from recompute.tape import Tape


def no_effects() -> None:
    """The effects of a layer that has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerResult:
    """What a layer gives."""

    hidden: Tensor
    losses: tuple[Tensor, ...] = ()
    """Auxiliary losses, as many in every pass."""
    pinned: Any = None
    """What a replay must reuse, as the choice of experts (R7)."""
    effects: Callable[[], None] = no_effects
    """Counters and logs; called after the first pass, never for a replay (R5)."""


class Replayable(Protocol):
    """A layer that can run twice."""

    @property
    def draws_rng(self) -> bool:
        """Whether it draws random numbers."""

    @property
    def state(self) -> Sequence[Tensor]:
        """Buffers that it changes in place; the replay sees them as the first pass did and leaves them alone."""

    def parameters(self) -> Sequence[nn.Parameter]:
        """Its parameters: a segment is replayed if any of them, or its input, needs a gradient (R6)."""

    def __call__(self, hidden: Tensor, pinned: Any) -> LayerResult:
        """Run the layer on `hidden`; `pinned` is None in the first pass, then what that pass pinned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainLayer:
    """The simplest Replayable: a module from hidden to hidden, with nothing to pin and no effects."""

    module: nn.Module
    draws_rng: bool = False
    state: Sequence[Tensor] = ()

    def parameters(self) -> Sequence[nn.Parameter]:
        """The module's."""
        return tuple(self.module.parameters())

    def __call__(self, hidden: Tensor, pinned: Any) -> LayerResult:
        """Call the module."""
        return LayerResult(hidden=self.module(hidden))


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Where the draws of a call come from (R4)."""

    run_seed: int = 0
    step: int = 0
    microbatch: int = 0


def checkpoint_layers(
    layers: Sequence[Replayable],
    hidden: Tensor,
    config: RecomputeConfig,
    *,
    num_mtp_layers: int = 0,
    draws: Draws = Draws(),
) -> tuple[Tensor, list[Tensor]]:
    """Run layers one after another, keeping only segment inputs of those that the config recomputes.

    Args:
        layers: Decoder layers, then MTP layers.
        hidden: Input of the first.
        config: Which layers are recomputed (R1).
        num_mtp_layers: How many of `layers`, from the end, are MTP layers.
        draws: Seeds the layers that draw: each draws the same in every pass, whatever runs in between.

    Returns:
        Output of the last layer, and the auxiliary losses in layer order.

    Raises:
        ConfigError: `config` hides replays, names modules or keeps inputs elsewhere: here autograd runs whole
            segments, one at a time.
    """
    if config.replay is Replay.HIDDEN:
        rule = "has no effect without overlap: take just_in_time"
        raise ConfigError(field="replay", value=config.replay.value, rule=rule)
    check_contiguous(config)
    segments = {s.first: s for s in plan_segments(len(layers) - num_mtp_layers, num_mtp_layers, config)}
    losses: list[Tensor] = []
    index = 0
    while index < len(layers):
        segment = segments.get(index)
        size = 1 if segment is None else len(segment.layers)
        numbered = [(number, layers[number]) for number in range(index, index + size)]
        trains = hidden.requires_grad or any(p.requires_grad for _, layer in numbered for p in layer.parameters())
        if segment is None or not trains or not torch.is_grad_enabled():
            (hidden, *found), _ = _run(numbered, hidden, draws, None, ())
        else:
            # A leaf that needs a gradient keeps the segment in the graph even when its input does not (R6).
            anchor = torch.empty(0, device=hidden.device, requires_grad=True)
            hidden, *found = _Segment.apply(anchor, hidden, numbered, draws)  # type: ignore[no-untyped-call]  # torch's
        losses += found
        index += size
    return hidden, losses


def check_contiguous(config: RecomputeConfig) -> None:
    """Refuse settings that need a layer cut into stages.

    Raises:
        ConfigError: Names the setting.
    """
    if config.granularity is Granularity.SELECTIVE:
        rule = "needs the stages of the overlapped step: here whole layers are recomputed"
        raise ConfigError(field="granularity", value=config.granularity.value, rule=rule)
    if config.keep is not Keep.DEVICE:
        rule = "needs the slots of the overlapped step: here inputs stay on the device"
        raise ConfigError(field="keep", value=config.keep.value, rule=rule)


def _run(
    layers: Sequence[tuple[int, Replayable]],
    hidden: Tensor,
    draws: Draws,
    pins: Sequence[Any] | None,
    snapshots: Sequence[state.Snapshot],
) -> tuple[tuple[Tensor, ...], list[Any]]:
    """Run layers in order; `pins` None: a first pass, whose effects count. Returns hidden with the losses, and pins."""
    pinned: list[Any] = []
    losses: list[Tensor] = []
    for place, (number, layer) in enumerate(layers):
        with ExitStack() as stack:
            if layer.draws_rng:
                seed = rng.stage_seed(draws.run_seed, draws.step, draws.microbatch, number, "layer")
                stack.enter_context(rng.seeded(seed, rng.default_generators(hidden.device)))
            if layer.state:
                as_first = pins is not None
                stack.enter_context(
                    state.as_of(layer.state, snapshots[place]) if as_first else state.saving_copies(layer.state)
                )
            result = layer(hidden, None if pins is None else pins[place])
        hidden = result.hidden
        losses += result.losses
        pinned.append(result.pinned)
        if pins is None:
            result.effects()
    return (hidden, *losses), pinned


class _Segment(torch.autograd.Function):
    """A segment in an autograd graph: forward without a graph, backward replays it with one."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, hidden: Tensor, layers: Sequence[tuple[int, Replayable]], draws: Draws
    ) -> tuple[Tensor, ...]:
        """First pass; keeps the input, the pinned values and copies of in-place state."""
        ctx.layers, ctx.draws = layers, draws
        # An output that the loss does not reach gives no gradient, rather than one of zeros.
        ctx.set_materialize_grads(False)
        ctx.precision = capture_precision(hidden.device.type)
        ctx.snapshots = [state.take(layer.state) for _, layer in layers]
        ctx.save_for_backward(hidden)
        ctx.tracks = hidden.requires_grad
        outputs, ctx.pins = _run(layers, hidden, draws, None, ())
        # A layer may hand its input through; the graph needs outputs of its own.
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Replay and run the segment's backward."""
        (hidden,) = ctx.saved_tensors

        def replay(leaf: Tensor) -> Any:
            outputs = _run(ctx.layers, leaf, ctx.draws, ctx.pins, ctx.snapshots)[0]
            return outputs if len(outputs) > 1 else outputs[0]

        device_type = hidden.device.type
        with no_autocast(device_type) if ctx.precision is None else ctx.precision():
            tape, _ = Tape.record(replay, (hidden,), (ctx.tracks,), (True,) * len(gradients), {})
        tape.backward(gradients)
        (gradient,) = tape.take_gradients((ctx.tracks,))
        return None, gradient, None, None
