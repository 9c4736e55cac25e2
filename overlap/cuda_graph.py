"""GraphedStep: a training step recorded once as a CUDA graph, and launched whole from then on.

A step's plans are static and no stage asks the device anything, so the host's part of a step can be done once. What
is left of it is copying the feeds in, the seeds of the draws, and one launch: lanes no longer run dry when the device
is faster than the host.

NOTE [ What a recording holds ]
1. Addresses: parameters, buffers and gradients must stay where they are. A `.grad` of None gets the recorded tensor
   back, zeroed, if the step is one that trains its parameter; all recordings add to the same tensor.
2. Memory: activations live in the graph's own pool, which keeps its size between steps.
3. Host decisions: shapes, recompute, seed, loss scale, lanes, train or eval mode, autocast, what trains. Others are
   recorded anew.
4. Device work only: hooks and other Python code that a stage or effect calls runs while recording, and never again.
5. Draws: each has a generator state of its own, seeded before every launch as the step's number says (R4).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from overlap.chunk import ModelChunk, check_chunk
from overlap.engine import Feeds
from overlap.errors import ProgramError
from overlap.scale import PerMicrobatch
from overlap.step import Losses, train_step
from overlap.step_feeds import check_feeds
from recompute.config import Keep
from recompute.errors import ConfigError, RecomputeError
from recompute.rng import SeedAt, begin_at, recorded_by

Step = Callable[[ModelChunk, Sequence[Feeds]], list[Losses]]
WARM_UP = 2
"""Steps of a shape that run as they are before it is recorded: kernels compile, libraries choose and allocate."""


class _CountedDraws:
    """Draws of a step that runs as it is, in order."""

    def __init__(self) -> None:
        self.seeds: list[SeedAt | None] = []

    def begin(self, generator: torch.Generator, seed: int, seed_at: SeedAt | None) -> Callable[[], object]:
        """Note the draw."""
        self.seeds.append(seed_at)
        return begin_at(generator, seed)


class _GraphDraws:
    """Draws of a step that is being recorded: each from a state of its own, which the graph knows."""

    def __init__(self, states: Sequence[torch.Generator]) -> None:
        self._states = iter(states)

    def begin(self, generator: torch.Generator, seed: int, seed_at: SeedAt | None) -> Callable[[], object]:
        """Point the generator at the next state."""
        before = generator.graphsafe_get_state()
        generator.graphsafe_set_state(next(self._states))
        return lambda: generator.graphsafe_set_state(before)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recording:
    """One recorded step."""

    graph: torch.cuda.CUDAGraph
    feeds: Sequence[dict[str, Tensor]]
    """Where it reads its microbatches."""
    outputs: Sequence[Losses]
    """Where it writes what the step returns."""
    draws: Sequence[tuple[torch.Generator, SeedAt]]


@dataclass(slots=True)
class _WarmUp:
    """What is known of a shape before it is recorded."""

    steps: int = 0
    seeds: Sequence[SeedAt | None] = ()
    """Of the draws of its last step; the first of all steps also checks the stages, which draw in that step only."""
    trained: frozenset[str] = frozenset()
    """Names of the parameters that its last step left a gradient."""


class GraphedStep:
    """Call it with the microbatches in place of train_step: the same results to the bit.

    It takes no other argument: those of a step that stay the same, as `accumulate`, are bound in `run`.

    The first two calls of each shape run as they are; the third records. Gradients may be zeroed or set to None.

    Args:
        chunk: The model and its settings, on a CUDA device.
        run: The step; `contiguous_step` or a partial() of one with settings that stay the same.

    Raises:
        ConfigError: The chunk's settings need the host in every step; names the setting.
    """

    def __init__(self, chunk: ModelChunk, run: Step = train_step) -> None:
        check_chunk(chunk)
        check_recordable(chunk)
        self._chunk = chunk
        self._run = run
        self._stream = _recording_stream(chunk.device)
        self._pool = torch.cuda.graph_pool_handle()
        self._warm: dict[Hashable, _WarmUp] = {}
        self._recordings: dict[Hashable, _Recording] = {}
        self._gradients: dict[str, tuple[nn.Parameter, Tensor]] = {}
        """By name, of what any step trained: the parameter, and the gradient that recordings add to."""
        self._places: dict[str, tuple[Tensor, int]] = {}
        """By name: the parameters and buffers that recordings use, and their addresses."""

    def __call__(self, microbatches: Sequence[Feeds]) -> list[Losses]:
        """One step.

        Args:
            microbatches: As train_step takes them; tensors that need no gradient.

        Returns:
            Each microbatch's losses, in order.

        Raises:
            ConfigError: As train_step; a feed that is no plain tensor; a gradient, parameter or buffer that moved; a
                parameter's hooks.
            ProgramError: A stage or effect cannot be recorded: it waits for the device.
        """
        if not torch.is_grad_enabled():
            return self._run(self._chunk, microbatches)
        check_feeds(self._chunk.program, microbatches)
        key = self._key(microbatches)
        warm = self._warm.setdefault(key, _WarmUp())
        self._check_addresses(warm)
        if warm.steps < WARM_UP:
            return self._warm_up(warm, microbatches)
        if key not in self._recordings:
            self._recordings[key] = self._record(warm, microbatches)
        return self._launch(self._recordings[key], microbatches)

    def _key(self, microbatches: Sequence[Feeds]) -> Hashable:
        """What a recording holds besides addresses."""
        for number, feeds in enumerate(microbatches):
            for name, value in feeds.items():
                if not isinstance(value, Tensor) or value.requires_grad:
                    rule = "a recorded step takes tensors that need no gradient"
                    raise ConfigError(field=f"microbatches[{number}][{name!r}]", value=type(value).__name__, rule=rule)
        shapes = tuple(
            tuple((name, value.shape, value.dtype) for name, value in sorted(feeds.items())) for feeds in microbatches
        )
        chunk = self._chunk
        trained = tuple(parameter.requires_grad for parameter in chunk.module.parameters())
        modes = tuple(part.training for part in chunk.module.modules())
        autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        return shapes, trained, modes, autocast, chunk.recompute, chunk.seed, chunk.loss_scale, chunk.lanes

    def _warm_up(self, warm: _WarmUp, microbatches: Sequence[Feeds]) -> list[Losses]:
        """Run the step as it is, on the stream that will record."""
        draws = _CountedDraws()
        caller = torch.cuda.current_stream(self._chunk.device)
        self._stream.wait_stream(caller)
        try:
            with torch.cuda.stream(self._stream), recorded_by(draws):
                outputs = self._run(self._chunk, microbatches)
        finally:
            # of a failed step too: the caller zeroes gradients that it may still be adding to
            caller.wait_stream(self._stream)
        warm.seeds = draws.seeds
        warm.steps += 1
        trained = [(n, p) for n, p in self._chunk.module.named_parameters() if p.requires_grad]
        gradients = {name: (parameter, parameter.grad) for name, parameter in trained if parameter.grad is not None}
        warm.trained = frozenset(gradients)
        self._gradients.update(gradients)
        self._places = {name: (tensor, tensor.data_ptr()) for name, tensor in _held(self._chunk.module).items()}
        return _copied(outputs)

    def _check_addresses(self, warm: _WarmUp) -> None:
        """Give gradients back that were set to None, zeroed, to what this step trains: a frozen parameter keeps None.

        Raises:
            ConfigError: Another tensor is there, parameters or buffers are elsewhere, or there are hooks.
        """
        held = _held(self._chunk.module)
        for name, (tensor, address) in self._places.items():
            if held.get(name) is not tensor or tensor.data_ptr() != address:
                rule = "a recorded step uses parameters and buffers where they were: copy new values in"
                raise ConfigError(field=name, value="moved", rule=rule)
        for name, (parameter, gradient) in self._gradients.items():
            if not (name in warm.trained if warm.steps else parameter.requires_grad):
                continue
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                rule = "has hooks, which a step recorded as a CUDA graph would not call: remove them"
                raise ConfigError(field=name, value="hooks", rule=rule)
            if parameter.grad is None:
                parameter.grad = gradient.zero_()
            elif parameter.grad is not gradient:
                rule = "a recorded step adds to the gradient it was recorded with: zero it, or set it to None"
                raise ConfigError(field=f"{name}.grad", value="another tensor", rule=rule)

    def _record(self, warm: _WarmUp, microbatches: Sequence[Feeds]) -> _Recording:
        """Record a step without running it.

        Raises:
            ConfigError: A setting that needs the host came after this object.
            ProgramError: Something in the step waits for the device.
            OutOfMemoryError: The step does not fit.
            RecomputeError: Something draws from a seed that is not known for another step.
        """
        chunk = self._chunk
        check_recordable(chunk)
        seeds = [seed_at for seed_at in warm.seeds if seed_at is not None]
        if len(seeds) != len(warm.seeds):
            raise RecomputeError("a draw whose seed in another step is unknown cannot be recorded in a CUDA graph")
        feeds = [{name: value.to(chunk.device, copy=True) for name, value in mb.items()} for mb in microbatches]
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[chunk.device.index or 0]
        states = [generator.clone_state() for _ in seeds]
        for state in states:
            graph.register_generator_state(state)
        done = chunk.steps_done
        try:
            with (
                torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"),
                recorded_by(_GraphDraws(states)),
            ):
                outputs = self._run(chunk, feeds)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ProgramError("the step cannot be recorded as a CUDA graph: something in it needs the host") from error
        finally:
            chunk.steps_done = done
        return _Recording(graph=graph, feeds=feeds, outputs=outputs, draws=tuple(zip(states, seeds, strict=True)))

    def _launch(self, recording: _Recording, microbatches: Sequence[Feeds]) -> list[Losses]:
        for static, fed in zip(recording.feeds, microbatches, strict=True):
            for name, value in fed.items():
                static[name].copy_(value, non_blocking=True)
        step = self._chunk.steps_done
        for state, seed_at in recording.draws:
            state.manual_seed(seed_at(step))
        recording.graph.replay()
        self._chunk.steps_done += 1
        return _copied(recording.outputs)


def graphed(run: Step = train_step) -> Step:
    """A step of whatever chunk it is called with: each chunk's is a GraphedStep of its own."""
    steps: dict[int, GraphedStep] = {}

    def step(chunk: ModelChunk, microbatches: Sequence[Feeds]) -> list[Losses]:
        if id(chunk) not in steps:  # which the GraphedStep keeps alive
            steps[id(chunk)] = GraphedStep(chunk, run)
        return steps[id(chunk)](microbatches)

    return step


