from __future__ import annotations

from typing import Any

from overlap.parallel.uses import trainable, uses_of
from tests.parallel.models import small_chunk


def test_groups_are_found_by_the_stages_that_read_their_parameters() -> None:
    chunk = small_chunk()
    module: Any = chunk.module
    layer, ends = module.layers[1], [module.embedding, module.head.norm.weight]
    experts = list(layer.experts.parameters())
    dense = [p for p in layer.parameters() if all(p is not q for q in experts)]
    dense[0].requires_grad_(False)
    uses = uses_of(chunk.program, [experts, dense, ends])
    assert uses.groups[1, "experts"] == (0,)
    assert uses.groups[1, "attn"] == uses.groups[1, "shared"] == (1,)
    assert uses.groups[None, "embed"] == uses.groups[None, "head"] == (2,)
    assert uses.held == frozenset()
    assert uses.planned == (frozenset({0, 1}), frozenset(range(1, len(dense))), frozenset({0, 1}))
    assert uses.givers[1] == {(1, "attn"), (1, "shared")}


def test_both_stages_of_a_cut_layer_use_its_group() -> None:
    """So it is brought together before the first and scattered after the last, in forward and in backward."""
    chunk = small_chunk({"cut_attention": True, "mhc": 2})
    layer = chunk.module.get_submodule("layers.1")
    group = [p for name, p in layer.named_parameters() if not name.startswith("experts.")]
    uses = uses_of(chunk.program, [group])
    assert uses.groups == {(1, name): (0,) for name in ("attn", "post_attn", "shared")}
    assert uses.givers == (frozenset(uses.groups),)
    assert uses.planned == (frozenset(range(len(group))),)


def test_groups_with_a_parameter_that_is_a_value_are_held() -> None:
    chunk = small_chunk({"tied": True})
    module: Any = chunk.module
    uses = uses_of(chunk.program, [[module.embedding], list(module.layers[0].parameters())])
    assert uses.held == {0}
    assert uses.givers[0] == {(None, "weights")}


def test_freezing_changes_what_plans_are_kept_by() -> None:
    chunk = small_chunk()
    before = trainable(chunk.program)
    chunk.module.get_parameter("embedding").requires_grad_(False)
    assert before.count(False) == 0
    assert trainable(chunk.program).count(False) == 1
