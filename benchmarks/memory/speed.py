"""Step times: the overlap machinery's own cost, and how much of the replay's communication stays exposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks.memory.cases import Case, Path, Wire, hidden
from benchmarks.memory.measure import Bench, Measured
from benchmarks.memory.turns import in_turns
from overlap.costs import costs_of
from overlap.ir import Lane, Op
from overlap.memory.host_cost import measure_host_cost
from overlap.orders import format_order, get_order
from overlap.search import search
from overlap.simulate import exposure
from overlap.synthetic import MOE, System
from recompute import RecomputeConfig

UNIFORM = RecomputeConfig.uniform(1)
ORDERS = ("multi_queue", "single_queue")
RESTARTS = 24
"""Of the order search: some seconds of host time."""
LEADS = (4, 8)
"""Of the proxy's 8 layers."""
SHARE = 0.35
"""Communication's share of the exposed step, in the loopback runs."""


def overhead(*, graph: bool = False) -> list[dict[str, Any]]:
    """Nothing to hide: the overlapped step beside the plain one, in turns; each a CUDA graph if asked."""
    bench = Bench("proxy-8")
    base = Case(proxy="proxy-8", recompute=UNIFORM, graph=graph)
    cases = [replace(base, path=Path.CONTIGUOUS), *(replace(base, order=order) for order in ORDERS)]
    cases.append(replace(base, recompute=hidden(UNIFORM)))
    results = _paired(bench, cases)
    _report(results)
    return [asdict(result) | {"of_plain": result.step / results[0].step} for result in results]


def loopback(*, graph: bool = False) -> list[dict[str, Any]]:
    """Communication worth SHARE of the exposed step: exposed, overlapped, and with the replay hidden."""
    return _loopback(Bench("proxy-8"), graph)


def wide() -> list[dict[str, Any]]:
    """The same with microbatches of two sequences, whose kernels take longer than the host takes to launch them."""
    return _loopback(Bench("proxy-8", batch=2), graph=False)


def _loopback(bench: Bench, graph: bool) -> list[dict[str, Any]]:
    scale = _calibrate(bench, graph)
    base = Case(proxy="proxy-8", recompute=UNIFORM, wire=Wire.HOST_LOOPBACK, wire_scale=scale, graph=graph)
    local = replace(base, wire=Wire.LOCAL, wire_scale=1.0)
    overlapped = replace(base, recompute=hidden(UNIFORM), delay_wgrad=True)
    best = [replace(overlapped, order=order) for order in ORDERS]
    best.append(replace(overlapped, order="searched", table=_searched(bench, base)))
    cases = [
        local,
        replace(base, path=Path.CONTIGUOUS),
        *(replace(base, order=order) for order in ORDERS),
        *(replace(base, order=order, recompute=hidden(UNIFORM)) for order in ORDERS),
        *best,
        *(replace(case, lead=lead) for case in best for lead in LEADS),
    ]
    results = _paired(bench, cases)
    _report(results)
    wire = bench.communication_ms(base)
    bound = max(results[0].step, wire)
    rows = [asdict(result) | {"of_bound": result.step / bound} for result in results]
    share = f"{SHARE:.0%} of the exposed step"
    print(f"scale {scale:.3f} ({share})  communication {wire:.1f} ms  bound {bound:.1f} ms")
    return [*rows, {"name": "bound", "scale": scale, "communication": wire, "bound": bound}]


def _searched(bench: Bench, base: Case) -> str:
    """The best order for the costs of a recorded step, as a table."""
    recorded = bench.record(replace(base, order="single_queue", recompute=hidden(UNIFORM), delay_wgrad=True))
    rule = hidden(UNIFORM)
    start = get_order("single_queue", rule.replay)
    system = System(kinds=(MOE,), order=start, recompute=rule, costs=costs_of(recorded))
    table = format_order(search(system, restarts=RESTARTS).order)
    print(table, flush=True)
    return table