def _held(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return dict((*module.named_parameters(), *module.named_buffers()))


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings on a device: matrix libraries keep a workspace of 32 MiB for each stream they ever saw."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's


def _copied(outputs: Sequence[Losses]) -> list[Losses]:
    """Copies that later steps leave alone."""
    return [{name: value.clone() for name, value in losses.items()} for losses in outputs]


def check_recordable(chunk: ModelChunk) -> None:
    """Refuse settings that need the host in every step.

    Raises:
        ConfigError: Names the setting.
    """
    if chunk.device.type != "cuda":
        raise ConfigError(field="device", value=str(chunk.device), rule="a CUDA graph needs a CUDA device")
    if chunk.world.groups is not None:
        rule = "a step is recorded as a CUDA graph in one process only: ranks watch each other from the host"
        raise ConfigError(field="world", value=f"{chunk.world.size} ranks", rule=rule)
    configs = [chunk.recompute] if not isinstance(chunk.recompute, tuple) else list(chunk.recompute)
    for config in configs:
        if config.keep is not Keep.DEVICE:
            rule = "a step recorded as a CUDA graph keeps segment inputs on the device: pinned memory is given out anew"
            raise ConfigError(field="keep", value=config.keep.value, rule=rule)
    if not isinstance(chunk.loss_scale, PerMicrobatch):
        rule = "a step recorded as a CUDA graph holds its loss scale: a per-token scale is another one in every step"
        raise ConfigError(field="loss_scale", value=chunk.loss_scale, rule=rule)
