"""`python -m overlap WORDS` as a rank of a GPU test: deterministic, with a named attention backend.

Started by torchrun. The first word may be `expect=gloo` or `expect=nccl`: what must carry the tokens.
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from overlap.cli import main
from overlap.cli import verify as command
from overlap.parallel.world import World


def check_backend(expected: str) -> None:
    """Have `verify` look at its groups before it starts."""
    run = command._run

    def checked(options, args, world: World) -> int:
        tensor = torch.zeros(1, device=world.device)
        found = world.ep_group._get_backend(tensor.device).name()
        assert found == expected, f"tokens travel by {found}"
        assert dist.get_backend(world.formed.everyone) == "gloo"
        return run(options, args, world)

    command._run = checked


if __name__ == "__main__":
    expected, *words = sys.argv[1:]
    check_backend(expected.partition("=")[2])
    torch.use_deterministic_algorithms(True)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        sys.exit(main(words))
