"""The precision context of a forward, captured once and entered again by whoever replays it (R15)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch

Precision = Callable[[], AbstractContextManager[object]]


def capture_precision(device_type: str) -> Precision | None:
    """The autocast that is on now.

    Args:
        device_type: As torch.autocast takes it ("cpu", "cuda").

    Returns:
        A factory of contexts that turn it on again; None if autocast is off. The contexts do not cache casted
        weights: a cast cached without a graph must not serve a later pass that needs one.
    """
    if not torch.is_autocast_enabled(device_type):
        return None
    dtype = torch.get_autocast_dtype(device_type)
    return partial(torch.autocast, device_type, dtype=dtype, cache_enabled=False)


def no_autocast(device_type: str) -> AbstractContextManager[object]:
    """Run backward (and everything else outside a stage's forward) without autocast."""
    return torch.autocast(device_type, enabled=False)
