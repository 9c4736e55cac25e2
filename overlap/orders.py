"""Issue orders as text tables: how the slots of one forward layer and one backward layer interleave.

An order is a sequence of steps `OP.stage`; F names a stage of the forward layer, B and W one of the backward layer
paired with it, R one of the layer that is replayed beside them when replays are hidden (R10). `*` stands for the stages
that no other step of that op names: in program order for F and R, in reverse for B and W. A step whose stage a layer
does not have is skipped, so one table serves dense and MoE layers alike; R steps are skipped where nothing is replayed.
A W step that stands before the B step of its stage is carried over: it takes the layer whose B was in the pair before,
so that its compute can hide this pair's first transfers, and its operands stay that much longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from overlap.errors import ScheduleError
from overlap.ir import Op
from overlap.order_tables import EXPOSED, HIDDEN
from recompute.checks import check_kind
from recompute.config import Replay, parse_choice
from recompute.errors import ConfigError

REST = "*"
STAGE_NAMES = frozenset({"attn", "shared", "dispatch", "experts", "combine", "post", "post_attn", "mtp_post"})
"""Stage names that an order may always name, whether or not a model has them."""

ORDER_NAMES = tuple(EXPOSED)
_TRANSFERS = frozenset({"dispatch", "combine"})


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an order: an operation on a stage of the layer pair."""

    op: Op
    stage: str

    def __str__(self) -> str:
        return f"{self.op.value}.{self.stage}"


@dataclass(frozen=True, slots=True)
class Order:
    """A named interleaving of one layer pair."""

    name: str
    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        check_kind("name", self.name, str, "the order's name")
        if type(self.steps) is not tuple or not all(isinstance(step, Step) for step in self.steps):
            raise ConfigError(field="steps", value=self.steps, rule="must be a tuple of steps: see Order.parse")

    def __str__(self) -> str:
        return " ".join(str(step) for step in self.steps)

    def named(self, op: Op) -> frozenset[str]:
        """Stages that the order names for `op`, `*` left out."""
        return frozenset(step.stage for step in self.steps if step.op is op and step.stage != REST)

    def has_rest(self, op: Op) -> bool:
        """Whether the order takes stages of `op` that it does not name."""
        return Step(op, REST) in self.steps

    @property
    def replays(self) -> bool:
        """Whether the order says where replays go that are hidden."""
        return any(step.op is Op.REPLAY for step in self.steps)

    @classmethod
    def parse(cls, name: str, text: str) -> Order:
        """Read an order from its text table (`#` starts a comment).

        Raises:
            ScheduleError: A word is no step, or a step stands twice.
            ConfigError: There is no text.
        """
        check_kind("text", text, str, "a text table")
        words = [word for line in text.splitlines() for word in line.split("#")[0].split()]
        steps: list[Step] = []
        for index, word in enumerate(words):
            op, _, stage = word.partition(".")
            if op not in {"F", "B", "W", "R"} or not (stage.isidentifier() or stage == REST):
                reason = f"order {name}: {word!r} is no step; write F, B, W or R, a dot, a stage"
                raise ScheduleError(reason, words, index)
            step = Step(Op(op), stage)
            if step in steps:
                raise ScheduleError(f"order {name}: {word} stands twice", words, index)
            steps.append(step)
        return cls(name, tuple(steps))


def carried(steps: Sequence[Step]) -> frozenset[Step]:
    """The W steps that take the layer of the pair before.

    Those that stand before their stage's B step, or before `B.*` if it has none; `W.*` without `B.*`: before all.
    """
    backward = {step.stage: place for place, step in enumerate(steps) if step.op is Op.BACKWARD}
    others = backward.get(REST, -1)
    backward.setdefault(REST, min(backward.values(), default=-1))
    return frozenset(
        step for place, step in enumerate(steps) if step.op is Op.WGRAD and place < backward.get(step.stage, others)
    )


def get_order(name: str, replay: Replay = Replay.JUST_IN_TIME) -> Order:
    """The built-in order of that name, in its variant for `replay` where it has one.

    Raises:
        ScheduleError: There is none.
        ConfigError: `replay` is no such time.
    """
    if name not in ORDER_NAMES:
        raise ScheduleError(f"order {name!r} is unknown: choose one of {', '.join(ORDER_NAMES)}")
    hidden = parse_choice(Replay, "replay", replay) is Replay.HIDDEN
    return Order.parse(name, HIDDEN.get(name, EXPOSED[name]) if hidden else EXPOSED[name])


def load_order(name: str, replay: Replay = Replay.JUST_IN_TIME) -> Order:
    """A built-in order, or the text table in the file of that name.

    Raises:
        ScheduleError: There is neither, or the file's text is no order.
    """
    path = Path(name)
    if name in EXPOSED or not path.is_file():
        return get_order(name, replay)
    try:
        return Order.parse(path.stem, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"order file {name!r} cannot be read: {error}") from error


def format_order(order: Order) -> str:
    """The text table of an order, a line for each all-to-all and the compute behind it; Order.parse reads it back."""
    lines: list[list[str]] = [[]]
    for step in order.steps:
        if step.stage in _TRANSFERS:
            lines.append([])
        lines[-1].append(str(step))
    return "".join(f"{' '.join(words)}\n" for words in lines if words)
