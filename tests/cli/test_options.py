"""The shared options: what they mean, and every bad input named by field, value and rule."""

from __future__ import annotations

import argparse

import pytest

from overlap.cli.options import add_shared_options, describe, read_options
from overlap.model import ModelConfig
from recompute import RecomputeConfig
from tests.cli.run import TINY, command, refused

COMMANDS = ("plan", "verify", "train")

BAD = [
    ("--method sideways --num-layers 1", "method='sideways': must be 'uniform' or 'block'"),
    ("--method uniform --num-layers 0", "num_layers=0: must be an integer of at least 1"),
    ("--method uniform --num-layers -1", "num_layers=-1: must be an integer of at least 1"),
    ("--method uniform", "num_layers=None: must be an integer of at least 1"),
    ("--method uniform --num-layers two", "num_layers='two': must be an integer of at least 1"),
    ("--method uniform --num-layers 1.5", "num_layers='1.5': must be an integer of at least 1"),
    ("--method uniform --num-layers True", "num_layers='True': must be an integer of at least 1"),
    ("--method block", "num_layers=None: must be an integer of at least 1"),
    ("--method none --num-layers 2", "num_layers=2: has no effect with method none"),
    ("--method none --replay just_in_time", "replay='just_in_time': has no effect with method none"),
    ("--num-layers 2", "num_layers=2: has no effect with method none"),
    ("--method uniform --num-layers 1 --replay never", "replay='never': "),
    ("--experts 4 --topk 5", "topk=5: must not exceed experts (4)"),
    ("--experts 4 --expert-groups 3", "expert_groups=3: must divide experts (4)"),
    ("--topk 0", "topk=0: must be an integer, 1 or more"),
    ("--layers -1", "layers=-1: must be an integer, 0 or more"),
    ("--layers 2 --dense-layers 3", "dense_layers=3: must not exceed layers (2)"),
    ("--dropout 1.0", "dropout=1.0: must be at least 0 and below 1"),
    ("--dropout nan", "dropout=nan: must be a finite number"),
    ("--jitter -0.1", "jitter=-0.1: must be at least 0 and below 1"),
    ("--dtype float16", "dtype='float16': float16 is refused"),
    ("--dtype int8", "dtype='int8': must be one of float32, bfloat16, float64"),
    ("--order sideways", "order 'sideways' is unknown: choose one of plain, "),
    ("--order=", "order '' is unknown"),
    ("--recompute-modules=", "modules='': is no module"),
    ("--batch 0", "batch=0: must be at least 1"),
    ("--seq 0", "seq=0: must be at least 1"),
    ("--microbatches 0", "microbatches=0: must be at least 1"),
    ("--seed 99999999999999999999", "seed=99999999999999999999: must lie within -"),
    ("--layers two", "argument --layers: invalid int value: 'two'"),
    ("--attention linear", "argument --attention: invalid choice: 'linear'"),
    ("--score relu", "argument --score: invalid choice: 'relu'"),
    ("--no-such-option 1", "unrecognized arguments: --no-such-option 1"),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=[words for words, _ in BAD])
@pytest.mark.parametrize("name", COMMANDS)
def test_bad_input(name: str, words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command refuses it alike: status 2, nothing on stdout, the message on stderr."""
    assert message in refused(capsys, f"{name} --json {words}")


def test_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert "COMMAND" in refused(capsys, "")
    assert "sideways" in refused(capsys, "sideways")


def test_help_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        result = command(capsys, f"{name} --help")
        assert result.status == 0
        assert "--num-layers" in result.out


def parse(words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_shared_options(parser)
    return parser.parse_args(words.split())


def test_defaults() -> None:
    options = read_options(parse(""))
    assert options.recompute == RecomputeConfig.none()
    assert options.model == ModelConfig(max_seq=16)
    assert (options.order, options.delay_wgrad, options.json, options.program) == ("multi_queue", False, False, "")
    assert (options.seq, options.batch, options.microbatches, options.seed) == (16, 1, 2, 0)


def test_every_option_arrives() -> None:
    """Each changes the description of the run, and nothing else does."""
    plain = describe(read_options(parse("")))
    settings = {
        "layers": 5, "dense_layers": 1, "hidden": 48, "heads": 4, "kv_heads": 2, "ffn_width": 40, "experts": 8,
        "topk": 3, "expert_width": 20, "shared_width": 0, "expert_groups": 2, "topk_groups": 2, "attention": "gqa",
        "score": "softmax", "dropout": 0.1, "attention_dropout": 0.2, "jitter": 0.3, "dtype": "bfloat16",
        "method": "block", "num_layers": 3, "order": "plain", "seq": 9, "batch": 3, "microbatches": 4, "seed": 7,
    }  # fmt: skip
    words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in settings.items())
    found = describe(read_options(parse(f"{words} --cut-attention --tied --per-token-loss --delay-wgrad --lead 2")))
    expected = {
        **settings,
        "granularity": "full",
        "cut_attention": True,
        "tied": True,
        "per_token_loss": True,
        "delay_wgrad": True,
        "lead": 2,
        "max_seq": 9,
    }
    assert {name: value for name, value in found.items() if value != plain[name]} == expected


def test_a_count_above_the_layers_means_all(capsys: pytest.CaptureFixture[str]) -> None:
    result = command(capsys, f"plan --layers 2 --method block --num-layers 9 --json {TINY}")
    assert [segment["layers"] for segment in result.json["segments"]] == [[0], [1]]


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("no.such.module:build", "No module named 'no'"),
        ("examples.own_layer:missing", "has no attribute 'missing'"),
        ("examples.own_layer", "must be MODULE:FUNCTION"),
        (":build", "must be MODULE:FUNCTION"),
        (".own_layer:build", "must be MODULE:FUNCTION"),
        ("sys:path", "is not a callable object"),
        ("os:getcwd", "too many positional arguments"),
        ("operator:add", "must return a module and the list of its microbatches"),
    ],
)
def test_a_program_that_is_not_there(name: str, rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, f"verify --program {name}")
    assert f"program='{name}'" in message
    assert rule in message
