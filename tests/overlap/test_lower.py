"""What lowering decides: generations, the order of gradient sums, waits, cross-lane uses and last uses, as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from overlap.builder import ProgramBuilder
from overlap.ir import Input, Lane, Op, Program, Stage
from overlap.lower import Event, Issue, Key, Plan, backward_reads, lower
from overlap.orders import get_order
from overlap.pieces import Piece
from overlap.plan import Planner, PlanRequest, make_schedule
from recompute import RecomputeConfig
from tests.overlap.programs import Weight, dummy_program, label, nothing, side_of, staying

uniform = RecomputeConfig.uniform


def plans(
    program: Program, config: RecomputeConfig, *, order: str = "multi_queue", delayed: bool = False
) -> list[Plan]:
    """Forward alone, a pair, backward alone."""
    planner = Planner(program, get_order(order), delayed=delayed)
    sides = [(config, None), (config, config), (None, config)]
    return [planner.plan(PlanRequest(ahead, behind, program.trained())) for ahead, behind in sides]


def key(value: Key) -> str:
    return value[0] + "'" * value[1]


def piece(value: Piece) -> str:
    return f"{value[0]}/{value[1]}"


def event(value: Event) -> str:
    return f"{value[0].value}.{label(value[1])}"


def table(plan: Plan, column: Callable[[Issue], Iterable[str]]) -> list[str]:
    """`slot: ...` for each issue whose column is not empty."""
    rows = [(issue, " ".join(column(issue))) for issue in plan.issues]
    return [f"{issue.slot}: {text}" for issue, text in rows if text]


def test_generations() -> None:
    """Inside its segment a replay reads what the replay wrote; live-ins and pinned values come from the first pass."""
    backward = plans(dummy_program("MM"), uniform(2))[2]
    replays = [issue for issue in backward.issues if issue.slot.op is Op.REPLAY]
    reads = {str(issue.slot): " ".join(map(key, issue.reads)) for issue in replays}
    assert reads["R0.0.attn"] == "embedded"
    assert reads["R0.0.dispatch"] == "0.tokens' 0.probs' 0.routing"
    assert reads["R0.0.post"] == "0.residual' 0.mixed'"
    assert reads["R0.1.attn"] == "0.out'"
    attn = replays[0]
    assert [None if k is None else key(k) for k in attn.writes] == [
        "0.residual'", "0.tokens'", "0.probs'", None, "0.counts'",
    ]  # fmt: skip
    assert attn.pinned == (("0.routing", 0),)


def test_last_uses() -> None:
    """R2: a value dies with the issue that touches it last; what a later plan reads survives."""
    forward, _, backward = plans(dummy_program("M"), uniform(1))
    assert table(forward, lambda issue: map(key, issue.frees)) == [
        "F1.embed: ids",
        "N1.0.attn: 0.counts",
        "N1.0.dispatch: 0.tokens 0.probs",
        "N1.0.experts: 0.sent 0.weights",
        "N1.0.combine: 0.done",
        "N1.0.post: 0.residual 0.mixed",
        "F1.head: 0.out target loss",
    ]
    assert forward.exports == {1: {("embedded", 0), ("0.routing", 0)}}
    assert backward.imports == {0: {("embedded", 0), ("0.routing", 0)}}
    assert table(backward, lambda issue: map(key, issue.frees)) == [
        "R0.0.attn: embedded 0.residual' 0.counts'",
        "R0.0.dispatch: 0.tokens' 0.probs'",
        "R0.0.experts: 0.sent' 0.weights' 0.done'",
        "B0.0.dispatch: 0.routing",
    ]


def test_without_recompute_only_routing_survives() -> None:
    """R2: graphs keep what they saved; the table keeps what adjoints read."""
    forward, _, backward = plans(dummy_program("MM"), RecomputeConfig.none())
    assert forward.exports == {1: {("0.routing", 0), ("1.routing", 0)}}
    assert backward.imports == {0: {("0.routing", 0), ("1.routing", 0)}}
    assert all(issue.records is (issue.lane is Lane.COMPUTE and issue.slot.stage != "post") for issue in forward.issues)


def test_waits() -> None:
    """A wait stands where data crosses lanes, unless an earlier wait implies it."""
    forward, pair, backward = plans(dummy_program("M"), uniform(1))
    assert table(forward, lambda issue: map(event, issue.waits)) == [
        "N1.0.dispatch: N.0.attn",
        "N1.0.experts: N.0.dispatch",
        "N1.0.combine: N.0.experts",
        "N1.0.post: N.0.combine",
    ]
    assert table(backward, lambda issue: map(event, issue.waits)) == [
        "B0.0.combine: B.0.post",  # implies N.0.attn of the earlier plan, whose routing it reads
        "R0.0.dispatch: R.0.attn",
        "R0.0.experts: R.0.dispatch",  # implies B.0.combine, whose gradient B.0.experts reads
        "B0.0.dispatch: B.0.experts",
        "B0.0.attn: B.0.dispatch",
    ]
    assert table(pair, lambda issue: map(event, issue.waits)) == [
        "B0.0.combine: B.0.post",
        "R0.0.dispatch: R.0.attn",  # implies N.0.attn, issued before it on the same lane
        "R0.0.experts: R.0.dispatch",
        "B0.0.dispatch: B.0.experts",
        "N1.0.experts: N.0.dispatch",
        "N1.0.combine: N.0.experts",
        "B0.0.attn: B.0.dispatch",
        "N1.0.post: N.0.combine",
    ]


def test_what_is_waited_for_signals() -> None:
    for plan in plans(dummy_program("MM"), uniform(2)):
        waited = {(issue.slot.microbatch, wait) for issue in plan.issues for wait in issue.waits}
        here = {(issue.slot.microbatch, (issue.slot.op, issue.stage.key)) for issue in plan.issues if issue.signals}
        everything = {(issue.slot.microbatch, (issue.slot.op, issue.stage.key)) for issue in plan.issues}
        assert waited & everything <= here


def two_transfers() -> Program:
    """Layer 0 sends twice; layer 1 reads the first result in one stage and the second in the next."""
    b = ProgramBuilder()
    x = b.input("x", needs_grad=True)
    with b.layer(0):
        (y,) = b.compute("attn", nothing, x, outputs=("y",))
        (one,) = b.comm("first", nothing, y, outputs=("one",), adjoint=nothing)
        (two,) = b.comm("second", nothing, y, outputs=("two",), adjoint=nothing)
    with b.layer(1):
        (half,) = b.compute("mix", nothing, one, outputs=("half",))
        (out,) = b.compute("add", nothing, half, two, outputs=("out",))
    b.loss(out)
    return b.build()


def test_a_wait_for_an_earlier_plan_implies_no_other() -> None:
    """The order of slots in an earlier plan is not known here, so every import from another lane is waited for."""
    forward, _, backward = plans(two_transfers(), uniform(1), order="plain")
    assert table(backward, lambda issue: map(event, issue.waits))[:2] == ["R0.1.mix: N.0.first", "R0.1.add: N.0.second"]
    assert {issue.slot.stage for issue in forward.issues if issue.signals} == {"attn", "first", "second"}


def test_an_import_is_waited_for_once_per_lane() -> None:
    b = ProgramBuilder()
    x = b.input("x", needs_grad=True)
    with b.layer(0):
        (sent,) = b.comm("send", nothing, x, outputs=("sent",), adjoint=nothing)
    with b.layer(1):
        (half,) = b.compute("mix", nothing, sent, outputs=("half",))
        (out,) = b.compute("add", nothing, half, sent, outputs=("out",))
    b.loss(out)
    backward = plans(b.build(), uniform(1), order="plain")[2]
    assert table(backward, lambda issue: map(event, issue.waits)) == ["R0.1.mix: N.0.send", "B0.0.send: B.1.mix"]


def test_a_wait_implies_what_the_other_lane_had_waited_for() -> None:
    """Three lanes: behind `send`, which is behind `attn`, is behind `attn`; one plan later nothing is known."""

    def stage(name: str, lane: Lane, reads: str, writes: str, layer: int) -> Stage:
        return Stage(
            layer=layer, name=name, lane=lane, reads=tuple(reads.split()), writes=(writes,), forward=nothing,
            nondiff=frozenset({writes}), parameters=(Weight(),) if name == "far" else (),
        )  # fmt: skip

    program = Program(
        (
            stage("attn", Lane.COMPUTE, "x", "y", 0),
            stage("send", Lane.COMM, "y", "z", 0),
            stage("far", Lane.P2P, "y z", "out", 1),
        ),
        (Input("x"),),
    )
    forward, _, backward = plans(program, uniform(1), order="plain")
    assert table(forward, lambda issue: map(event, issue.waits)) == ["N1.0.send: N.0.attn", "N1.1.far: N.0.send"]
    assert table(backward, lambda issue: map(event, issue.waits)) == ["R0.1.far: N.0.attn N.0.send"]


def handled() -> Program:
    """Both transfers pin a handle; the second reads the first's too."""
    b = ProgramBuilder()
    x = b.input("x")
    with b.layer(0):
        (y,) = b.compute("attn", nothing, x, outputs=("y",), parameters=(Weight(),))
        sent, handle = b.comm("go", nothing, y, outputs=("sent",), nondiff=("h",), pins=("h",), adjoint=nothing)
        (mixed,) = b.compute("mix", nothing, sent, handle, outputs=("mixed",), parameters=(Weight(),))
        (back, _) = b.comm(
            "back", nothing, mixed, handle, outputs=("home",), nondiff=("k",), pins=("k",), adjoint=nothing
        )
        (loss,) = b.compute("sum", nothing, back, outputs=("loss",))
    b.loss(loss)
    return b.build()


