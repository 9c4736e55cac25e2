"""One small training step for compute-sanitizer: `compute-sanitizer --tool memcheck python3 -m tests.gpu.sanitize`."""

import torch

from overlap import ModelChunk, get_order, train_step
from overlap.dispatch.host_loopback import HostLoopback
from overlap.model import Decoder, ModelConfig
from overlap.streams import StreamLanes
from recompute import RecomputeConfig, Replay


def main() -> None:
    """Run it and say so."""
    device = torch.device("cuda")
    rule = RecomputeConfig.uniform(1, replay=Replay.HIDDEN)
    chunk = ModelChunk(
        Decoder(ModelConfig(layers=2, hidden=64, dropout=0.1, dtype="bfloat16"), transport=HostLoopback()).to(device),
        recompute=rule,
        order=get_order("multi_queue", rule.replay),
        lanes=StreamLanes(device),
    )
    tokens = torch.randint(256, (3, 2, 17), generator=torch.Generator().manual_seed(0)).to(device)
    losses = train_step(chunk, [{"ids": t[:, :-1].contiguous(), "labels": t[:, 1:].contiguous()} for t in tokens])
    torch.cuda.synchronize()
    print("step done", [float(item["loss"]) for item in losses])


if __name__ == "__main__":
    main()
