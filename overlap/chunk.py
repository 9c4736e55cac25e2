"""ModelChunk: a model whose training step runs under the overlap schedule.

Owns the settings, the plans and the count of steps (which seeds the draws). The model itself only has to say its
Program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType, NoneType
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

from overlap.ir import Program
from overlap.lanes import Lanes, NullLanes
from overlap.orders import Order, get_order
from overlap.parallel.data import Alone, DataParallel
from overlap.parallel.world import SOLO, World
from overlap.plan import Planner, segments_of
from overlap.registered import Registered
from overlap.scale import LossScale, PerMicrobatch
from overlap.selective import check_modules
from recompute.checks import check_integer, check_kind
from recompute.config import Keep, RecomputeConfig, Replay, check_bool, check_count
from recompute.errors import ConfigError
from recompute.keep import HOST_ONLY, Sharded, Stores

_BOUND = frozenset({"program", "planner", "parameter_names", "_checked", "_parts", "_unseen", "_registered"})
"""What is bound to this very module."""
_FIXED = frozenset({"module", "order", "delay_wgrad", "lead"})
"""What a chunk's program and plans are made from, once."""
_COMPARED = frozenset({"recompute", "seed", "loss_scale"})
"""Settings that ranks compare and that may change later."""
NEEDS_SHARDS = "needs ModelChunk(shards=Sharded(group)): ranks that hold the same segment inputs"
"""Why keep="sharded" is refused where nobody says which ranks."""
Configs = RecomputeConfig | tuple[RecomputeConfig, ...]


@runtime_checkable
class HasProgram(Protocol):
    """What a module must have beside being an nn.Module."""

    def program(self) -> Program:
        """The module's stages, bound to this very module."""


@runtime_checkable
class GivesSettings(Protocol):
    """A module that says what decides its numbers and its communication beside its parameters."""

    @property
    def compared_settings(self) -> Mapping[str, object]:
        """By name; ranks compare the text of the values."""


