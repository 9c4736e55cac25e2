"""Does a stage's `graph_only` leave the graph that its forward leaves? Part of check_stages.

Each runs once, with the same gradients into it. What comes out at reads and parameters, and what delayed weight
gradients would be computed from, must be the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from overlap.errors import ProgramError
from overlap.ir import Stage
from recompute import state
from recompute.wgrad import WeightGradients, collect_weight_gradients, weights_left_out

Run = Callable[[Stage, Sequence[Any]], Sequence[Any]]
"""run(stage, leaves) calls the stage's forward with a graph."""
Same = Callable[[Tensor, Tensor], bool]
_Late = tuple[Hashable, Sequence[Tensor | None]]
"""The weight (by identity, or by its place among the reads) and what its gradient waits with."""


@dataclass(frozen=True, slots=True)
class _Left:
    """What backward through a graph gives."""

    reads: Sequence[Tensor | None]
    parameters: dict[int, Tensor | None]
    late: Sequence[_Late]


def check_graph_only(
    stage: Stage,
    make_leaves: Callable[[], Sequence[Any]],
    run: Run,
    outputs: Sequence[Any],
    leaves_of: Callable[[Tensor], Sequence[Tensor]],
    same: Same,
) -> None:
    """Compare the two forms of a stage that declares `graph_only`.

    Args:
        stage: The stage.
        make_leaves: Gives the stage's reads, new to autograd at each call.
        run: Runs a form.
        outputs: What forward wrote, detached; serves as the gradient too.
        leaves_of: The leaves of a tensor's graph.
        same: Bitwise equality.

    Raises:
        ProgramError: They differ in shape, type or device of an output, or in a gradient.
    """
    if stage.graph_only is None:
        return
    before = state.take(stage.state)
    found: list[_Left] = []
    for form in (stage, replace(stage, forward=stage.graph_only)):
        with state.as_of(stage.state, before):
            found.append(_backward(form, make_leaves(), run, outputs, leaves_of))
    wanted, left = found
    for name, gradient, other in zip(stage.reads, wanted.reads, left.reads, strict=True):
        if not _same(gradient, other, same):
            raise _differs(stage, f"another gradient of {name!r}")
    for key in wanted.parameters | left.parameters:
        known = key in wanted.parameters and key in left.parameters
        if not known or not _same(wanted.parameters[key], left.parameters[key], same):
            raise _differs(stage, "another gradient of a parameter")
    for late, later in zip_longest(wanted.late, left.late):
        if late is None or later is None or late[0] != later[0] or not _all_same(late[1], later[1], same):
            raise _differs(stage, "another delayed weight gradient")


def _backward(
    form: Stage,
    leaves: Sequence[Any],
    run: Run,
    outputs: Sequence[Any],
    leaves_of: Callable[[Tensor], Sequence[Tensor]],
) -> _Left:
    with ExitStack() as stack:
        # the caller's hooks are for a step's tensors
        stack.enter_context(saved_tensors_hooks(_itself, _itself))
        if form.wgrad:
            # as in a step that delays: no hook of a weight is called, and its gradient takes no memory here
            stack.enter_context(weights_left_out())
        results = run(form, leaves)
    pairs = []
    for name, output, result in zip(form.writes, outputs, results, strict=True):
        if name not in form.nondiff:
            if _metadata(result) != _metadata(output):
                raise _differs(form, f"{name!r} as {_metadata(result)}, not {_metadata(output)}")
            pairs += [(result, output)] if result.requires_grad else []
    tracked = [leaf for leaf in leaves if torch.is_tensor(leaf) and leaf.requires_grad]
    places = {id(leaf): place for place, leaf in enumerate(leaves)}
    parameters = {id(leaf): leaf for result, _ in pairs for leaf in leaves_of(result) if id(leaf) not in places}
    collector = WeightGradients()
    gradients: Sequence[Tensor | None] = [None] * (len(tracked) + len(parameters))
    if pairs and gradients:
        # as in a step; and autograd's own thread would warn that it has no CUDA context yet
        with collect_weight_gradients(collector), torch.autograd.set_multithreading_enabled(False):
            gradients = torch.autograd.grad(
                [result for result, _ in pairs], [*tracked, *parameters.values()],
                [output.contiguous() for _, output in pairs], allow_unused=True,
            )  # fmt: skip
    given = dict(zip(map(id, tracked), gradients, strict=False))
    return _Left(
        reads=[given.get(id(leaf)) for leaf in leaves],
        parameters=dict(zip(parameters, gradients[len(tracked) :], strict=True)),
        late=[
            (("read", places[id(p.weight)]) if id(p.weight) in places else id(p.weight), p.tensors)
            for p in collector.pending
        ],
    )


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _metadata(value: Tensor) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    return tuple(value.shape), value.dtype, value.device


def _same(left: Tensor | None, right: Tensor | None, same: Same) -> bool:
    if left is None or right is None:
        return left is right
    return same(left, right)


def _all_same(lefts: Sequence[Tensor | None], rights: Sequence[Tensor | None], same: Same) -> bool:
    return len(lefts) == len(rights) and all(_same(*pair, same) for pair in zip(lefts, rights, strict=True))


def _differs(stage: Stage, what: str) -> ProgramError:
    return ProgramError(
        f"stage {stage.label}: its graph_only gives {what}: it must leave the graph that forward leaves, and outputs "
        "of the same shape, type and device"
    )
