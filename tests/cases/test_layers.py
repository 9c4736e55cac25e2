"""Layer counts and per-microbatch settings: ragged groups, chunks of different length, chunks without layers."""

from __future__ import annotations

import argparse
import copy
import json
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from overlap import ModelChunk, Op, Program, ProgramBuilder, reference_step, train_step
from overlap.cli import main
from overlap.engine import Engine, Feeds, MicrobatchState
from overlap.lanes import NullLanes
from overlap.lower import Plan, lower
from overlap.model import Decoder, ModelConfig
from overlap.model.head import Head
from overlap.orders import get_order
from overlap.plan import BACKWARD_SIDE, FORWARD_SIDE, PlanRequest, make_schedule
from overlap.verify import compare, step_facts
from recompute import ConfigError, RecomputeConfig, read_flags
from recompute.rng import default_generators
from tests.cases.model import (
    FIRST,
    NONE,
    B,
    U,
    Watcher,
    assert_equals_reference,
    different,
    m0,
    make_chunk,
    make_feeds,
    outcome,
    run,
)


@pytest.mark.parametrize(
    ("layers", "rule", "segments"),
    [
        (5, U(2), [(0, 1), (2, 3), (4,)]),
        (3, U(5), [(0, 1, 2)]),
        (1, U(1), [(0,)]),
        (3, B(7), [(0,), (1,), (2,)]),
    ],
)
def test_ragged_groups(layers: int, rule: RecomputeConfig, segments: list[tuple[int, ...]]) -> None:
    """Row 35: every layer once, in order, and the step is the reference's. Tables: tests/recompute/test_segments.py."""
    chunk, feeds = make_chunk(rule, layers=layers), make_feeds(2)
    assert list(step_facts(chunk, 2).segments) == segments
    assert_equals_reference(chunk, feeds)
    watcher = Watcher()
    run(chunk, feeds, observers=(watcher,))
    for microbatch in range(2):
        assert sorted(layer for layer in watcher.replayed_layers(microbatch) if layer is not None) == list(
            range(layers)
        )


def paired_plan(ahead: ModelChunk, behind: ModelChunk, rule: RecomputeConfig) -> Plan:
    """Forward of one chunk beside backward of another."""
    trained = ahead.program.trained(), behind.program.trained()
    front, back = ahead.planner.side(rule, trained[0]), behind.planner.side(rule, trained[1])
    schedule = make_schedule(get_order("multi_queue"), front, back, delayed=False)
    survivors = {FORWARD_SIDE: ahead.planner.survivors(rule, trained[0])}
    return lower(schedule, {FORWARD_SIDE: front, BACKWARD_SIDE: back}, survivors)


def run_pair(
    ahead: ModelChunk, behind: ModelChunk, rule: RecomputeConfig, feeds: list[Feeds], watcher: Watcher
) -> list[MicrobatchState]:
    """Forward of `behind`; then its backward beside the forward of `ahead`; then backward of `ahead`."""
    states = [MicrobatchState(0, mb, 1.0) for mb in feeds]
    engine = Engine(
        NullLanes(), run_seed=0, step=0, generators=default_generators(torch.device("cpu")), observers=(watcher,)
    )

    def alone(chunk: ModelChunk, forward: RecomputeConfig | None, backward: RecomputeConfig | None) -> Plan:
        return chunk.planner.plan(PlanRequest(forward, backward, chunk.program.trained()))

    with torch.autograd.set_multithreading_enabled(False):
        engine.run(alone(behind, rule, None), {FORWARD_SIDE: states[1]})
        engine.run(paired_plan(ahead, behind, rule), {FORWARD_SIDE: states[0], BACKWARD_SIDE: states[1]})
        engine.run(alone(ahead, None, rule), {BACKWARD_SIDE: states[0]})
    return states


