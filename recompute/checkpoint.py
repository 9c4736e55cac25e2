"""checkpoint_layers(): the contiguous path. Same segments, same rules, no overlap: a segment is one autograd region.

Use it where layers run one after another; where overlap cuts them into stages, overlap/ drives the replay instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recompute import rng, state
from recompute.config import Granularity, Keep, RecomputeConfig, Replay
from recompute.errors import ConfigError, RecomputeError
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
    draws: Draws | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Run layers one after another, keeping only segment inputs of those that the config recomputes.

    Args:
        layers: Decoder layers, then MTP layers.
        hidden: Input of the first.
        config: Which layers are recomputed (R1).
        num_mtp_layers: How many of `layers`, from the end, are MTP layers.
        draws: Seeds the layers that draw: each draws the same in every pass, whatever runs in between. Without them
            no layer may draw.

    Returns:
        Output of the last layer, and the auxiliary losses in layer order.

    Raises:
        ConfigError: `config` hides replays, names modules or keeps inputs elsewhere: here autograd runs whole
            segments, one at a time; a layer draws and there are no `draws`.
        RecomputeError: A layer to be replayed draws and does not say so. In backward: the caller asked for the
            gradients of some tensors only, which a replay that fills `.grad` cannot give.
    """
    if config.replay is Replay.HIDDEN:
        rule = "has no effect without overlap: take just_in_time"
        raise ConfigError(field="replay", value=config.replay.value, rule=rule)
    check_contiguous(config)
    draws = _check_draws(layers, draws)
    segments = {s.first: s for s in plan_segments(len(layers) - num_mtp_layers, num_mtp_layers, config)}
    losses: list[Tensor] = []
    index = 0
    while index < len(layers):
        segment = segments.get(index)
        size = 1 if segment is None else len(segment.layers)
        numbered = [(number, layers[number]) for number in range(index, index + size)]
        trains = hidden.requires_grad or any(p.requires_grad for _, layer in numbered for p in layer.parameters())
        if segment is None or not trains or not torch.is_grad_enabled():
            (hidden, *found), _ = _run(numbered, hidden, draws)
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


def _check_draws(layers: Sequence[Replayable], draws: Draws | None) -> Draws:
    """The draws of a call, which it must be given if any layer draws.

    Raises:
        ConfigError: It was not.
    """
    for number, layer in enumerate(layers):
        if draws is None and layer.draws_rng:
            rule = f"layer {number} draws: give Draws(run_seed=, step=, microbatch=), or all calls would draw the same"
            raise ConfigError(field="draws", value=None, rule=rule)
    return Draws() if draws is None else draws


@contextmanager
def _no_draws(number: int, device: torch.device) -> Iterator[None]:
    """Run a layer that says that it does not draw.

    Raises:
        RecomputeError: It did.
    """
    generators = rng.default_generators(device)
    before = rng.positions(generators)
    yield
    if rng.positions(generators) != before:
        raise RecomputeError(f"layer {number} drew random numbers, which a replay would draw anew: set its draws_rng")


def _run(
    layers: Sequence[tuple[int, Replayable]],
    hidden: Tensor,
    draws: Draws,
    pins: Sequence[Any] | None = None,
    snapshots: Sequence[state.Snapshot] = (),
    *,
    replayed: bool = False,
) -> tuple[tuple[Tensor, ...], list[Any]]:
    """Run layers in order; returns hidden with the losses, and pins.

    Args:
        layers: With their numbers.
        hidden: Input of the first.
        draws: Seeds those that draw.
        pins: What a first pass pinned; None: this is one, whose effects count.
        snapshots: In-place state as that pass found it.
        replayed: Whether a replay of this pass will follow.
    """
    pinned: list[Any] = []
    losses: list[Tensor] = []
    for place, (number, layer) in enumerate(layers):
        with ExitStack() as stack:
            if layer.draws_rng:
                seed = rng.stage_seed(draws.run_seed, draws.step, draws.microbatch, number, "layer")
                stack.enter_context(rng.seeded(seed, rng.default_generators(hidden.device)))
            elif replayed:
                stack.enter_context(_no_draws(number, hidden.device))
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
        outputs, ctx.pins = _run(layers, hidden, draws, replayed=True)
        # A layer may hand its input through; the graph needs outputs of its own.
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Replay and run the segment's backward.

        Raises:
            RecomputeError: A backward for some tensors only: the replay's would fill `.grad` of the parameters too.
        """
        trains = any(p.requires_grad for _, layer in ctx.layers for p in layer.parameters())
        if trains and not torch.autograd._is_checkpoint_valid():  # type: ignore[no-untyped-call]  # torch's
            raise RecomputeError(
                "torch.autograd.grad() and backward(inputs=...) do not go with recomputed layers whose parameters "
                "train: the replay adds their gradients to .grad; call backward() without inputs"
            )
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
