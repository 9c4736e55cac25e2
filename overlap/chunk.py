"""ModelChunk: a model whose training step runs under the overlap schedule.

Owns the settings, the plans and the count of steps (which seeds the draws). The model itself only has to say its
Program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import nn

from overlap.ir import Program
from overlap.lanes import Lanes, NullLanes
from overlap.orders import Order, get_order
from overlap.parallel.world import SOLO, World
from overlap.plan import Planner, segments_of
from overlap.scale import LossScale, PerMicrobatch
from recompute.config import RecomputeConfig, Replay
from recompute.errors import ConfigError


class HasProgram(Protocol):
    """What a module must have beside being an nn.Module."""

    def program(self) -> Program:
        """The module's stages, bound to this very module."""


class ModelChunk(nn.Module):
    """A model chunk and how its training step runs.

    Args:
        module: An nn.Module with a method `program()` returning its Program.
        recompute: One config, or one per microbatch of a step.
        order: Name of a built-in order (in its variant for hidden replay if a config asks for that), or an Order.
        delay_wgrad: Whether weight gradients run as slots of their own.
        seed: The run's seed; with `steps_done` it decides every draw.
        loss_scale: How the losses of a step's microbatches are weighted.
        lanes: Where issues run.
        world: This rank among the ranks that train the model.

    Raises:
        ConfigError: float16 parameters; `recompute` is no config.
        ScheduleError: The order does not fit the program.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        recompute: RecomputeConfig | Sequence[RecomputeConfig] = RecomputeConfig.none(),  # noqa: B008 (frozen)
        order: str | Order = "multi_queue",
        delay_wgrad: bool = False,
        seed: int = 0,
        loss_scale: LossScale = PerMicrobatch(),  # noqa: B008 (frozen)
        lanes: Lanes = NullLanes(),  # noqa: B008 (stateless)
        world: World = SOLO,
    ) -> None:
        super().__init__()
        if any(p.dtype is torch.float16 for p in module.parameters()):
            rule = "float16 needs a loss scaler, which train_step does not drive; use bfloat16"
            raise ConfigError(field="dtype", value=torch.float16, rule=rule)
        configs = (recompute,) if isinstance(recompute, RecomputeConfig) else tuple(recompute)
        if not all(isinstance(config, RecomputeConfig) for config in configs):
            rule = "must be a RecomputeConfig, or one per microbatch"
            raise ConfigError(field="recompute", value=recompute, rule=rule)
        self.module = module
        self.recompute = recompute if isinstance(recompute, RecomputeConfig) else tuple(recompute)
        hidden = any(config.replay is Replay.HIDDEN for config in configs)
        replay = Replay.HIDDEN if hidden else Replay.JUST_IN_TIME
        self.order = order if isinstance(order, Order) else get_order(order, replay)
        self.delay_wgrad = delay_wgrad
        self.seed = seed
        self.loss_scale = loss_scale
        self.lanes = lanes
        self.world = world
        self.steps_done = 0
        """Successful training steps; part of the state dict, since every draw depends on it."""
        self._bind()

    def _bind(self) -> None:
        """Make the program of this module; a copy of the chunk binds to its own module."""
        self.program: Program = cast(HasProgram, self.module).program()
        self.planner = Planner(self.program, self.order, delayed=self.delay_wgrad)
        self.checked = False
        """Whether the program ran through check_stages once."""

    def configs(self, num_microbatches: int) -> list[RecomputeConfig]:
        """The recompute config of each microbatch of a step.

        Raises:
            ConfigError: A list of configs has another length than the step.
        """
        if isinstance(self.recompute, RecomputeConfig):
            return [self.recompute] * num_microbatches
        if len(self.recompute) != num_microbatches:
            rule = f"one config per microbatch: the step has {num_microbatches}"
            raise ConfigError(field="recompute", value=f"{len(self.recompute)} configs", rule=rule)
        return list(self.recompute)

    def settings(self, num_microbatches: int) -> dict[str, object]:
        """What all ranks of a pipeline stage must agree on before their first step, causes first."""
        program, parameters = self.program, dict(self.module.named_parameters())
        configs = self.configs(num_microbatches)
        return {
            "dtype": sorted({str(parameter.dtype) for parameter in parameters.values()}),
            "decoder_layers": len(program.layers) - len(program.mtp_layers),
            "mtp_layers": len(program.mtp_layers),
            "parameters": tuple(f"{name} {tuple(parameter.shape)}" for name, parameter in parameters.items()),
            "frozen_parameters": tuple(name for name, parameter in parameters.items() if not parameter.requires_grad),
            "seed": self.seed,
            "steps_done": self.steps_done,
            "microbatches": num_microbatches,
            "segments": tuple(str([s.layers for s in segments_of(program, config)]) for config in configs),
            "replay": tuple(str(config.replay) for config in configs),
            "order": self.order.name,
            "delay_wgrad": self.delay_wgrad,
            "loss_scale": repr(self.loss_scale),
        }

    @property
    def device(self) -> torch.device:
        """Device of the parameters; the CPU if there are none."""
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    def get_extra_state(self) -> dict[str, int]:
        """The step count travels with the weights."""
        return {"steps_done": self.steps_done}

    def set_extra_state(self, state: Mapping[str, int]) -> None:
        """Take the step count back."""
        self.steps_done = state["steps_done"]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is bound to this very module."""
        return {k: v for k, v in self.__dict__.items() if k not in {"program", "planner", "checked"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # nn.Module's  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._bind()
