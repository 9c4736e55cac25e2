"""From options to a model chunk and its microbatches."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from overlap.backends import load_backend
from overlap.chunk import ModelChunk
from overlap.cli.options import Options
from overlap.dispatch import LocalTransport, Transport
from overlap.dispatch.all_to_all import AllToAll
from overlap.dispatch.host_loopback import HostLoopback
from overlap.dispatch.sm_copy import SmCopy
from overlap.dispatch.symmetric_memory import SymmetricMemory, mapped_peers
from overlap.engine import Feeds
from overlap.lanes import Lanes, NullLanes
from overlap.model import Decoder
from overlap.model.cut import NO_BORDER, Border, Cut
from overlap.model.precision import DTYPES, wide_dtype
from overlap.model.routes import fix_route
from overlap.orders import load_order
from overlap.parallel.scale import PerTokenOfRanks
from overlap.parallel.work_lanes import WorkLanes
from overlap.parallel.works import Works
from overlap.parallel.world import SOLO, World
from overlap.scale import LossScale, PerMicrobatch, PerToken
from overlap.streams import StreamLanes
from overlap.training.rows import cut_rows
from overlap.training.seeds import data_seed
from recompute.errors import ConfigError

OwnModel = Callable[[int, int], tuple[nn.Module, list[dict[str, Any]]]]
"""`function(seed, microbatches)` returns a module with `program()`, and the feeds of its microbatches."""


def build_chunk(options: Options, world: World = SOLO) -> ModelChunk:
    """The model that the options describe, ready to train.

    Args:
        options: The run.
        world: This rank; in a world of several its own device counts.

    Raises:
        ConfigError, ProgramError, ScheduleError: The options do not fit together.
    """
    bench = make_bench(options, world)
    if not options.program:
        return make_decoder_chunk(options, bench)
    module, _ = load_own_model(options.program)(options.seed, 1)
    return _make_chunk(module, PerMicrobatch(), options, bench)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What all chunks of a rank run on."""

    world: World
    device: torch.device
    works: Works
    lanes: Lanes


def make_bench(options: Options, world: World) -> Bench:
    """The device and lanes of this rank.

    Raises:
        ConfigError: There is no such device.
    """
    # More threads wait for each other on a shared machine, and gain little on small shapes.
    torch.set_num_threads(options.threads)
    device = torch.device(options.device) if world.groups is None else world.device
    _check_there(device.type)
    works = Works()
    return Bench(world=world, device=device, works=works, lanes=_lanes(device, works, world))


