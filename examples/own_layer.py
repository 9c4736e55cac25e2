"""Bring your own layers: a residual MLP model in stages, verified bit for bit.

python -m overlap verify --program examples.own_layer:build --method uniform --num-layers 2
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overlap import Program, ProgramBuilder


class Model(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def program(self) -> Program:
        b = ProgramBuilder()
        hidden, target = b.input("hidden"), b.input("target")
        for index, layer in enumerate(self.layers):
            with b.layer(index):
                (mixed,) = b.compute("mix", layer, hidden, outputs=("mixed",), parameters=layer.parameters())
                (hidden,) = b.compute("post", self.post, mixed, hidden, outputs=("hidden",), draws_rng=True)
        (loss,) = b.compute("loss", F.mse_loss, hidden, target, outputs=("loss",))
        b.loss(loss)
        return b.build()

    def post(self, mixed: Tensor, hidden: Tensor) -> Tensor:
        return hidden + F.dropout(torch.relu(mixed), 0.1, self.training)


def build(seed: int, microbatches: int) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    torch.manual_seed(seed)
    data = [{"hidden": torch.randn(8, 16), "target": torch.randn(8, 16)} for _ in range(microbatches)]
    return Model(layers=5, width=16), data
