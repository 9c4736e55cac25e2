"""costs: steps of chunks against the plans they stand for; what pairing hides, what deferring moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from overlap.costs import PRESETS, StageCosts
from overlap.ir import Op
from overlap.pipeline_model.costs import ChunkTimes
from overlap.pipeline_model.layout import cut
from overlap.pipeline_model.run import StepTime
from overlap.simulate import Run, simulate
from overlap.steady import measure
from overlap.timeline import Timeline
from recompute import RecomputeConfig, Replay
from tests.pipeline_model.tools import steps, system

uniform, block, none = RecomputeConfig.uniform, RecomputeConfig.block, RecomputeConfig.none
H200 = PRESETS["h200"]


def times(recompute: RecomputeConfig, *, layers: int = 4, defer: bool = False, delayed: bool = True) -> ChunkTimes:
    chunks = cut(system(3 * layers, recompute, delayed=delayed), (layers,) * 3)
    return ChunkTimes(chunks, 1, defer_wgrad=defer)


def of(chunk_times: ChunkTimes, text: str) -> StepTime:
    return chunk_times.of(steps(text)[0])


def test_a_forward_alone_is_its_slots() -> None:
    middle = of(times(none()), "1F0")
    layer = sum(H200.of(Op.FORWARD, name) for name in ("attn", "dispatch", "experts", "combine", "post"))
    assert middle.milliseconds == pytest.approx(4 * layer)
    assert middle.ready == pytest.approx((4 * layer,))
    assert middle.exposed_a2a == pytest.approx(4 * 2 * 0.63)
    assert of(times(none()), "0F0").milliseconds == pytest.approx(4 * layer + 0.02)
    assert of(times(none()), "2F0").milliseconds == pytest.approx(4 * layer + 0.9)


def test_a_pair_grows_by_the_steady_pair() -> None:
    """Between chunks of many and of more layers lie as many pairs in steady state."""
    recompute = uniform(1, replay=Replay.HIDDEN)
    long, longer = (of(times(recompute, layers=layers), "1F1;1B0").milliseconds for layers in (10, 16))
    assert longer - long == pytest.approx(6 * measure(system(8, recompute), 1).milliseconds)


def test_a_hidden_replay_makes_the_pair_shorter_and_exposes_less() -> None:
    exposed, hidden = (of(times(uniform(1, replay=replay)), "1F1;1B0") for replay in Replay)
    assert hidden.milliseconds < exposed.milliseconds
    assert hidden.exposed_a2a < exposed.exposed_a2a


def test_gradients_leave_before_the_last_slots() -> None:
    """Under single_queue a pair ends with post of its forward; a backward alone with attention's weight gradients."""
    made = times(none())
    forward, backward = of(made, "1F1;1B0").ready
    assert backward < forward == of(made, "1F1;1B0").milliseconds
    alone = of(made, "1B0")
    assert alone.milliseconds - alone.ready[0] == pytest.approx(H200.of(Op.WGRAD, "attn"))


@pytest.mark.parametrize("recompute", [none(), uniform(1), block(2)], ids=str)
@pytest.mark.parametrize("defer", [False, True])
def test_a_split_backward_is_the_whole(recompute: RecomputeConfig, defer: bool) -> None:
    """Compute is the same in two parts; W holds the layers that keep their activations, and all if it is deferred."""
    made = times(recompute, defer=defer)
    whole, inputs, weights = (of(made, text) for text in ("1B0", "1I0", "1W0"))
    layers = {"none": 4, "uniform": 0, "block": 2}[str(recompute).split()[0]]
    one = H200.of(Op.WGRAD, "attn") + H200.of(Op.WGRAD, "experts")
    assert weights.milliseconds == pytest.approx((4 if defer else layers) * one)
    assert inputs.milliseconds <= whole.milliseconds <= inputs.milliseconds + weights.milliseconds + 1e-9
    merged = times(recompute, defer=defer, delayed=False)
    assert (of(merged, "1I0"), of(merged, "1W0")) == (inputs, weights), "a split one has W slots either way"


def test_equal_steps_are_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(name: str, runs: Sequence[Run], costs: StageCosts, queues: int) -> Timeline:
        calls.append(name)
        return simulate(name, runs, costs, queues)

    monkeypatch.setattr("overlap.pipeline_model.costs.simulate", counted)
    chunks = cut(system(6, none()), (1,) * 6)
    made = ChunkTimes(chunks, 1)
    for text in ("1F0", "1F1", "2F0", "4F7"):
        of(made, text)
    assert len(calls) == 1
    of(made, "0F0")
    assert len(calls) == 2


def test_an_empty_stage_takes_no_time() -> None:
    made = ChunkTimes(cut(system(2, none()), (1, 0, 1)), 1)
    assert of(made, "1F0") == StepTime(milliseconds=0, ready=(0,))
    assert of(made, "0F1;1B0").milliseconds == of(made, "0F1").milliseconds
    assert of(made, "1F1;0B0").milliseconds == of(made, "0B0").milliseconds


def test_costs_of_the_chunks_count() -> None:
    chunks = cut(replace(system(3, none()), costs=H200.scaled_transfers(2)), (1, 1, 1))
    assert of(ChunkTimes(chunks, 1), "1F0").exposed_a2a == pytest.approx(4 * 0.63)
