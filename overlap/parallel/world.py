"""World: this process among the ranks of a job: its groups, its device mesh, its device.

open_world() forms the groups once; whoever communicates is handed a group and asks for no global state.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from overlap.engine import Observer
from overlap.parallel.collective_log import CollectiveLog, Collectives, NoLog
from overlap.parallel.layout import DIMENSIONS, ParallelLayout, Place
from recompute.errors import ConfigError

TIMEOUT = timedelta(minutes=5)
"""How long a collective waits for the other ranks."""
BACKENDS = ("auto", "gloo", "nccl")
DATA = "data"
"""Name of the one dimension of Groups.data_mesh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The process groups of one rank, and the meshes over them."""

    everyone: dist.ProcessGroup
    """All ranks of the job, by gloo: for objects and other things that stay on the CPU."""
    ep: dist.ProcessGroup
    """Ranks that exchange tokens."""
    data: dist.ProcessGroup
    """All ranks of one pipeline stage: replicas of the dense parameters."""
    expert_data: dist.ProcessGroup
    """Ranks that hold the same experts."""
    pp: dist.ProcessGroup
    """One rank of each pipeline stage, first stage first."""
    mesh: DeviceMesh
    """Dimensions `pp`, `expert_data`, `ep`."""
    data_mesh: DeviceMesh
    """One dimension `data` over the data group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One rank of a job."""

    layout: ParallelLayout
    rank: int
    device: torch.device
    groups: Groups | None
    """None: one process that belongs to no process group, as in SOLO."""
    debug: CollectiveLog | None = None
    """Takes note of collectives, so that ranks can compare them after each step; None: nobody does."""
    count: NoLog = field(default_factory=NoLog)
    """Counts collectives where nobody takes note of them."""
    watch: Observer | None = None
    """Notes where this rank is, for the others; None: nobody does."""

    def __deepcopy__(self, memo: dict[int, Any]) -> World:
        """Copies of a model belong to the same ranks."""
        return self

    @property
    def collectives(self) -> Collectives:
        """What takes note of collectives."""
        return self.count if self.debug is None else self.debug

    @property
    def observers(self) -> tuple[Observer, ...]:
        """What has to watch a step."""
        return tuple(observer for observer in (self.watch, self.debug) if observer is not None)

    @property
    def size(self) -> int:
        """Processes of the job."""
        return self.layout.world_size

    @property
    def place(self) -> Place:
        """Where this rank is in the mesh."""
        return self.layout.place(self.rank)

    @property
    def data_rank(self) -> int:
        """Which data this rank draws."""
        return self.layout.data_rank(self.rank)

    @property
    def formed(self) -> Groups:
        """The groups of a job of several processes.

        Raises:
            RuntimeError: This process belongs to no process group.
        """
        if self.groups is None:
            raise RuntimeError("this process belongs to no process group: open_world() forms one")
        return self.groups

    @property
    def mesh(self) -> DeviceMesh:
        """Groups.mesh."""
        return self.formed.mesh

    @property
    def ep_group(self) -> dist.ProcessGroup:
        """Groups.ep."""
        return self.formed.ep

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Groups.data."""
        return self.formed.data

    @property
    def expert_data_group(self) -> dist.ProcessGroup:
        """Groups.expert_data."""
        return self.formed.expert_data


SOLO = World(layout=ParallelLayout(), rank=0, device=torch.device("cpu"), groups=None)
"""One process without process groups."""


def launched_processes() -> int:
    """Processes that torchrun started for this job; 1 without torchrun.

    Raises:
        ConfigError: WORLD_SIZE is no number.
    """
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal():
        raise ConfigError(field="WORLD_SIZE", value=text, rule="must be the number of processes, as torchrun sets it")
    return int(text)


def open_world(
    layout: ParallelLayout,
    device: str = "cpu",
    timeout: timedelta = TIMEOUT,
    backend: str = "auto",
    debug: bool = False,
) -> World:
    """Join the job's process group, if this process has not yet, and form the groups of a layout.

    Collective: every rank calls it with the same arguments. The environment is torchrun's.

    Args:
        layout: Over all processes of the job.
        device: `cpu` or `cuda`. On `cuda` each process takes the device of its local rank; where the node has fewer,
            they share them.
        timeout: Of every collective in every group.
        backend: `gloo`, `nccl`, or `auto`: NCCL where every process has a device of its own, else gloo (NCCL refuses
            two ranks on one device). CPU tensors always go through gloo.
        debug: Whether ranks compare after every step what they issued.

    Raises:
        ConfigError: The layout is for another number of processes, the backend does not serve the device, or the
            machine has no such device.
    """
    if not dist.is_initialized():
        if layout.world_size != launched_processes():
            rule = f"the launcher started {launched_processes()} processes"
            raise ConfigError(field="world_size", value=layout.world_size, rule=rule)
        own, chosen = _local_device(device, backend)
        dist.init_process_group(chosen, timeout=timeout)
    elif layout.world_size != dist.get_world_size():
        rule = f"the process group has {dist.get_world_size()} processes"
        raise ConfigError(field="world_size", value=layout.world_size, rule=rule)
    else:
        own, _ = _local_device(device, backend)
    return World(
        layout=layout,
        rank=dist.get_rank(),
        device=own,
        groups=_form_groups(layout, own.type, timeout),
        debug=CollectiveLog() if debug else None,
    )


def close_world() -> None:
    """Leave the process group; nothing to do where there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _local_device(device: str, backend: str) -> tuple[torch.device, str]:
    """The device of this process, and the backend as init_process_group takes it."""
    if backend not in BACKENDS:
        raise ConfigError(field="backend", value=backend, rule=f"must be one of {', '.join(BACKENDS)}")
    if device == "cpu":
        if backend == "nccl":
            raise ConfigError(field="backend", value=backend, rule="serves CUDA devices only: use gloo on the CPU")
        return torch.device("cpu"), "gloo"
    count = torch.cuda.device_count()
    if not count:
        raise ConfigError(field="device", value=device, rule="this machine or this torch build has no such device")
    own = torch.device(device, int(os.environ.get("LOCAL_RANK", "0")) % count)
    torch.cuda.set_device(own)
    apart = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= count
    if backend == "nccl" and not apart:
        rule = f"needs a device for each process of the node; there are {count}: use gloo"
        raise ConfigError(field="backend", value=backend, rule=rule)
    return own, "gloo" if backend == "gloo" or not apart else "cpu:gloo,cuda:nccl"


def _form_groups(layout: ParallelLayout, kind: str, timeout: timedelta) -> Groups:
    """Make every group of the layout, in one order on all ranks, and keep those of this rank."""
    rank = dist.get_rank()

    def own(groups: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup:
        # A group that DeviceMesh makes itself would not get the timeout.
        made: list[tuple[bool, dist.ProcessGroup]] = [
            (rank in ranks, dist.new_group(list(ranks), timeout=timeout)) for ranks in groups
        ]
        return next(group for mine, group in made if mine)

    everyone: dist.ProcessGroup = dist.new_group(timeout=timeout, backend="gloo")
    pp, expert_data, ep = own(layout.pp_groups()), own(layout.expert_data_groups()), own(layout.ep_groups())
    data = own(layout.data_groups())
    ranks = torch.arange(layout.world_size).view(layout.shape)
    return Groups(
        everyone=everyone,
        ep=ep,
        data=data,
        expert_data=expert_data,
        pp=pp,
        mesh=DeviceMesh.from_group([pp, expert_data, ep], kind, ranks, mesh_dim_names=DIMENSIONS),
        data_mesh=DeviceMesh.from_group(data, kind, mesh_dim_names=(DATA,)),
    )