class ModelChunk(nn.Module):
    """A model chunk and how its training step runs.

    Args:
        module: An nn.Module with a method `program()` returning its Program.
        recompute: One config, or one per microbatch of a step.
        order: Name of a built-in order (in its variant for hidden replay if a config asks for that), or an Order.
        delay_wgrad: Whether weight gradients run as slots of their own.
        lead: Layers of the second microbatch's forward that run beside the first one's last layers, MTP depths
            counted: the first forward has no backward beside it to hide its transfers behind. Costs their inputs in
            that plan and the next. A step of one microbatch has no second, and runs as without.
        seed: The run's seed; with `steps_done` it decides every draw.
        loss_scale: How the losses of a step's microbatches are weighted.
        lanes: Where issues run.
        shards: The ranks over which a config with keep="sharded" cuts its segment inputs.
        world: This rank among the ranks that train the model.

    `recompute`, `seed`, `loss_scale`, `lanes` and `shards` may be set anew between steps. Whether the order fits the
    program is found by the first step that plans (ScheduleError).

    Raises:
        ConfigError: float16 parameters; `recompute` is no config, names a module that the model does not have, or wants
            `shards` that are not there; `lead` is more than its layers; another argument is not what it should be, as
            a class in place of an instance.
        ScheduleError: No built-in order has that name.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        recompute: RecomputeConfig | Sequence[RecomputeConfig] = RecomputeConfig.none(),  # noqa: B008 (frozen)
        order: str | Order = "multi_queue",
        delay_wgrad: bool = False,
        lead: int = 0,
        seed: int = 0,
        loss_scale: LossScale = PerMicrobatch(),  # noqa: B008 (frozen)
        lanes: Lanes = NullLanes(),  # noqa: B008 (stateless)
        shards: Sharded | None = None,
        world: World = SOLO,
    ) -> None:
        super().__init__()
        self.module = module
        self.recompute = recompute
        hidden = any(config.replay is Replay.HIDDEN for config in each_config(self.recompute))
        replay = Replay.HIDDEN if hidden else Replay.JUST_IN_TIME
        self.order = order if isinstance(order, Order) else get_order(order, replay)
        self.delay_wgrad = delay_wgrad
        self.lead = lead
        self.seed = seed
        self.loss_scale = loss_scale
        self.lanes = lanes
        self.world = world
        self.parallel: DataParallel = Alone()
        """What keeps replicas in step; parallel.attach.make_parallel() sets it."""
        self.steps_done = 0
        """Successful training steps; part of the state dict, since every draw depends on it."""
        self.shards = shards
        self.cut_short = 0
        """Collectives that this rank launched in a step that failed, if ranks have not compared them since."""
        self._bind()
        self._check_recompute(self.recompute, shards)
        if shards is not None and not _any_sharded(self.recompute):
            rule = "has no effect unless a config has keep='sharded'"
            raise ConfigError(field="shards", value=shards, rule=rule)

    def _bind(self) -> None:
        """Make the program of this module; a copy of the chunk binds to its own module."""
        _check_dtypes(self.module)
        self.parallel.bound()
        program = _program_of(self.module)
        self.planner = Planner(program, self.order, delayed=self.delay_wgrad, lead=self.lead)
        self.program: Program = program
        self.parameter_names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        """Of the parameters that the program's stages declare, by id; a sharded module registers others for a while."""
        self.checked = False
        self.agreed = False
        """Whether all ranks were found to have these settings."""
        self._registered = Registered.of(self.module)

    def bind_replaced(self) -> None:
        """Bind to the module anew if it holds other parameters, buffers or parts, or other types; steps begin with it.

        Raises:
            ConfigError: float16 parameters; sharded ones of another type than when they were sharded.
        """
        if not self._registered.still():
            self._bind()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What to(), double() and their like do; buffers, and on some devices parameters, are other objects then.

        Raises:
            ConfigError: float16 parameters, or sharded ones; steps are refused until they have another type.
        """
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._bind()
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to change what was read when the chunk was made; ranks compare anew what they compared.

        Raises:
            ConfigError: Names the setting.
        """
        if name in _FIXED and "planner" in self.__dict__:
            rule = "is read when a ModelChunk is made, and has no effect later: make another one"
            raise ConfigError(field=name, value=value, rule=rule)
        if name == "shards" and "planner" in self.__dict__:
            self._check_recompute(self.recompute, value)
        if name in _CHECKS:
            _CHECKS[name](name, value)
        super().__setattr__(name, value)
        if name in _COMPARED:
            self.agreed = False

    @property
    def recompute(self) -> Configs:
        """One config, or one per microbatch of a step; checked when set.

        Raises:
            ConfigError: Another one than a ModelChunk can be made with.
        """
        return self._recompute

    @recompute.setter
    def recompute(self, recompute: RecomputeConfig | Sequence[RecomputeConfig]) -> None:
        configs = _configs_of(recompute)
        if "planner" in self.__dict__:
            self._check_recompute(configs, self.shards)
        self._recompute: Configs = configs

    def _check_recompute(self, recompute: Configs, shards: Sharded | None) -> None:
        for config in each_config(recompute):
            check_modules(self.program, config)
        if shards is None and _any_sharded(recompute):
            raise ConfigError(field="keep", value=Keep.SHARDED.value, rule=NEEDS_SHARDS)

    @property
    def checked(self) -> bool:
        """Whether the program ran through check_stages, in these train modes, with every parameter that trains now."""
        return self._modes() in self._checked and not any(parameter.requires_grad for parameter in self._unseen)

    @checked.setter
    def checked(self, checked: bool) -> None:
        # A frozen parameter leaves no trace in the check: it counts as seen when it took part in one.
        unseen = self._unseen if checked else self.module.parameters()
        if not checked:
            self._parts = tuple(self.module.modules())
        self._checked: frozenset[tuple[bool, ...]] = self._checked | {self._modes()} if checked else frozenset()
        self._unseen: tuple[nn.Parameter, ...] = tuple(p for p in unseen if not (checked and p.requires_grad))

    def _modes(self) -> tuple[bool, ...]:
        """Train or eval, module by module: what does not draw in one may draw in the other."""
        return tuple(part.training for part in self._parts)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As nn.Module's; parameters that `assign` puts in place of the old ones are bound to the program."""
        result = super().load_state_dict(state_dict, strict, assign)
        if assign:
            self._bind()
        return result

    def rebind(self, parallel: DataParallel) -> None:
        """Take parameters that were replaced (sharded) into the program, and what keeps replicas in step."""
        self.parallel = parallel
        self._bind()

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

    def first_draw(self, num_microbatches: int) -> int:
        """Number of this rank's first microbatch for seeds: a step's are counted through all data ranks, rank by rank.

        So data ranks draw different masks, stages of one replica count alike, and a rank draws what one process would
        that runs all data ranks' microbatches.
        """
        return self.world.data_rank * num_microbatches

    def fail(self, launched: int) -> None:
        """A step failed after so many collectives: before the next one, ranks compare where they stopped.

        A rank that launched none may run the step again beside others that wait for it.
        """
        if launched:
            self.cut_short, self.agreed = self.cut_short + launched, False

    def settings(self, num_microbatches: int) -> dict[str, object]:
        """What all ranks of a pipeline stage must agree on before their first step, causes first."""
        program, parameters = self.program, dict(self.module.named_parameters())
        configs = self.configs(num_microbatches)
        return {
            "dtype": sorted({str(parameter.dtype) for parameter in parameters.values()}),
            "decoder_layers": len(program.layers) - len(program.mtp_layers),
            "mtp_layers": len(program.mtp_layers),
            **self.model_settings,
            "parameters": tuple(f"{name} {tuple(parameter.shape)}" for name, parameter in parameters.items()),
            "frozen_parameters": tuple(name for name, parameter in parameters.items() if not parameter.requires_grad),
            "seed": self.seed,
            "steps_done": self.steps_done,
            "microbatches": num_microbatches,
            "segments": tuple(str([s.layers for s in segments_of(program, config)]) for config in configs),
            "replay": tuple(str(config.replay) for config in configs),
            "recompute_modules": tuple(",".join(config.modules) for config in configs),
            "keep": tuple(str(config.keep) for config in configs),
            "order": self.order.name,
            "delay_wgrad": self.delay_wgrad,
            "lead": self.lead,
            "loss_scale": repr(self.loss_scale),
        }

    @property
    def model_settings(self) -> dict[str, str]:
        """Those of the module, as far as it says them."""
        given = self.module.compared_settings if isinstance(self.module, GivesSettings) else {}
        return {name: str(value) for name, value in given.items()}

    @property
    def stores(self) -> Stores:
        """Where segment inputs may wait."""
        return HOST_ONLY if self.shards is None else {**HOST_ONLY, Keep.SHARDED: self.shards}

    @property
    def device(self) -> torch.device:
        """Device of the parameters; if there are none, as in an empty pipeline stage, this rank's."""
        return next((p.device for p in self.module.parameters()), self.world.device)

    def get_extra_state(self) -> dict[str, int]:
        """The step count travels with the weights."""
        return {"steps_done": self.steps_done}

    def set_extra_state(self, state: Mapping[str, int]) -> None:
        """Take the step count back."""
        self.steps_done = state["steps_done"]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is bound to this very module."""
        return {k: v for k, v in self.__dict__.items() if k not in _BOUND}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._bind()


_CHECKS: Mapping[str, Callable[[str, Any], object]] = MappingProxyType(
    {
        "module": partial(check_kind, kind=nn.Module, what="an nn.Module with a method program()"),
        "delay_wgrad": check_bool,
        "seed": check_integer,
        "loss_scale": partial(check_kind, kind=LossScale, what="a loss scale, as PerMicrobatch() or PerToken()"),
        "lanes": partial(check_kind, kind=Lanes, what="lanes, as NullLanes() or StreamLanes(device)"),
        "shards": partial(check_kind, kind=(Sharded, NoneType), what="a Sharded(group) or None"),
        "world": partial(check_kind, kind=World, what="a World, as SOLO"),
        "steps_done": partial(check_count, at_least=0),
    }
)
"""Of settings that are looked at no more once they are set."""


def check_chunk(chunk: object) -> None:
    """Refuse anything but a ModelChunk, as the module that one is made of.

    Raises:
        ConfigError: It is something else.
    """
    if not isinstance(chunk, ModelChunk):
        raise ConfigError(field="chunk", value=type(chunk).__name__, rule="must be a ModelChunk: make one of the model")


def _program_of(module: nn.Module) -> Program:
    """The program of a module.

    Raises:
        ConfigError: It has none.
    """
    if isinstance(module, HasProgram):
        program = module.program()
        if isinstance(program, Program):
            return program
    rule = "must have a method program() that returns a Program, as ProgramBuilder.build() does"
    raise ConfigError(field="module", value=type(module).__name__, rule=rule)


def _check_dtypes(module: nn.Module) -> None:
    """Refuse parameters that train_step does not train well.

    Raises:
        ConfigError: float16.
    """
    if any(p.dtype is torch.float16 for p in module.parameters()):
        rule = "float16 needs a loss scaler, which train_step does not drive; use bfloat16"
        raise ConfigError(field="dtype", value=torch.float16, rule=rule)


def _configs_of(recompute: object) -> Configs:
    """The setting as it is kept: nothing that the caller may change later.

    Raises:
        ConfigError: It holds something else than configs.
    """
    if isinstance(recompute, RecomputeConfig):
        return recompute
    configs = tuple(recompute) if isinstance(recompute, Iterable) else (recompute,)
    if not all(isinstance(config, RecomputeConfig) for config in configs):
        rule = "must be a RecomputeConfig, or one per microbatch"
        raise ConfigError(field="recompute", value=recompute, rule=rule)
    return configs


def each_config(recompute: Configs) -> tuple[RecomputeConfig, ...]:
    """The configs of a chunk's setting."""
    return (recompute,) if isinstance(recompute, RecomputeConfig) else recompute


def _any_sharded(recompute: Configs) -> bool:
    return any(config.keep is Keep.SHARDED for config in each_config(recompute))
