"""A prediction beside a measurement: what passes, and what a miss prints."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.memory.cases import MICROBATCHES, Case
from benchmarks.memory.oracle import Oracle, Predicted, compare, lines
from overlap.dispatch import LocalTransport
from overlap.memory import Bin, predict_step
from overlap.memory.facts import Kind
from overlap.memory.oracle import highest_of
from overlap.memory.refs import Source
from overlap.memory.trace import highest
from overlap.model import MoELayer
from overlap.planning.survey import CUDA_BLOCK
from recompute import RecomputeConfig

BINS = {kind.value: 0.0 for kind in Bin} | {"rest": 100.0, "live_segment": 50.0}
PREDICTED = Predicted(name="case", peak=200.0, bins=BINS)


def test_a_hit_is_one_line() -> None:
    row = compare(PREDICTED, 195.0, {**BINS, "rest": 102.0})
    assert row["within"]
    assert len(list(lines(row))) == 1


def test_a_miss_prints_every_kind_of_memory() -> None:
    for peak, bins in ((180.0, BINS), (200.0, {**BINS, "live_segment": 40.0}), (200.0, {**BINS, "rest": 0.0})):
        row = compare(PREDICTED, peak, bins)
        assert not row["within"]
        head, *rest = lines(row)
        assert head.startswith("case")
        assert [line.split()[0] for line in rest] == ["live_segment", "rest"]
    assert "ratio inf" in rest[1]
    missing = compare(replace(PREDICTED, bins={**BINS, "rest": 0.0}), 200.0, BINS)
    assert "predicted     0.00" in list(lines(missing))[2]


class Wire(LocalTransport):
    """Counts as a wire, which allocates what it delivers."""


def test_the_oracle_sees_a_device_with_streams() -> None:
    """What lanes hold, and what operators take within themselves."""
    oracle = Oracle("proxy-8")
    case = Case(proxy="proxy-8", recompute=RecomputeConfig.uniform(1), order="single_queue", delay_wgrad=True)
    found = [oracle.footprints[1]] * MICROBATCHES
    rest = predict_step(oracle.chunk(case), found).peaks.bins[Bin.REST] / 2**20
    rounded = [oracle.footprints[CUDA_BLOCK]] * MICROBATCHES
    peak = highest_of(oracle.chunk(case), rounded).bytes / 2**20
    # What one rank's transport passes on is the compute lane's: of it nothing is held.
    assert oracle.predict(case).peak < peak + 1
    every = replace(case, recompute=RecomputeConfig.none())
    passed_on = oracle.predict(every).peak
    for layer in oracle.chunk(case).module.modules():
        if isinstance(layer, MoELayer):
            layer.transport = Wire()
    assert oracle.predict(case).bins["rest"] > rest + 60
    assert oracle.predict(every).peak > passed_on + 40
    embed = found[0].facts[False][Kind((None, "embed"), Source.BACKWARD, True, False)]
    # the gradient of the table, and the sums over runs of equal ids
    assert highest(embed.trace, 0, {}) > (32000 * 2048 * 2 + 4096 * 2048 * 4)