def exposed(*, graph: bool = False) -> list[dict[str, Any]]:
    """Where the replay's all-to-alls run, from recorded steps: how much of them has no compute beside it."""
    bench = Bench("proxy-8")
    scale = _calibrate(bench, graph)
    base = Case(proxy="proxy-8", recompute=UNIFORM, wire=Wire.HOST_LOOPBACK, wire_scale=scale, graph=graph)
    cases = [replace(base, order=order, recompute=rule) for order in ORDERS for rule in (UNIFORM, hidden(UNIFORM))]
    cases.append(replace(cases[-1], delay_wgrad=True))
    cases.append(replace(cases[-1], lead=LEADS[0]))
    rows = []
    for case in cases:
        timeline = bench.record(case)
        found = exposure(timeline, 0.0, timeline.end, ())
        idle = f"compute busy {timeline.busy(Lane.COMPUTE, 0.0, timeline.end):.0f} of {timeline.end:.0f} ms"
        print(idle, {kind: round(time, 1) for kind, time in found.exposed.items()})
        total: dict[str, float] = {}
        for span in timeline.on(Lane.COMM):
            op = Op.FORWARD if span.slot.op is Op.NO_GRAD else span.slot.op
            kind = f"{op.value}.{span.slot.stage}"
            total[kind] = total.get(kind, 0.0) + span.milliseconds
        share = found.exposed.get("R.dispatch", 0.0) / total["R.dispatch"]
        print(f"{case.name:80s} replayed all-to-all exposed {share:.1%}", flush=True)
        rows.append({"name": case.name, "exposed": dict(found.exposed), "total": total, "replay_exposed_share": share})
        rows[-1]["timeline"] = timeline
    return rows


def host() -> list[dict[str, Any]]:
    """Host time of a step per slot, and the engine's own part of it."""
    bench = Bench("proxy-8")
    rows: list[dict[str, Any]] = []
    for case in (Case(proxy="proxy-8", recompute=UNIFORM), Case(proxy="proxy-8", recompute=hidden(UNIFORM))):
        slots, milliseconds = bench.host_ms(case)
        rows.append({"name": case.name, "slots": slots, "host_us_per_slot": milliseconds * 1e3 / slots})
        print(f"{case.name:70s} {rows[-1]['host_us_per_slot']:.1f} us of host time a slot, {slots} slots", flush=True)
    rows.append({"name": "engine alone, trivial stages", **measure_host_cost().as_json()})
    print(rows[-1])
    return rows


def queues() -> list[dict[str, Any]]:
    """Communication by kernel, under the CUDA_DEVICE_MAX_CONNECTIONS that the process was started with."""
    bench = Bench("proxy-8")
    cases = [
        Case(proxy="proxy-8", recompute=rule, order=order, wire=Wire.SM_COPY, wire_scale=1)
        for order in ORDERS
        for rule in (UNIFORM, hidden(UNIFORM))
    ]
    results = _paired(bench, cases)
    _report(results)
    return [asdict(result) for result in results]


def _calibrate(bench: Bench, graph: bool) -> float:
    """The scale at which communication is SHARE of the contiguous step, where all of it is exposed."""
    probe = Case(proxy="proxy-8", path=Path.CONTIGUOUS, recompute=UNIFORM, wire=Wire.HOST_LOOPBACK, graph=graph)
    local, full = _paired(bench, [replace(probe, wire=Wire.LOCAL), probe])
    wire = full.step - local.step
    return SHARE / (1 - SHARE) * local.step / wire


def _paired(bench: Bench, cases: Sequence[Case]) -> list[Measured]:
    return in_turns([(case.name, bench.step_of(case)) for case in cases])


def _report(results: Sequence[Measured]) -> None:
    for result in results:
        print(f"{result.name:70s} step {result.step:8.1f} ms  of first {result.step / results[0].step:.3f}", flush=True)