@pytest.mark.parametrize("rule", [NONE, U(1), U(2), B(1)], ids=str)
@pytest.mark.parametrize(("ahead", "behind"), [(2, 0), (0, 2), (3, 2), (1, 4), (0, 0)])
def test_chunks_of_different_length(ahead: int, behind: int, rule: RecomputeConfig) -> None:
    """Row 37: two chunks, forward of one beside backward of the other; every node once, EQ, nothing left."""
    chunks = make_chunk(rule, layers=ahead, dropout=0.1), make_chunk(rule, layers=behind, dropout=0.1)
    feeds = make_feeds(2)
    norms: list[str] = []
    for name, chunk in zip(("ahead", "behind"), chunks, strict=True):
        norm = chunk.module.get_submodule("head.norm")
        norm.register_forward_hook(lambda *_, name=name: norms.append(name))
    expected = []
    for chunk, mb in zip(chunks, feeds, strict=True):
        side = copy.deepcopy(chunk)
        expected.append(outcome(side, reference_step(side, [mb])))
    norms.clear()
    nodes: Counter[tuple[int, Op, int | None, str]] = Counter()
    watcher = Watcher(lambda issue, owner: nodes.update([(id(owner), issue.slot.op, *issue.stage.key)]))
    states = run_pair(*chunks, rule, feeds, watcher)
    assert norms == ["behind", "ahead"], "the final norm runs once per chunk"
    for chunk, state, wanted in zip(chunks, states, expected, strict=True):
        found = {name: p.grad for name, p in chunk.module.named_parameters()}
        assert compare(wanted.gradients, found).different == ()
        assert all(torch.equal(state.outputs[name.partition(".")[2]], loss) for name, loss in wanted.losses.items())
        assert state.leftovers() == []
        if not chunk.program.layers:
            assert chunk.planner.side(rule, chunk.program.trained()).segments == ()
    assert set(nodes.values()) == {1}
    for chunk, state in zip(chunks, states, strict=True):
        for ops in (FIRST, (Op.BACKWARD,)):
            ran = {node[2:] for node in nodes if node[0] == id(state) and node[1] in ops}
            assert ran == set(chunk.program.by_key)


