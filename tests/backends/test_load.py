"""Backends by name."""

from __future__ import annotations

import sys

import pytest

from overlap.backends import load_backend
from overlap.model.backend import TorchBackend
from overlap.model.fp8 import Fp8Config
from recompute import ConfigError


def test_torch():
    assert isinstance(load_backend("torch"), TorchBackend)


def test_a_missing_package_names_the_extra(monkeypatch):
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine_torch"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in [name for name in sys.modules if name.startswith("overlap.backends.te")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"backend='te': needs Transformer Engine: pip install .*\[te\]"):
        load_backend("te")


def test_bad_names():
    with pytest.raises(ConfigError, match="must be one of torch, te"):
        load_backend("jax")
    with pytest.raises(ConfigError, match="fp8='block': needs backend te"):
        load_backend("torch", Fp8Config(recipe="block"))
