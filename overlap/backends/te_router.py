"""The choice of experts by Transformer Engine's fused router (backend te-modules).

Its kernel chooses in every call. A replay must not (R7), so it is called where nothing is pinned yet, for the choice
alone: probabilities, losses and their gradients are computed at the pinned choice, as ever. Which experts a token goes
to counts, their order within it does not: copies are sorted by expert, and probabilities belong to copies.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformer_engine.pytorch.router import fused_topk_with_score_function

from overlap.model.config import ModelConfig, Score
from overlap.model.router import Router, select_largest


def offers(config: ModelConfig) -> bool:
    """Whether the kernel chooses as the model does.

    It adds a bias to sigmoid scores only. It scores a group by as many of its best experts as a token takes of each
    chosen group on average, where the model always takes two.
    """
    unbiased = config.score is Score.SIGMOID or not config.expert_bias
    return unbiased and (not _grouped(config) or config.topk == 2 * config.topk_groups)


class TERouter(Router):
    """In the place of model.router.Router, whose parameter and buffers it takes over.

    Args:
        router: With settings that offers() accepts.
    """

    def __init__(self, router: Router) -> None:
        super().__init__(router.config)
        self.select = router.select
        self.weight = router.weight
        for name, buffer in router.named_buffers(recurse=False):
            setattr(self, name, buffer)

    def _pick(self, logits: Tensor) -> Tensor:
        config = self.config
        if self.select is not select_largest:
            return super()._pick(logits)
        grouped = _grouped(config)
        ids = torch.empty(len(logits), config.topk, dtype=torch.int64, device=logits.device)
        fused_topk_with_score_function(
            logits.contiguous(),
            config.topk,
            use_pre_softmax=True,
            num_groups=config.expert_groups if grouped else None,
            group_topk=config.topk_groups if grouped else None,
            scaling_factor=None,
            score_function=str(config.score),
            expert_bias=self.expert_bias if config.expert_bias else None,
            topk_indices=ids,
        )
        return ids


def _grouped(config: ModelConfig) -> bool:
    return config.topk_groups < config.expert_groups
