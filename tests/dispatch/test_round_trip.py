"""Stand-ins for a network: rows come back bit for bit, and gradients too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from overlap.dispatch import make_routing
from overlap.dispatch.host_loopback import HostLoopback
from overlap.dispatch.sm_copy import SmCopy
from recompute.errors import ConfigError


@pytest.mark.parametrize("scale", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_rows_and_gradients_come_back(scale: float, rows: int) -> None:
    transport = HostLoopback(scale)
    tokens, probs = torch.randn(rows, 3).bfloat16().requires_grad_(), torch.rand(rows)
    routing = make_routing(torch.zeros(rows, 1, dtype=torch.int64), 1)
    sent, weights, arrival = transport.dispatch(tokens, probs, routing)
    assert torch.equal(sent, tokens)
    assert torch.equal(weights, probs)
    assert weights is not probs
    assert arrival.counts is routing.counts
    assert arrival.order is None
    assert transport.dispatch(tokens, probs, routing, pinned=(arrival,))[2] is arrival
    assert sent.untyped_storage().data_ptr() != tokens.untyped_storage().data_ptr() or rows == 0
    grad = torch.randn(rows, 3).bfloat16()
    (found,) = torch.autograd.grad(sent, tokens, grad)
    assert torch.equal(found, grad)
    back, nothing, none = transport.dispatch_adjoint((grad, None, None), (routing, arrival))
    assert back is not None
    assert torch.equal(back, grad)
    assert nothing is none is None
    assert torch.equal(transport.combine(tokens, routing, arrival), tokens)
    assert transport.combine_adjoint((None,), (routing, arrival)) == (None, None, None)


class Copies(TorchDispatchMode):
    """Counts the bytes that are copied."""

    nbytes = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] = {}
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.nbytes += args[0].nbytes
        return func(*args, **kwargs)


@pytest.mark.parametrize(("scale", "moved"), [(0.25, 30 + 30 + 90), (1.0, 120 + 120), (2.5, 2 * (120 + 120 + 60))])
def test_scale_says_how_many_bytes_make_the_trip(scale: float, moved: int) -> None:
    """To the host and back; what does not make the trip is copied beside it."""
    with Copies() as copies:
        HostLoopback(scale).round_trip(torch.randn(10, 3))
    assert copies.nbytes == moved


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), "1", None])
def test_bad_scale(scale: float) -> None:
    with pytest.raises(ConfigError, match="loopback_scale"):
        HostLoopback(scale)


@pytest.mark.parametrize(("programs", "rounds", "name"), [(0, 1, "programs"), (1, 0, "rounds")])
def test_bad_copy(programs: int, rounds: int, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        SmCopy(programs, rounds)