def _check_there(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(field="device", value=device, rule="this machine or this torch build has no such device")


def make_decoder_chunk(
    options: Options,
    bench: Bench,
    *,
    cut: Cut | None = None,
    border: Border = NO_BORDER,
    split_embedding: bool = False,
) -> ModelChunk:
    """The built-in decoder, or a part of it; see Decoder for cut, border and split_embedding."""
    module = Decoder(
        options.model, transport=_transport(options, bench.world, bench.works), seed=options.seed,
        cut=cut, border=border, split_embedding=split_embedding,
    )  # fmt: skip
    _fix_route(module, options)
    scale = _token_scale(bench.world) if options.model.per_token_loss else PerMicrobatch()
    return _make_chunk(module, scale, options, bench)


def _make_chunk(module: nn.Module, scale: LossScale, options: Options, bench: Bench) -> ModelChunk:
    module = module.to(bench.device)
    if isinstance(module, Decoder):
        module = load_backend(options.backend.name, options.backend.fp8, bench.world).convert(module)
    return ModelChunk(
        module,
        recompute=options.recompute,
        order=load_order(options.order, options.recompute.replay),
        delay_wgrad=options.delay_wgrad,
        lead=options.lead,
        seed=options.seed,
        loss_scale=scale,
        lanes=bench.lanes,
        world=bench.world,
    )


def parallel(
    chunk: ModelChunk, options: Options, *, keep_together: bool = False, one_by_one: bool = False
) -> ModelChunk:
    """Keep the chunk in step with its replicas, as the options say; nothing to do in one process.

    Args:
        chunk: Changed in place.
        options: The run.
        keep_together: See DataSettings.
        one_by_one: Without shards, reduce every parameter by itself. Where an element lies in a bucket may decide the
            order of its sum over more than two ranks, and a part of a model has other buckets than the whole.
    """
    if chunk.world.groups is None:
        return chunk
    # costs a second to import, which a run of one process need not wait for
    from overlap.parallel.attach import DataSettings, make_parallel
    from overlap.parallel.buckets import BUCKET_BYTES

    wide = wide_dtype(DTYPES[options.model.dtype])
    settings = DataSettings(
        fsdp=options.parallel.fsdp,
        keep_together=keep_together,
        reduce_dtype=wide,
        bucket_bytes=1 if one_by_one else BUCKET_BYTES,
    )
    return make_parallel(chunk, settings)


def _token_scale(world: World) -> LossScale:
    return PerToken() if world.groups is None else PerTokenOfRanks(world)


def _lanes(device: torch.device, works: Works, world: World) -> Lanes:
    if device.type != "cpu":
        return StreamLanes(device)
    return NullLanes() if world.groups is None else WorkLanes(works)


def _transport(options: Options, world: World, works: Works) -> Transport:
    makers: dict[str, Callable[[], Transport]] = {
        "local": LocalTransport,
        "host_loopback": partial(HostLoopback, options.loopback_scale),
        "sm_copy": SmCopy,
        "all_to_all": lambda: AllToAll(world.ep_group, works, world.collectives),
        "symmetric_memory": lambda: SymmetricMemory(
            world.ep_group, world.collectives, mapped_peers(world.ep_group, world.device, options.parallel.timeout)
        ),
    }
    return makers[options.transport]()


def _fix_route(module: nn.Module, options: Options) -> None:
    experts = options.model.experts
    if options.parallel.route == "balanced":
        fix_route(module, experts)
    elif options.parallel.route == "first-rank":
        fix_route(module, len(options.parallel.layout.local_experts(experts, 0)))


def random_microbatches(options: Options, step: int) -> list[Feeds]:
    """Microbatches of random tokens; each step's are others, the same for the same options."""
    _check_there(options.device)
    if options.program:
        _, feeds = load_own_model(options.program)(options.seed + step, options.microbatches)
        return [to_device(item, options.device) for item in feeds]
    generator = torch.Generator().manual_seed(data_seed(options.seed, step, options.parallel.data_rank))
    shape = (options.batch, options.seq + 1)

    def draw() -> dict[str, Tensor]:
        tokens = torch.randint(options.model.vocab, shape, generator=generator)
        feeds = {"ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
        return cut_rows(feeds, options.model, generator)

    return [to_device(draw(), options.device) for _ in range(options.microbatches)]


def to_device(feeds: Feeds, device: str) -> Feeds:
    """The feeds' tensors on a device; anything else as it is."""
    return {name: value.to(device) if torch.is_tensor(value) else value for name, value in feeds.items()}


def load_own_model(name: str) -> OwnModel:
    """Import `module:function`.

    Raises:
        ConfigError: There is no such module or function, or it takes or, when called, returns something else.
    """
    module_name, _, function_name = name.partition(":")
    rule = "must be MODULE:FUNCTION, importable from the current folder; FUNCTION takes a seed and a count"
    if not module_name or not function_name:
        raise ConfigError(field="program", value=name, rule=rule)
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        function: OwnModel = getattr(importlib.import_module(module_name), function_name)
        inspect.signature(function).bind(0, 1)
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(field="program", value=name, rule=f"{rule} ({error})") from error
    return partial(_call_own_model, name, function)


def _call_own_model(name: str, function: OwnModel, seed: int, microbatches: int) -> Any:
    made: object = function(seed, microbatches)
    if type(made) is not tuple or len(made) != 2 or not isinstance(made[0], nn.Module) or type(made[1]) is not list:
        rule = "must return a module and the list of its microbatches"
        raise ConfigError(field="program", value=name, rule=rule)
    return made