def test_an_adjoint_gets_the_pins_it_reads_and_then_its_own() -> None:
    _, _, backward = plans(handled(), uniform(1), order="plain")
    reads = {str(issue.slot): [*map(key, issue.reads)] for issue in backward.issues}
    assert reads["B0.0.go"] == ["0.h"]
    assert reads["B0.0.back"] == ["0.h", "0.k"]
    replay = next(issue for issue in backward.issues if str(issue.slot) == "R0.0.go")
    assert (replay.writes, replay.pinned) == ((("0.sent", 1), None), (("0.h", 0),))
    assert backward.imports[0] >= {("0.h", 0), ("0.k", 0)}
    last = {str(issue.slot): [*map(key, issue.frees)] for issue in backward.issues}
    assert "0.h" in last["B0.0.go"]


def test_uses_on_foreign_lanes() -> None:
    """R14: every use of what another lane allocated is announced, and nothing else is."""
    backward = plans(dummy_program("M"), uniform(1))[2]
    assert table(backward, lambda issue: map(key, issue.foreign)) == [
        "B0.0.combine: 0.routing",
        "R0.0.dispatch: 0.tokens' 0.probs' 0.routing",
        "R0.0.experts: 0.sent' 0.weights'",
        "B0.0.dispatch: 0.routing",
    ]
    assert table(backward, lambda issue: map(piece, issue.foreign_pieces)) == [
        "B0.0.combine: 0.mixed/5",
        "B0.0.experts: 0.done/4",
        "B0.0.dispatch: 0.sent/3 0.weights/3",
        "B0.0.attn: 0.tokens/2 0.probs/2",
    ]


