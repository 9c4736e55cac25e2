"""A pipeline without tensors: the lowered actions of all ranks, messages meeting receives in the order of posting.

Each rank runs its own list in order and waits for nothing but messages, so what happens does not depend on how long
anything takes: one run stands for all delays.
"""

from __future__ import annotations

from collections import deque

from overlap.pipelining import compat

_SENDS = {compat.SEND_F: (compat.RECV_F, 1), compat.SEND_B: (compat.RECV_B, -1)}
_SOURCE = {compat.RECV_F: -1, compat.RECV_B: 1}
_NEEDS = {
    compat.FORWARD: compat.RECV_F,
    compat.FULL_BACKWARD: compat.RECV_B,
    compat.BACKWARD_INPUT: compat.RECV_B,
}


class Deadlock(AssertionError):
    """Ranks wait for each other, or a message goes to the wrong receive."""


class _Ranks:
    def __init__(self, actions: dict[int, list[compat.Action]], rank_of: dict[int, int]) -> None:
        self.left = {rank: deque(items) for rank, items in actions.items()}
        self.rank_of = rank_of
        self.receives = {a for items in actions.values() for a in items if a.computation_type in _SOURCE}
        self.sent: dict[tuple[int, int], deque[compat.Action]] = {}
        self.posted: dict[tuple[int, int], deque[compat.Action]] = {}
        self.arrived: set[compat.Action] = set()

    def advance(self, rank: int) -> bool:
        """Run a rank until it has to wait; whether it got anywhere."""
        moved = False
        while self.left[rank] and self._ready(self.left[rank][0]):
            self._run(rank, self.left[rank].popleft())
            moved = True
        return moved

    def _ready(self, action: compat.Action) -> bool:
        needs = (
            compat.Action(part.stage_index, _NEEDS[part.computation_type], part.microbatch_index)
            for part in action.sub_actions or (action,)
            if part.computation_type in _NEEDS
        )
        return all(need in self.arrived for need in needs if need in self.receives)

    def _run(self, rank: int, action: compat.Action) -> None:
        if action.computation_type in _SENDS:
            kind, step = _SENDS[action.computation_type]
            stage = action.stage_index + step
            pair = (rank, self.rank_of[stage])
            self.sent.setdefault(pair, deque()).append(compat.Action(stage, kind, action.microbatch_index))
        elif action.computation_type in _SOURCE:
            pair = (self.rank_of[action.stage_index + _SOURCE[action.computation_type]], rank)
            self.posted.setdefault(pair, deque()).append(action)
        else:
            return
        messages, receives = self.sent.get(pair, deque()), self.posted.get(pair, deque())
        while messages and receives:
            message, receive = messages.popleft(), receives.popleft()
            if message != receive:
                raise Deadlock(f"{message} meets {receive} between ranks {pair}")
            self.arrived.add(receive)


def run_dry(actions: dict[int, list[compat.Action]], rank_of: dict[int, int]) -> int:
    """Run all ranks to their end; sends and receives never block.

    Returns:
        How many messages were delivered.
    """
    ranks = _Ranks(actions, rank_of)
    while any([ranks.advance(rank) for rank in actions]):
        pass
    stuck = {rank: str(items[0]) for rank, items in ranks.left.items() if items}
    if stuck:
        raise Deadlock(f"ranks wait for ever: {stuck}")
    return len(ranks.arrived)
