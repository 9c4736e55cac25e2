"""Issue orders as text tables: how the slots of one forward layer and one backward layer interleave.

An order is a sequence of steps `OP.stage`; F names a stage of the forward layer, B and W one of the backward layer
paired with it. `*` stands for the stages that no other step of that op names: in program order for F, in reverse for
B and W. A step whose stage a layer does not have is skipped, so one table serves dense and MoE layers alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from overlap.errors import ScheduleError
from overlap.ir import Op

REST = "*"
STAGE_NAMES = frozenset({"attn", "shared", "dispatch", "experts", "combine", "post", "post_attn", "mtp_post"})
"""Stage names that an order may always name, whether or not a model has them."""

_TABLES = {
    # No interleaving: the forward layer, then the backward layer. Fits any stage names.
    "plain": "F.* B.* W.*",
    # Many hardware queues: a lane never waits for the other's queue, so each all-to-all is issued as soon as its
    # input exists, next to the other microbatch's compute that hides it.
    "multi_queue": """
        B.post     B.combine
        F.attn                  # hides B.combine
        B.experts
        F.dispatch
        F.shared   W.experts    # hide F.dispatch
        B.dispatch
        B.shared   W.shared
        F.experts               # hides B.dispatch
        F.combine
        B.attn     W.attn       # hide F.combine
        F.post
    """,
}
ORDER_NAMES = tuple(_TABLES)


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

    def __str__(self) -> str:
        return " ".join(str(step) for step in self.steps)

    def named(self, op: Op) -> frozenset[str]:
        """Stages that the order names for `op`, `*` left out."""
        return frozenset(step.stage for step in self.steps if step.op is op and step.stage != REST)

    def has_rest(self, op: Op) -> bool:
        """Whether the order takes stages of `op` that it does not name."""
        return Step(op, REST) in self.steps

    @classmethod
    def parse(cls, name: str, text: str) -> Order:
        """Read an order from its text table (`#` starts a comment).

        Raises:
            ScheduleError: A word is no step, or a step stands twice.
        """
        words = [word for line in text.splitlines() for word in line.split("#")[0].split()]
        steps: list[Step] = []
        for index, word in enumerate(words):
            op, _, stage = word.partition(".")
            if op not in {"F", "B", "W"} or not (stage.isidentifier() or stage == REST):
                raise ScheduleError(f"order {name}: {word!r} is no step; write F, B or W, a dot, a stage", words, index)
            step = Step(Op(op), stage)
            if step in steps:
                raise ScheduleError(f"order {name}: {word} stands twice", words, index)
            steps.append(step)
        return cls(name, tuple(steps))


def get_order(name: str) -> Order:
    """The built-in order of that name.

    Raises:
        ScheduleError: There is none.
    """
    if name not in _TABLES:
        raise ScheduleError(f"order {name!r} is unknown: choose one of {', '.join(_TABLES)}")
    return Order.parse(name, _TABLES[name])