def test_uses_of_what_was_passed_on() -> None:
    """Rows that stay are the compute lane's: communication uses foreign memory, compute none but the routing's."""
    backward = plans(staying(dummy_program("M")), uniform(1))[2]
    assert table(backward, lambda issue: map(key, issue.foreign)) == [
        "B0.0.combine: 0.routing",
        "R0.0.dispatch: 0.tokens' 0.probs' 0.routing",
        "B0.0.dispatch: 0.routing",
    ]
    assert table(backward, lambda issue: map(piece, issue.foreign_pieces)) == [
        "B0.0.combine: 0.mixed/5",
        "B0.0.dispatch: 0.sent/3 0.weights/3",
    ]
    for program, owners in ((dummy_program("M"), {Lane.COMM}), (staying(dummy_program("M")), set())):
        delayed = plans(program, RecomputeConfig.none(), delayed=True)[2]
        assert {lane for issue in delayed.issues for lane in issue.pending_owners} == owners


def test_fed_values_are_the_compute_lanes_memory() -> None:
    """R14: communication announces a fed value that it reads, and one that its graph keeps."""
    b = ProgramBuilder()
    x, mask = b.input("x", needs_grad=True), b.input("mask")
    with b.layer(0):
        (y,) = b.compute("attn", nothing, x, mask, outputs=("y",))
        (z,) = b.comm("send", nothing, y, mask, outputs=("z",), adjoint=nothing)
    b.loss(z)
    program = b.build()
    by_graph = replace(program, stages=tuple(replace(stage, adjoint=None) for stage in program.stages))
    backward = plans(by_graph, uniform(1), order="plain")[2]
    assert table(backward, lambda issue: map(key, issue.foreign)) == ["R0.0.send: 0.y' mask"]
    assert [(str(i.slot), i.foreign_leaves) for i in backward.issues if i.foreign_leaves] == [
        ("B0.0.send", ((0, Lane.COMPUTE), (1, Lane.COMPUTE)))
    ]


