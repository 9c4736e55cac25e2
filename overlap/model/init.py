"""Initial weights: a function of the seed and the shapes, drawn from a generator of their own."""

from __future__ import annotations

import torch
from torch import nn


class OwnInit(nn.Module):
    """A module that says itself where its vectors start."""

    def reset(self) -> None:
        """Fill them; called under no_grad, after all parameters were filled by the general rule."""
        raise NotImplementedError


class Sliced(nn.Module):
    """A module whose own parameters hold a part, along their first dimension, of what all ranks hold together.

    Args:
        whole: Length of that dimension over all ranks.
        held: The places of it that are here, one after another.
    """

    def __init__(self, whole: int, held: range) -> None:
        super().__init__()
        self.whole = whole
        self.held = held


@torch.no_grad()
def init_weights(model: nn.Module, seed: int) -> None:
    """Fill every parameter: matrices normal with variance 1/(inner width), vectors with ones or as OwnInit says.

    A matrix is [outer, inner] or [experts, inner, outer]; the embedding [vocab, hidden] counts as the former. The same
    seed gives the same numbers (rounded) in every type and on every device. Of a sliced parameter the whole is drawn,
    one parameter at a time, so a slice holds what the same places hold in one process.

    Args:
        model: Its parameters are visited in `named_parameters()` order.
        seed: Any integer; the global generators are not touched.
    """
    generator = torch.Generator().manual_seed(seed)
    slices = {
        id(parameter): module
        for module in model.modules()
        if isinstance(module, Sliced)
        for parameter in module.parameters(recurse=False)
    }
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
            continue
        part = slices.get(id(parameter))
        shape = parameter.shape if part is None else (part.whole, *parameter.shape[1:])
        drawn = torch.empty(shape, dtype=torch.float32).normal_(generator=generator)
        if part is not None:
            drawn = drawn[part.held.start : part.held.stop]
        parameter.copy_(drawn * parameter.shape[1] ** -0.5)
    for module in model.modules():
        if isinstance(module, OwnInit):
            module.reset()
