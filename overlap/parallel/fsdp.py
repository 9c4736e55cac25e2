"""FSDP2 driven from outside: groups of parameters that are brought together and scattered when told, not by hooks.

The only file that names private parts of torch.distributed.fsdp. `fully_shard` hangs its work on hooks of a module's
forward and backward. A stage may call such a module or pass it by, and a replay calls it again, so the hooks are taken
off, and what they would do is called here:
1. `_lazy_init` once, which FSDP2 does at the root's first forward.
2. `post_backward` of a group after each microbatch's backward: it adds the gradient up in the reduce type, and at the
   last microbatch starts the reduce-scatter. Without it gradients would add up in bfloat16.
3. The root's final callback at the end of the step, which waits for the reduce-scatters.
tests/parallel/test_fsdp_contract.py pins what is relied on. torch 2.11 to 2.13 agree in it but for `_groups_of`.

NOTE [ Streams of sharded parameters ]
All calls run with the compute stream current: only stages of the compute lane may read sharded parameters
(attach.make_parallel refuses others), an action runs between its issue's begin, which switches to that lane, and its
end; what comes before and after the issues runs where the lanes are joined. So:
1. `unshard(async_op=True)` copies in on the compute stream (in any state of a group; only async_op=False takes FSDP2's
   all-gather streams), behind the optimizer's writes. NCCL's own stream waits for the point where the action stands.
2. `wait_for_unshard` makes the compute stream wait for NCCL and copies out there: later readers are behind it.
3. Whole parameters are allocated by the copy-out and freed by `reshard` on the compute stream, both in the order of
   its kernels: memory freed while a kernel of that stream is still to run is given to kernels behind it.
4. `post_backward` copies gradients in on the compute stream, where they were made; FSDP2's reduce-scatter stream waits
   for that, and its input is held until a stream wait orders the compute stream behind the reduction.
5. Sharded gradients belong to the reduce-scatter stream. The final callback orders the compute stream behind them; the
   next reduction orders that stream behind the compute stream, and so behind their last reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from overlap.parallel.collective_log import Collectives


class ParameterGroup:
    """The parameters that one `fully_shard` call governs.

    Args:
        module: What `fully_shard` was called on, after start() of its root.
        name: The module's name, for messages.
        collectives: Takes note of what is launched.
    """

    def __init__(self, module: FSDPModule, name: str, collectives: Collectives) -> None:
        (self._group,) = _groups_of(module)
        self.name = name
        self._collectives = collectives

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The sharded parameters, as the optimizer sees them."""
        return tuple(item.sharded_param for item in self._group.fsdp_params)

    @property
    def together(self) -> bool:
        """Whether the whole parameters are on this rank, or on their way."""
        return self._group.is_unsharded or self._group._all_gather_result is not None

    def prefetch(self) -> None:
        """Start to bring the parameters together, on the current stream."""
        if not self.together:
            self._collectives.record("all_gather", self.name, self.parameters[0])
        self._group.unshard(async_op=True)

    def gather(self) -> None:
        """Bring the parameters together, or wait until they are."""
        self.prefetch()
        self._group.wait_for_unshard()

    def scatter(self) -> None:
        """Free the whole parameters; each rank keeps its shard."""
        self._group.reshard()

    def backward_done(self, planned: frozenset[int], *, reduce: bool) -> None:
        """A microbatch's gradients of this group are complete; `reduce`: those of the step are.

        Args:
            planned: Places of the parameters that the plan gives gradients. One without takes part with zeros: what a
                rank sends never depends on its data.
            reduce: Start the reduce-scatter.
        """
        for place in planned:
            item = self._group.fsdp_params[place]
            whole = item._unsharded_param
            if whole.requires_grad and whole.grad is None and item.unsharded_accumulated_grad is None:
                whole.grad = torch.zeros_like(whole)
        if self._group._orig_dtype is None:
            # FSDP2 looked for the types of gradients when nothing here trained
            self._group._init_mp_dtypes()
        if reduce:
            self._collectives.record("reduce_scatter", self.name, self.parameters[0])
        self._group.reduce_grads = reduce
        self._group.reshard_after_backward = False
        self._group.post_backward()

    def forget(self) -> None:
        """Drop what a failed step left: whole parameters and gradients that were not reduced."""
        gathering = self._group._all_gather_result
        if gathering is not None and gathering.all_gather_work is not None and self._group.device.type != "cpu":
            # orders the stream, not the host; on the CPU the handle keeps the buffer
            gathering.all_gather_work.wait()
        self._group._all_gather_result = None
        for item in self._group.fsdp_params:
            item.unsharded_accumulated_grad = None
            if "_unsharded_param" in vars(item):
                item._unsharded_param.grad = None
        self._group.reshard()


def start(root: FSDPModule, collectives: Collectives) -> list[ParameterGroup]:
    """Do what FSDP2 does at the first forward of the outermost module; returns the groups of parameters."""
    root._get_fsdp_state()._lazy_init()
    for state in root._get_fsdp_state()._state_ctx.all_states:
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
    sharded = {name: part for name, part in cast(nn.Module, root).named_modules() if isinstance(part, FSDPModule)}
    return [ParameterGroup(part, name, collectives) for name, part in sharded.items() if _groups_of(part)]


def _groups_of(module: FSDPModule) -> list[Any]:
    """The groups of one `fully_shard` call: none without parameters, one on one mesh.

    torch 2.11 has one or None; 2.12 made it a list, for parameters on several meshes.
    """
    state = vars(module._get_fsdp_state())
    found = state["_fsdp_param_groups"] if "_fsdp_param_groups" in state else [state["_fsdp_param_group"]]
    return [group for group in found if group is not None]


def finish_step(root: FSDPModule, groups: Sequence[ParameterGroup]) -> None:
    """Wait for all reduce-scatters, on the current stream; `.grad` of the sharded parameters is then complete."""
    state: Any = root._get_fsdp_state()
    for group in groups:
        # the callback must not reduce again what a call without reduction keeps for the next one
        group._group._training_state = TrainingState.POST_BACKWARD
    state._root_post_backward_final_callback()
