"""--cuda-graph is refused where nothing can be recorded, and asks for enough steps."""

import argparse
from importlib import import_module

import pytest

from overlap.cli.graph_options import check_graph, verify_steps
from overlap.cli.options import add_shared_options, read_options
from overlap.cli.pipeline_options import DEFAULTS
from recompute.errors import ConfigError
from tests.cli.run import TINY, refused


@pytest.mark.parametrize("command", ["verify", "train"])
def test_refused_without_a_gpu(capsys, command):
    assert "cuda_graph=True: needs --device cuda" in refused(capsys, f"{command} --cuda-graph")


@pytest.mark.parametrize("option", ["pp", "vpp"])
def test_refused_in_a_pipeline(option):
    args = argparse.Namespace(**{**DEFAULTS, "cuda_graph": True, option: 2})
    parser = argparse.ArgumentParser()
    add_shared_options(parser)
    options = read_options(parser.parse_args([]))
    with pytest.raises(ConfigError, match="cuda_graph=True: a pipeline's steps run as they are"):
        check_graph(args, options)


@pytest.mark.parametrize(("graph", "given", "steps"), [(False, None, 2), (False, 1, 1), (True, None, 5), (True, 3, 3)])
def test_steps(graph, given, steps):
    assert verify_steps(argparse.Namespace(cuda_graph=graph, steps=given)) == steps


@pytest.mark.parametrize(("graph", "given", "least"), [(False, 0, 1), (True, 2, 3)])
def test_too_few_steps(graph, given, least):
    with pytest.raises(ConfigError, match=rf"steps={given}: must be at least {least}"):
        verify_steps(argparse.Namespace(cuda_graph=graph, steps=given))


def test_settings_that_need_the_host_are_refused_before_any_arm_runs(capsys, monkeypatch):
    """As for several ranks, inputs on the host or a per-token loss; here it is the device."""
    module = import_module("overlap.cli.verify")
    monkeypatch.setattr(module, "check_graph", lambda args, options: None)
    monkeypatch.setattr(module, "reproduce", lambda *args, **how: pytest.fail("ran"))
    assert "a CUDA graph needs a CUDA device" in refused(capsys, f"verify --cuda-graph --reproduce {TINY}")
