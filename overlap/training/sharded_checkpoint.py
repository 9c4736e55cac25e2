"""Training checkpoints of several ranks: a folder that every rank writes its part of (torch.distributed.checkpoint).

What is saved is named and shaped as in one process: a shard, or the experts of one rank, says which part of the whole
it is. So a run may resume on another layout. FOLDER/latest names the newest complete version, a folder beside it; it
is replaced last, in one piece, so whenever writing stops, the version before can be read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Replicate, Shard

from overlap.chunk import ModelChunk
from overlap.parallel.experts import expert_parameters
from overlap.parallel.shards import local
from overlap.parallel.world import World
from overlap.training.checkpoint import check_config
from recompute.errors import ConfigError

FORMAT = 2
LATEST = "latest"
_RUN = "run.json"
_VERSION = "step-"


def save_folder(folder: Path, chunk: ModelChunk, optimizer: torch.optim.Optimizer, config: Mapping[str, Any]) -> None:
    """Write weights, buffers, step count, optimizer and generator state as the newest version. Collective.

    Args:
        folder: Where versions stand; made if missing. Older versions are removed when the new one is complete.
        chunk: The model; its buffers are the same on all data ranks.
        optimizer: Its optimizer.
        config: What a resumed run must agree on.
    """
    world = chunk.world
    version = _agreed_version(folder, chunk.steps_done, world)
    state = {**_model_state(chunk, world), **_optimizer_state(chunk, optimizer, world), "rng": torch.get_rng_state()}
    save(state, checkpoint_id=folder / version, no_dist=world.groups is None)
    if world.rank == 0:
        run = {"format": FORMAT, "config": dict(config), "steps_done": chunk.steps_done}
        (folder / version / _RUN).write_text(json.dumps(run))
        publish(folder, version)
    _wait_for_all(world)


def load_folder(folder: Path, chunk: ModelChunk, optimizer: torch.optim.Optimizer, config: Mapping[str, Any]) -> None:
    """Take the newest version back, whatever layout wrote it. Collective.

    Raises:
        ConfigError: The folder holds no complete version, or one of another config or model.
    """
    world = chunk.world
    version = latest_version(folder)
    try:
        run = json.loads((version / _RUN).read_text())
    except (OSError, ValueError) as error:
        rule = f"must be a folder with a complete checkpoint ({error})"
        raise ConfigError(field="resume", value=str(folder), rule=rule) from error
    if not isinstance(run, dict) or run.get("format") != FORMAT:
        raise ConfigError(field="resume", value=str(folder), rule=f"must be a checkpoint of format {FORMAT}")
    # as JSON has it: tuples are lists there
    check_config(folder, run["config"], json.loads(json.dumps(dict(config))))
    saved = FileSystemReader(version).read_metadata().state_dict_metadata
    _start_state(chunk, optimizer, saved)
    state = {**_model_state(chunk, world), **_optimizer_state(chunk, optimizer, world), "rng": torch.get_rng_state()}
    if different := sorted(set(state) ^ set(saved)):
        raise ConfigError(field="resume", value=str(folder), rule=f"holds another model: {different[0]} is on one side")
    load(state, checkpoint_id=version, no_dist=world.groups is None)
    torch.set_rng_state(state["rng"])
    chunk.steps_done = run["steps_done"]


def latest_version(folder: Path) -> Path:
    """The newest complete version.

    Raises:
        ConfigError: There is none.
    """
    try:
        version = folder / (folder / LATEST).read_text()
    except OSError as error:
        raise ConfigError(
            field="resume", value=str(folder), rule=f"must be a folder with a complete checkpoint ({error.strerror})"
        ) from error
    return version


def publish(folder: Path, version: str) -> None:
    """Make a complete version the newest one, then remove the others."""
    partial = folder / f"{LATEST}.partial"
    partial.write_text(version)
    os.replace(partial, folder / LATEST)
    for other in folder.glob(f"{_VERSION}*"):
        if other.name != version:
            shutil.rmtree(other)


def _agreed_version(folder: Path, step: int, world: World) -> str:
    """A name that no version has yet: rank 0 looks and tells the others."""
    names: list[str] = [""]
    if world.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        taken = {other.name for other in folder.glob(f"{_VERSION}*")}
        names[0] = next(n for n in (f"{_VERSION}{step}.{i}" for i in range(len(taken) + 1)) if n not in taken)
    if world.groups is not None:
        dist.broadcast_object_list(names, src=0, group=world.groups.everyone)
    return names[0]


def _wait_for_all(world: World) -> None:
    if world.groups is not None:
        dist.barrier(world.groups.everyone)


def _model_state(chunk: ModelChunk, world: World) -> dict[str, Any]:
    experts = expert_parameters(chunk.module)
    names = {name for name, parameter in chunk.module.named_parameters() if id(parameter) in experts}
    return {
        f"model.{name}": _placed(value, world) if name in names else value
        for name, value in chunk.module.state_dict().items()
    }


def _optimizer_state(chunk: ModelChunk, optimizer: torch.optim.Optimizer, world: World) -> dict[str, Any]:
    """The optimizer's tensors by the name of their parameter."""
    experts = expert_parameters(chunk.module)
    found: dict[str, Any] = {}
    for name, parameter in chunk.module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            split = id(parameter) in experts and value.shape == parameter.shape
            found[f"optimizer.{key}.{name}"] = _placed(value, world) if split else value
    return found


def _placed(tensor: Tensor, world: World) -> Tensor:
    """A tensor of one value per expert, as a part of that of all experts; shares the memory."""
    if world.layout.ep == 1:
        return tensor
    whose = Shard(1) if isinstance(tensor, DTensor) else Replicate()
    return DTensor.from_local(local(tensor.detach()), world.mesh["expert_data", "ep"], [whose, Shard(0)])


def _start_state(chunk: ModelChunk, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Give the optimizer the state that a checkpoint has, to be filled in place."""
    for name, parameter in chunk.module.named_parameters():
        moments = {key: f"optimizer.{key}.{name}" for key in ("exp_avg", "exp_avg_sq")}
        if all(entry in saved for entry in moments.values()):
            zeros = {key: torch.zeros_like(parameter, requires_grad=False) for key in moments}
            optimizer.state[parameter] = {"step": torch.zeros(()), **zeros}
