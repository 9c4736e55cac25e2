"""The two copies of a shared embedding on one rank: what their gradients are after a step."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from overlap.pipelining.shared import SharedEmbedding
from tests.pipelining.models import alone


def copies() -> tuple[nn.Parameter, nn.Parameter]:
    return nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))


def add(copy: nn.Parameter, gradient: Tensor) -> None:
    copy.grad = gradient if copy.grad is None else copy.grad + gradient


def test_a_step_adds_the_sum_to_what_was_there() -> None:
    first, last = copies()
    shared = SharedEmbedding(first=first, last=last)
    shared.join()
    assert last.data_ptr() == first.data_ptr()
    first.grad = torch.full((3,), 10.0)
    with shared.apart(0, 0, None):
        add(first, torch.full((3,), 1.0))
        add(last, torch.full((3,), 2.0))
    assert first.grad.tolist() == [13.0] * 3
    assert last.grad is None


def test_after_calls_that_did_not_add_the_copies_up_each_part_counts_once() -> None:
    first, last = copies()
    shared = SharedEmbedding(first=first, last=last)
    first.grad, last.grad = torch.full((3,), 10.0), torch.full((3,), 20.0)
    with shared.apart(0, 0, None, after_others=True):
        add(first, torch.full((3,), 1.0))
        add(last, torch.full((3,), 2.0))
    assert first.grad.tolist() == [33.0] * 3
    assert last.grad is None


def test_sharded_copies_have_a_gradient_each() -> None:
    """In memory of its own: gradients are scaled in place, copy by copy."""
    with alone():
        mesh = init_device_mesh("cpu", (1,))
        first, last = (
            nn.Parameter(DTensor.from_local(torch.zeros(3), mesh, [Replicate()])) for _ in range(2)
        )  # fmt: skip
        shared = SharedEmbedding(first=first, last=last)
        assert shared.alias is None
        with shared.apart(0, 0, None):
            for copy, value in ((first, 1.0), (last, 2.0)):
                copy.grad = DTensor.from_local(torch.full((3,), value), mesh, [Replicate()])
        parts = [copy.grad.to_local() for copy in (first, last) if isinstance(copy.grad, DTensor)]
    assert [part.tolist() for part in parts] == [[3.0] * 3] * 2
    assert parts[0].data_ptr() != parts[1].data_ptr()
