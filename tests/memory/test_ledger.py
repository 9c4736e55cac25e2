"""The ledger's running sums are those of all that is alive."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from overlap.ir import Op
from overlap.memory.bins import Bin, Claims, Storage, sum_bins
from overlap.memory.ledger import Ledger, Table

KINDS = (None, Bin.SEGMENT_INPUTS, Bin.PINNED_ROUTING, Bin.PENDING_WGRAD, Bin.HOST_INPUTS)
Entry = tuple[tuple[int, Bin | None], ...]
ENTRIES = st.lists(st.tuples(st.integers(0, 5), st.sampled_from(KINDS)), min_size=1, max_size=3).map(tuple)


def claims(entries: list[Entry]) -> Claims:
    by_kind = {kind: [key for entry in entries for key, given in entry if given is kind] for kind in KINDS}
    return Claims(
        segment_inputs=by_kind[Bin.SEGMENT_INPUTS],
        pinned=by_kind[Bin.PINNED_ROUTING],
        pending=by_kind[Bin.PENDING_WGRAD],
        host=by_kind[Bin.HOST_INPUTS],
    )


@settings(max_examples=50)
@given(steps=st.lists(st.tuples(st.integers(0, 3), st.none() | ENTRIES), max_size=12))
def test_sums_are_those_of_what_is_alive(steps) -> None:
    """Entries of a table are set, replaced and taken out; what no entry holds dies, and an unknown id is nobody's."""
    ledger = Ledger()
    storages = {
        key: Storage(10**key, (Op.REPLAY, Op.LOAD, Op.BACKWARD)[key % 3], f"stage{key % 2}") for key in range(5)
    }
    for key, storage in storages.items():
        ledger.add(key, storage, counts=key != 4)
    table: Table[int, Entry] = Table(ledger, lambda _, entry: entry)
    table[-1] = tuple((key, None) for key in storages)
    entries: dict[int, Entry] = {}
    for place, entry in steps:
        if entry is None:
            table.pop(place, None)
            entries.pop(place, None)
        else:
            table[place] = entries[place] = entry
        assert ledger.bins() == sum_bins(storages, [claims(list(entries.values()))])
    del table[-1]
    alive = {key for entry in entries.values() for key, _ in entry} & storages.keys()
    assert ledger.forget() == {key: storage for key, storage in storages.items() if key not in alive}
    left = {key: storages[key] for key in alive}
    assert ledger.bins() == sum_bins(left, [claims(list(entries.values()))])
    assert ledger.total == sum(storage.nbytes for key, storage in left.items() if key != 4)


def test_what_is_spared_dies_later() -> None:
    ledger = Ledger()
    one, other = (Storage(nbytes, Op.FORWARD, "attn") for nbytes in (8, 16))
    ledger.add(1, one)
    ledger.add(2, other)
    assert ledger.forget({1}) == {2: other}
    assert ledger.total == 8
    assert ledger.forget() == {1: one}
    assert ledger.total == 0
