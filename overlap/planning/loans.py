"""Loans: what lanes hold of each other's memory between the plans of a rank.

A plan begins with what earlier ones left, and waits of its own let go of that (streams.py, NOTE [ Memory that crosses
lanes ]). What nothing else holds counts until then, whatever the plan does, so one walk of a plan serves all beginnings
that have the same storages of the microbatch that runs backward. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from overlap.ir import Lane
from overlap.memory.bins import Storage

Name = Hashable
"""Of a storage, among those that one plan left; of one that its microbatch holds, too, its place in the tables."""
_ORDER = {lane: place for place, lane in enumerate(Lane)}
_NEVER = 2**62
BEHIND = -1
"""A loan that was made after the first pass of the microbatch that now runs backward; 0: before it."""


@dataclass(frozen=True, slots=True)
class Lent:
    """A storage, or the sum of several that are let go together."""

    age: int
    """How many plans ago it got its name: 1 for the last plan."""
    name: Name
    storage: Storage
    kept: bool
    """Whether the microbatch that ran forward in that plan holds it, too, and waits for its backward."""


@dataclass(frozen=True, slots=True)
class Loan:
    """What one issue used of another lane's memory, or several that are let go together."""

    age: int
    """How many plans ago."""
    home: Lane
    """Whose memory it is."""
    user: Lane
    before: int
    """Which of the user lane's first passes of that plan was not before this issue, 1 for the first; 0: it had none."""
    lent: tuple[Lent, ...]


Loans = tuple[Loan, ...]
"""In the order of lanes, of each pair of them the oldest first."""
NO_LOANS: Loans = ()


@dataclass(frozen=True, slots=True)
class Start:
    """A loan that a plan begins with, of storages of the microbatch that runs backward."""

    home: Lane
    user: Lane
    when: int
    """`before`, if it was made beside that one's first pass; else 0 or BEHIND."""
    lent: tuple[int, ...]
    """Places among the storages."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a plan's walk begins with."""

    loans: tuple[Start, ...] = ()
    storages: tuple[Name, ...] = ()
    """Their places in the microbatch's tables."""


NOTHING = Beginning()


@dataclass(frozen=True, slots=True)
class Fresh:
    """A loan that a plan made."""

    home: Lane
    user: Lane
    before: int
    lent: tuple[int | tuple[Name, Storage, bool], ...]
    """Places among the storages that it began with; and new ones: name, storage, whether kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What a plan does to loans."""

    behind: Mapping[Lane, int]
    """By the user's lane, number of a loan that was made after all first passes of what now runs backward."""
    released: Sequence[tuple[int, Lane, Lane, int]]
    """Place of an issue that waits; which loans it lets go: owner, user, up to which number."""
    loose: frozenset[int]
    """Places of storages that it began with and that nothing else holds at its end."""
    fresh: tuple[Fresh, ...]


def begin(loans: Loans, distance: int) -> tuple[Beginning, dict[Lent, int]]:
    """What a plan's walk begins with, and the places of its storages.

    Args:
        loans: What lanes hold.
        distance: How many plans ago the microbatch that runs backward ran forward; 0: none does.
    """
    places: dict[Lent, int] = {}
    starts = []
    for loan in loans:
        own = [lent for lent in loan.lent if lent.kept and lent.age == distance]
        if own:
            numbers = tuple(places.setdefault(lent, len(places)) for lent in own)
            starts.append(Start(loan.home, loan.user, _when(loan, distance), numbers))
    return Beginning(tuple(starts), tuple(lent.name for lent in places)), places


class Passage:
    """The loans of one plan's beginning, while it runs and after.

    Args:
        loans: As for `begin`.
        distance: As for `begin`.
        places: As `begin` gave them.
        ending: What the plan's walk found.
    """

    def __init__(self, loans: Loans, distance: int, places: Mapping[Lent, int], ending: Ending) -> None:
        self._loans = loans
        self._places = places
        self._ending = ending
        self._until = [self._let_go(loan, distance) for loan in loans]
        self._last: dict[Lent, int] = {}
        """Until which issue storages are there that nothing but loans holds."""
        for loan, until in zip(loans, self._until, strict=True):
            for lent in loan.lent:
                if not lent.kept:
                    self._last[lent] = max(until, self._last.get(lent, 0))

    def there(self, place: int) -> list[Storage]:
        """The storages that nothing but loans holds while this issue runs."""
        return [lent.storage for lent, last in self._last.items() if last > place]

    def left(self) -> Loans:
        """What lanes hold after the plan."""
        ending = self._ending
        own = {place: replace(lent, age=lent.age + 1, kept=False) for lent, place in self._places.items()}
        left = []
        for loan, until in zip(self._loans, self._until, strict=True):
            if until == _NEVER:
                every = ((lent, self._places.get(lent)) for lent in loan.lent)
                lent = tuple(
                    replace(lent, age=lent.age + 1) if place is None else own[place]
                    for lent, place in every
                    if place is None or place in ending.loose
                )
                left.append(replace(loan, age=loan.age + 1, lent=lent))
        for fresh in ending.fresh:
            lent = tuple(own[one] if isinstance(one, int) else Lent(1, *one) for one in fresh.lent)
            left.append(Loan(1, fresh.home, fresh.user, fresh.before, lent))
        left = [loan for loan in left if loan.lent]
        return tuple(sorted(left, key=lambda loan: (_ORDER[loan.home], _ORDER[loan.user])))

    def _let_go(self, loan: Loan, distance: int) -> int:
        """The place of the issue that lets a loan go."""
        when = _when(loan, distance)
        number = self._ending.behind[loan.user] if when == BEHIND else when
        released = (
            place
            for place, home, user, up_to in self._ending.released
            if (home, user) == (loan.home, loan.user) and number <= up_to
        )
        return next(released, _NEVER)


def _when(loan: Loan, distance: int) -> int:
    return loan.before if loan.age == distance else 0 if loan.age > distance else BEHIND


def oldest(loans: Loans) -> int:
    """How many plans ago the first of them was made, or got its name."""
    return max((age for loan in loans for age in (loan.age, *(lent.age for lent in loan.lent))), default=0)
