"""Shards: what this rank holds of a tensor, and parameters apart by how they are laid out over ranks."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, in the same memory; all of one that is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def laid_out(part: Tensor, like: Tensor) -> Tensor:
    """What this rank holds of a tensor, as a tensor that lies over the ranks as another one of its shape does."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def parameter_groups(module: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
    """The parameters as an optimizer takes them: one group per layout, in order of first appearance.

    An optimizer's fused operations take tensors of one mesh at a time.
    """
    layouts: dict[object, list[nn.Parameter]] = {}
    for parameter in module.parameters():
        key = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        layouts.setdefault(key, []).append(parameter)
    return [{"params": parameters} for parameters in layouts.values()]
