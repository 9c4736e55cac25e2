"""Options about the backend."""

from __future__ import annotations

import argparse

import pytest

from overlap.cli.backend_options import add_backend_options, describe_backend, read_backend_options
from recompute import ConfigError


def read(words: str, **others: object) -> object:
    parser = argparse.ArgumentParser()
    add_backend_options(parser)
    args = parser.parse_args(words.split())
    vars(args).update({"program": "", "device": "cpu", **others})
    return describe_backend(read_backend_options(args))


def test_defaults():
    assert read("") == {
        "backend": "torch", "fp8": None, "fp8_first_bf16": None, "fp8_last_bf16": None, "fp8_amax_history": None,
    }  # fmt: skip


def test_everything():
    words = "--backend te --fp8 delayed --fp8-first-bf16 1 --fp8-last-bf16 2 --fp8-amax-history 8"
    assert read(words, device="cuda") == {
        "backend": "te", "fp8": "delayed", "fp8_first_bf16": 1, "fp8_last_bf16": 2, "fp8_amax_history": 8,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "others", "message"),
    [
        ("--backend jax", {}, "backend='jax': must be one of torch, te"),
        ("--backend te", {}, "add --device cuda"),
        ("--backend te", {"device": "cuda", "program": "a:b"}, "has no effect with --program"),
        ("--fp8 block", {}, "needs --backend te"),
        ("--fp8-last-bf16 1", {}, "fp8_last_bf16=1: has no effect without --fp8"),
        ("--backend te --fp8 int4", {"device": "cuda"}, "fp8='int4': must be one of"),
    ],
)
def test_bad_input(words, others, message):
    with pytest.raises(ConfigError) as caught:
        read(words, **others)
    assert message in str(caught.value)
