"""`verify`: the overlapped step against plain autograd, bit for bit; or a control that must differ."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from overlap.chunk import ModelChunk
from overlap.cli.build import build_chunk, parallel, random_microbatches
from overlap.cli.graph_options import GRAPH_STEPS, PLAIN_STEPS, add_graph_option, check_graph, verify_steps
from overlap.cli.options import Options, add_shared_options, describe, read_options
from overlap.cli.parallel_options import add_parallel_options, joined, leave_together
from overlap.cli.pipeline_options import add_pipeline_options, wants_pipeline
from overlap.cli.pipeline_verify import verify_in_pipeline
from overlap.cli.report import console, print_json, table
from overlap.controls import CONTROLS, make_control
from overlap.cuda_graph import check_recordable
from overlap.engine import Engine
from overlap.parallel.agree import gather
from overlap.parallel.world import World
from overlap.reproduce import deterministic, reproduce
from overlap.verify import StepFacts, TensorsCompared, Verdict, merged, step_facts, verify

EQUAL, DIFFERENT = 0, 1


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "verify",
        help="compare the overlapped step with plain autograd, bit for bit",
        description="Exit status 0 if loss, all gradients, all buffers and the generator state are bitwise equal, "
        "1 if not, 2 on bad input.",
    )
    add_shared_options(parser)
    add_parallel_options(parser)
    add_pipeline_options(parser)
    usual = f"default {PLAIN_STEPS}, {GRAPH_STEPS} with --cuda-graph"
    parser.add_argument("--steps", type=int, metavar="N", help=f"training steps to compare ({usual})")
    parser.add_argument("--reproduce", action="store_true", help="run each arm twice first (always with --device cuda)")
    parser.add_argument("--control", metavar="NAME", help=f"break one thing on purpose: {', '.join(CONTROLS)}")
    add_graph_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Verify and report; returns the exit status."""
    options = read_options(args)
    with deterministic(torch.device(options.device)):
        return _verify(args, options)


def _verify(args: argparse.Namespace, options: Options) -> int:
    check_graph(args, options)
    args.steps = verify_steps(args)
    with joined(options.parallel, options.device) as world:
        if wants_pipeline(args):
            return verify_in_pipeline(options, args, world)
        return _run(options, args, world)


def _run(options: Options, args: argparse.Namespace, world: World) -> int:
    chunk = build_chunk(options, world)
    if args.cuda_graph:
        check_recordable(chunk)  # before anything runs
    engine_type: Any = Engine
    broken = None
    if args.control is not None:
        control = make_control(args.control, chunk, options.microbatches)
        engine_type, broken = control.engine_type, control.broken
    batches = [random_microbatches(options, step) for step in range(args.steps)]
    # a slot that a control moves finds its parameters only if they are there for the whole step
    prepare = partial(parallel, options=options, keep_together=args.control == "swap_slots")
    twice = args.reproduce or options.device != "cpu"
    arms = reproduce(chunk, batches, engine_type=engine_type, prepare=prepare) if twice else {}
    steady = {name: merged(gather(world, arm)).equal for name, arm in arms.items()}
    own = verify(chunk, batches, engine_type=engine_type, prepare=prepare, graph=args.cuda_graph)
    verdicts = gather(world, own)
    verdict = merged(verdicts)
    status = EQUAL if verdict.equal and all(steady.values()) else DIFFERENT
    if not world.rank:
        _report(verdicts, verdict, steady, chunk, options, args, broken)
    if status != EQUAL:
        leave_together(world)
    return status


def _report(
    verdicts: Sequence[Verdict],
    verdict: Verdict,
    steady: Mapping[str, bool],
    chunk: ModelChunk,
    options: Options,
    args: argparse.Namespace,
    broken: str | None,
) -> None:
    if args.control is not None:
        print(f"control {args.control}: {broken}", file=sys.stderr)
    payload = _payload(verdict, step_facts(chunk, options.microbatches))
    if len(verdicts) > 1:
        payload["ranks"] = [{"rank": rank, **_summary(own)} for rank, own in enumerate(verdicts)]
    payload["config"] = {
        **describe(options),
        "steps": args.steps,
        "control": args.control,
        "cuda_graph": args.cuda_graph,
    }
    if args.control is not None:
        payload["broken"] = broken
    if steady:
        payload["reproduces"] = steady
    if options.json:
        print_json(payload)
    else:
        _show(verdict, payload)


def _payload(verdict: Verdict, facts: StepFacts) -> dict[str, Any]:
    summary = _summary(verdict)
    peak = summary.pop("max_live_segments")
    return {
        **summary,
        "segments": [list(layers) for layers in facts.segments],
        "slots": dict(facts.slots),
        "replayed_a2a": facts.replayed_a2a,
        "replayed_a2a_per_layer": facts.replayed_a2a_per_layer,
        "max_live_segments": peak,
    }


def _summary(verdict: Verdict) -> dict[str, Any]:
    return {
        "equal": verdict.equal,
        "loss_equal": verdict.loss_equal,
        "gradients": _compared(verdict.gradients),
        "buffers": _compared(verdict.buffers),
        "rng_equal": verdict.rng_equal,
        "max_live_segments": verdict.max_live_segments,
    }


def _compared(result: TensorsCompared) -> dict[str, object]:
    return {"compared": result.compared, "different": list(result.different)}


def _show(verdict: Verdict, payload: dict[str, Any]) -> None:
    def row(name: str, compared: object, different: tuple[str, ...] | None, equal: bool) -> tuple[object, ...]:
        count = "" if different is None else len(different)
        return (name, compared, count, "[green]equal[/]" if equal else "[red]different[/]")

    console.print(
        table(
            "Overlapped step against plain autograd",
            ("what", "compared", "different", "verdict"),
            (
                row("losses", "", None, verdict.loss_equal),
                row(
                    "gradients",
                    verdict.gradients.compared,
                    verdict.gradients.different,
                    not verdict.gradients.different,
                ),
                row("buffers", verdict.buffers.compared, verdict.buffers.different, not verdict.buffers.different),
                row("generator state", "", None, verdict.rng_equal),
            ),
        )
    )
    for name, same in payload.get("reproduces", {}).items():
        console.print(f"arm {name}, run twice: {'equal' if same else 'different: the comparison says nothing'}")
    for name in (*verdict.gradients.different, *verdict.buffers.different):
        console.print(f"  differs: {name}")
    slots = "  ".join(f"{op} {count}" for op, count in payload["slots"].items())
    console.print(f"slots of a step: {slots}; replayed all-to-alls: {payload['replayed_a2a']}")
    console.print(f"segments: {payload['segments']}; most alive at once: {payload['max_live_segments']}")
