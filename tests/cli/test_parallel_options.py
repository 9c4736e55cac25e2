from __future__ import annotations

import argparse
from datetime import timedelta

import pytest
import torch

from overlap.cli.build import random_microbatches
from overlap.cli.options import add_shared_options, read_options
from overlap.cli.parallel_options import (
    ParallelOptions,
    add_parallel_options,
    capacity_of,
    joined,
    lengths,
    own_length,
    read_parallel,
    transport_of,
)
from overlap.parallel.layout import ParallelLayout
from overlap.parallel.world import SOLO
from recompute.errors import ConfigError
from tests.cli.run import refused


def read(words: str) -> ParallelOptions:
    parser = argparse.ArgumentParser()
    add_parallel_options(parser)
    parser.set_defaults(default_of=parser.get_default)
    return read_parallel(parser.parse_args(words.split()))


@pytest.fixture
def _four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")


@pytest.mark.usefixtures("_four")
def test_every_option_is_read() -> None:
    words = "--ep 2 --capacity 1.5 --route first-rank --debug-collectives --collective-backend gloo"
    assert read(f"{words} --collective-timeout 7") == ParallelOptions(
        layout=ParallelLayout(world_size=4, ep=2),
        data_rank=3,
        capacity_factor=1.5,
        route="first-rank",
        debug_collectives=True,
        backend="gloo",
        timeout=timedelta(seconds=7),
    )


def test_the_default_is_one_process() -> None:
    assert read("") == ParallelOptions() == read_parallel(argparse.Namespace())
    with joined(ParallelOptions(), "cpu") as world:
        assert world is SOLO


@pytest.mark.usefixtures("_four")
@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("--ep 3", "ep"),
        ("--ep 0", "ep"),
        ("--ep 2 --capacity 0", "capacity"),
        ("--ep 2 --capacity nan", "capacity"),
        ("--ep 2 --collective-timeout 0", "collective_timeout"),
    ],
)
def test_what_does_not_fit_is_refused(words: str, field: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read(words)
    assert refusal.value.field == field


@pytest.mark.parametrize("words", ["--layers 0", "--layers 2 --dense-layers 2"])
def test_a_route_needs_experts(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    for route in ("balanced", "first-rank"):
        message = refused(capsys, f"verify {words} --route {route}")
        assert f"route='{route}': has no effect: no layer of the model has experts" in message


@pytest.mark.parametrize(
    "words", ["--debug-collectives", "--collective-backend gloo", "--collective-timeout 9", "--ep 2"]
)
def test_one_process_needs_no_groups(words: str) -> None:
    with pytest.raises(ConfigError):
        read(words)


@pytest.mark.usefixtures("_four")
def test_lengths_are_one_for_all_or_one_each() -> None:
    parallel = read("--ep 2")
    assert own_length(lengths("16"), parallel) == 16
    assert own_length(lengths("16,24,8,32"), parallel) == 32
    with pytest.raises(ConfigError, match="one for each of the 4 ranks"):
        own_length(lengths("16,24"), parallel)


def shared(words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_shared_options(parser)
    add_parallel_options(parser)
    return parser.parse_args(words.split())


@pytest.mark.usefixtures("_four")
def test_a_capacity_is_the_same_on_all_ranks_whatever_their_lengths() -> None:
    """A fair share of the longest microbatch: 32 tokens, 2 rows, 2 copies over 8 experts."""
    args = shared("--ep 2 --capacity 1.1 --seq 16,24,8,32 --batch 2 --experts 8")
    assert capacity_of(args) == 18
    assert read_options(args).model.capacity == 18
    assert read_options(args).seq == 32
    assert read_options(shared("--ep 2")).model.capacity is None


@pytest.mark.usefixtures("_four")
def test_tokens_travel_where_experts_are_shared() -> None:
    assert transport_of(shared("--ep 2")) == "all_to_all"
    assert transport_of(shared("")) == "local"
    assert transport_of(shared("--transport host_loopback")) == "host_loopback"
    with pytest.raises(ConfigError, match="experts on several ranks need all_to_all"):
        transport_of(shared("--ep 2 --transport local"))
    with pytest.raises(ConfigError, match="needs --ep above 1"):
        transport_of(shared("--transport all_to_all"))


def test_every_rank_draws_its_own_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    drawn = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        drawn.append(random_microbatches(read_options(shared("--ep 2 --seq 16,24")), 0))
    assert [feeds[0]["ids"].shape for feeds in drawn] == [(1, 16), (1, 24)]
    assert not torch.equal(drawn[0][0]["ids"], drawn[1][0]["ids"][:, :16])