def test_gradient_pieces_are_added_in_reverse_program_order() -> None:
    """R3: whatever the order of the slots, each value sums its readers last first."""
    for order in ("plain", "multi_queue"):
        backward = plans(dummy_program("M", shared=True), RecomputeConfig.none(), order=order)[2]
        attn = next(issue for issue in backward.issues if str(issue.slot) == "B0.0.attn")
        assert [" ".join(map(piece, group)) for group in attn.pieces] == [
            "0.residual/6", "0.tokens/3 0.tokens/2", "0.probs/3", "", "",
        ]  # fmt: skip


def test_delayed_weight_gradients() -> None:
    backward = plans(dummy_program("M", tied=True), RecomputeConfig.none(), delayed=True)[2]
    issues = {str(issue.slot): issue for issue in backward.issues}
    assert {name for name, issue in issues.items() if issue.delays} == {"B0.head", "B0.0.experts", "B0.0.attn"}
    assert issues["W0.head"].gives == (None, None, ("weight.tied", 7))
    assert set(issues["W0.0.experts"].gives) == {None}
    assert issues["B0.weights"].pieces == ((("weight.tied", 7), ("weight.tied", 1)),)


def test_a_delayed_share_on_another_lane_is_waited_for() -> None:
    """A shared parameter's sum needs the weight gradient of each reader, not only its backward."""

    def stage(name: str, lane: Lane, reads: tuple[str, ...], writes: tuple[str, ...], **declared) -> Stage:
        return Stage(layer=None, name=name, lane=lane, reads=reads, writes=writes, forward=nothing, **declared)

    program = Program(
        (
            stage("weights", Lane.COMPUTE, (), ("weight.w",), parameters=dummy_program().stages[0].parameters),
            stage("far", Lane.P2P, ("x", "weight.w"), ("y",), wgrad=True),
        ),
        dummy_program().inputs[:0] + two_transfers().inputs,
    )
    side = side_of(program)
    schedule = make_schedule(get_order("plain"), None, side, delayed=True)
    plan = lower(schedule, {0: side}, {})
    assert table(plan, lambda issue: map(event, issue.waits)) == ["B0.weights: W.far"]


def test_backward_reads_do_not_depend_on_the_order() -> None:
    side = side_of(dummy_program("MM"), uniform(2))
    for order in ("plain", "multi_queue"):
        schedule = make_schedule(get_order(order), None, side, delayed=False)
        assert backward_reads(schedule, {0: side}) == {0: {("embedded", 0), ("0.routing", 0), ("1.routing", 0)}}


def test_nothing_is_kept_without_a_backward() -> None:
    """R17: forward only, every value dies in its plan."""
    program = dummy_program("MM")
    plan = Planner(program, get_order("multi_queue"), delayed=False).forward_plan()
    freed = [value for issue in plan.issues for value in issue.frees]
    assert sorted(freed) == sorted({(name, 0) for name in (*program.producers, "ids", "target")})
    assert {issue.slot.op for issue in plan.issues} == {Op.NO_GRAD}
    assert not any(issue.records or issue.snapshots for issue in plan.issues)