class HeadOnly(nn.Module):
    """The last chunk of a pipeline that has no layer left: final norm, projection, loss."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head = Head(config)
        torch.nn.init.normal_(self.head.projection.weight)
        torch.nn.init.ones_(self.head.norm.weight)

    def program(self) -> Program:
        b = ProgramBuilder()
        hidden, labels = b.input("hidden", needs_grad=True), b.input("labels")
        (loss,) = b.compute(
            "head", self.head, hidden, labels, outputs=("loss",), wgrad=True, parameters=self.head.parameters()
        )
        b.loss(loss)
        return b.build()


@pytest.mark.parametrize("delay_wgrad", [False, True])
@pytest.mark.parametrize("rule", [NONE, U(1), B(2)], ids=str)
def test_head_only_chunk(rule: RecomputeConfig, delay_wgrad: bool) -> None:
    """Row 37: a chunk that holds only the head trains, and hands the gradient of its input back."""
    chunk = ModelChunk(HeadOnly(m0()), recompute=rule, delay_wgrad=delay_wgrad)
    assert step_facts(chunk, 2).segments == ()

    def gradients(step: Callable) -> tuple[dict[str, Tensor | None], list[Tensor | None]]:
        side = copy.deepcopy(chunk)
        torch.manual_seed(0)
        fed = [torch.randn(2, 8, 16, requires_grad=True) for _ in range(2)]
        step(side, [{"hidden": h, "labels": mb["labels"]} for h, mb in zip(fed, make_feeds(2), strict=True)])
        return {name: p.grad for name, p in side.named_parameters()}, [h.grad for h in fed]

    (expected, expected_inputs), (found, found_inputs) = gradients(reference_step), gradients(train_step)
    assert compare(expected, found).different == ()
    assert len(found_inputs) == 2
    for a, b in zip(expected_inputs, found_inputs, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)
        assert a.ne(0).any()


def test_a_config_per_microbatch() -> None:
    """Row 39: microbatch 0 eager, the others uniform 1: replayed layers 0, 4, 4, 4 in two steps, config as it was."""
    rules = [NONE, U(1), U(1), U(1)]
    chunk, feeds = make_chunk(rules), make_feeds(4)
    before = copy.deepcopy(chunk.recompute)
    for _ in range(2):
        watcher = Watcher()
        train_step(chunk, feeds, observers=(watcher,))
        assert [len(watcher.replayed_layers(mb)) for mb in range(4)] == [0, 4, 4, 4]
        assert chunk.recompute == before == tuple(rules)
    assert rules == [NONE, U(1), U(1), U(1)]
    assert_equals_reference(make_chunk(rules), feeds)
    with pytest.raises(ConfigError, match=r"recompute='4 configs': one config per microbatch: the step has 3"):
        train_step(chunk, feeds[:3])


class Fault(Exception):
    """Raised on purpose."""


def test_a_config_per_microbatch_after_an_exception() -> None:
    """Row 39: an exception in microbatch 0 leaves the configs alone, and the retry is the step that never failed."""
    chunk, feeds = make_chunk([NONE, U(1), U(1), U(1)], dropout=0.1), make_feeds(4)
    before = copy.deepcopy(chunk.recompute)
    expected = run(chunk, feeds, reference_step)

    class Failing(Watcher):
        def before(self, issue, owner) -> None:
            super().before(issue, owner)
            if self.slot == (Op.BACKWARD, 0, 1, "experts"):
                raise Fault

    torch.manual_seed(7)
    with pytest.raises(Fault):
        train_step(chunk, feeds, observers=(Failing(),))
    assert chunk.recompute == before
    assert chunk.steps_done == 0
    for parameter in chunk.parameters():
        parameter.grad = None
    watcher = Watcher()
    assert different(expected, outcome(chunk, train_step(chunk, feeds, observers=(watcher,)))) == []
    assert [len(watcher.replayed_layers(mb)) for mb in range(4)] == [0, 4, 4, 4]


def test_without_a_rule_nothing_is_replayed() -> None:
    """Row 39: negative control of the counting."""
    watcher = Watcher()
    train_step(make_chunk(NONE), make_feeds(2), observers=(watcher,))
    assert {slot[0] for slot in watcher.log} == {Op.FORWARD, Op.BACKWARD}
    watcher = Watcher()
    train_step(make_chunk(U(1)), make_feeds(2), observers=(watcher,))
    assert {slot[0] for slot in watcher.log if slot[2] is not None} == {Op.NO_GRAD, Op.REPLAY, Op.BACKWARD}
    assert {slot[0] for slot in watcher.log if slot[2] is None} & set(FIRST) == {Op.FORWARD}


FLAGS = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def by_command_line(capsys: pytest.CaptureFixture[str]) -> list[tuple[int, ...]]:
    words = "plan --layers 4 --method uniform --num-layers 1 --hidden 16 --json"
    assert main(words.split()) == 0
    return [tuple(segment["layers"]) for segment in json.loads(capsys.readouterr().out)["segments"]]


def test_every_entry_plans_the_same_segments(capsys: pytest.CaptureFixture[str]) -> None:
    """Row 40: direct, from a mapping of flags, from an argparse namespace, from the command line: L segments each."""
    parser = argparse.ArgumentParser()
    for name in FLAGS:
        parser.add_argument("--" + name.replace("_", "-"), type=int if name.endswith("layers") else str)
    words = [word for name, value in FLAGS.items() for word in ("--" + name.replace("_", "-"), str(value))]
    configs = {
        "direct": RecomputeConfig(granularity="full", method="uniform", num_layers=1),
        "shorthand": U(1),
        "mapping": read_flags(FLAGS).recompute,
        "namespace": read_flags(parser.parse_args(words)).recompute,
    }
    expected = [(0,), (1,), (2,), (3,)]
    for entry, config in configs.items():
        facts = step_facts(ModelChunk(Decoder(m0()), recompute=config), 2)
        assert list(facts.segments) == expected, entry
        assert facts.slots["R"] == 2 * 4 * 4, entry  # attn, shared, dispatch, experts
    assert by_command_line(capsys) == expected
    assert step_facts(ModelChunk(Decoder(m0())), 2).segments == ()


@pytest.mark.parametrize("name", FLAGS)
def test_a_dropped_or_unknown_flag_is_refused(name: str) -> None:
    """Row 40: a field that gets lost on the way, or is misspelt, is an error and never a silent default."""
    with pytest.raises(ConfigError):
        read_flags({flag: value for flag, value in FLAGS.items() if flag != name})
    with pytest.raises(ConfigError, match="is not a known flag"):
        read_flags({**FLAGS, name + "x": 1})
    with pytest.raises(ConfigError, match="recompute="):
        ModelChunk(Decoder(m0()), recompute=FLAGS)
