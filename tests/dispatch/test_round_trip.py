"""Stand-ins for a network: rows come back bit for bit, and gradients too."""

from __future__ import annotations

import pytest
import torch

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


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), "1", None])
def test_bad_scale(scale: float) -> None:
    with pytest.raises(ConfigError, match="loopback_scale"):
        HostLoopback(scale)


@pytest.mark.parametrize(("programs", "rounds", "name"), [(0, 1, "programs"), (1, 0, "rounds")])
def test_bad_copy(programs: int, rounds: int, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        SmCopy(programs, rounds)
