"""Which kind a storage belongs to, and the peaks over a step."""

from __future__ import annotations

from overlap.ir import Op
from overlap.memory.bins import Bin, Border, Claims, Storage, Usage, sum_bins


def claims(*, inputs=(), pinned=(), pending=(), host=()) -> Claims:
    return Claims(segment_inputs=inputs, pinned=pinned, pending=pending, host=host)


def test_names_are_the_contract() -> None:
    names = ["segment_inputs", "pinned_routing", "live_segment", "pending_wgrad", "rng_states", "rest", "host_inputs"]
    assert sorted(kind.value for kind in Bin) == sorted(names)
    assert sorted(Usage(curve=()).as_json()) == sorted([*names, "total"])


def test_a_storage_belongs_to_the_first_kind_that_applies() -> None:
    live = {key: Storage(10**key, Op.REPLAY) for key in range(5)} | {5: Storage(10**5, Op.BACKWARD)}
    live[6] = Storage(10**6, Op.STORE)
    found = sum_bins(live, [claims(inputs=(0,), pinned=(0, 1), pending=(1, 2)), claims(pending=(0, 2, 3), host=(6,))])
    assert found == {
        Bin.SEGMENT_INPUTS: 1,
        Bin.PINNED_ROUTING: 10,
        Bin.PENDING_WGRAD: 1100,
        Bin.LIVE_SEGMENT: 10000,
        Bin.HOST_INPUTS: 1000000,
        Bin.RNG_STATES: 0,
        Bin.REST: 100000,
    }


def test_what_is_not_live_does_not_count() -> None:
    """Feeds and parameters have ids that no storage has."""
    assert sum(sum_bins({}, [claims(inputs=(-1,), pinned=(3,), pending=(-1,))]).values()) == 0


def test_peaks_may_fall_on_different_slots() -> None:
    def border(inputs: int, rest: int) -> Border:
        return Border(slot="F0.head", bytes={**dict.fromkeys(Bin, 0), Bin.SEGMENT_INPUTS: inputs, Bin.REST: rest})

    usage = Usage(curve=(border(5, 1), border(1, 4)))
    assert usage.peaks.bins[Bin.SEGMENT_INPUTS] == 5
    assert usage.peaks.bins[Bin.REST] == 4
    assert usage.total == usage.as_json()["total"] == 6
