"""The recompute options: each arrives, each bad one is named, and commands run with them."""

from __future__ import annotations

import argparse

import pytest

from overlap.cli.options import add_shared_options, describe, read_options
from recompute import Keep, RecomputeConfig
from tests.cli.run import TINY, command, refused

BAD = [
    ("--granularity selective", "modules=(): must name at least one of attn, experts"),
    ("--granularity half", "granularity='half': must be 'none', 'full' or 'selective'"),
    ("--granularity full --recompute-modules attn", "modules=('attn',): has no effect unless granularity"),
    ("--granularity none --recompute-modules attn", "modules=('attn',): has no effect unless granularity is"),
    ("--recompute-modules attn,mlp", "modules='mlp': is no module; known are attn, experts, shared_experts"),
    ("--recompute-modules attn,core_attn", "modules='core_attn': has no effect beside 'attn'"),
    ("--recompute-modules attn --num-layers 2", "num_layers=2: has no effect with method none"),
    ("--recompute-modules attn --method uniform --num-layers 1", "method='uniform': leaves no layer"),
    ("--recompute-modules shared_experts --shared-width 0", "modules='shared_experts': this model has no such module"),
    ("--recompute-modules mla_up_proj --attention gqa", "modules='mla_up_proj': this model has no such module"),
    ("--keep host", "keep='host': has no effect unless layers or whole stages"),
    ("--method uniform --num-layers 1 --keep tape", "keep='tape': must be 'device', 'host' or 'sharded'"),
    ("--method uniform --num-layers 1 --keep sharded", "keep='sharded': needs ModelChunk(shards="),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=[words for words, _ in BAD])
def test_bad_input(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, f"plan --json {words}")


def test_every_option_arrives() -> None:
    parser = argparse.ArgumentParser()
    add_shared_options(parser)
    words = "--method block --num-layers 1 --replay hidden --recompute-modules moe_act,attn --keep host"
    options = read_options(parser.parse_args(words.split()))
    assert options.recompute == RecomputeConfig(
        granularity="selective", method="block", num_layers=1, replay="hidden", modules=("attn", "moe_act"), keep="host"
    )
    found = describe(options)
    assert (found["granularity"], found["recompute_modules"], found["keep"]) == (
        "selective", ["attn", "moe_act"], "host",
    )  # fmt: skip
    uniform = parser.parse_args(["--granularity", "full", "--method", "uniform", "--num-layers", "2", "--keep", "host"])
    assert read_options(uniform).recompute == RecomputeConfig.uniform(2, keep=Keep.HOST)


def test_plan_shows_what_is_rebuilt(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--layers 2 --method block --num-layers 1 --recompute-modules experts,core_attn --keep host"
    result = command(capsys, f"plan --json {words} {TINY}").json
    assert [segment["layers"] for segment in result["segments"]] == [[0]]
    assert result["rebuilt"] == {"1.attn": ["core_attn"], "1.experts": ["experts"]}
    assert (result["slots"]["S"], result["slots"]["L"]) == (4, 4)
    assert "1.experts" in command(capsys, f"plan {words} {TINY}").out


def test_verify_finds_equality_and_the_control_a_difference(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"verify --json --layers 2 --steps 1 --recompute-modules attn,moe_act --keep host --dropout 0.1 {TINY}"
    found = command(capsys, words)
    assert (found.status, found.json["equal"], found.json["replayed_a2a"]) == (0, True, 0)
    assert command(capsys, f"{words} --control no_rng").status == 1
