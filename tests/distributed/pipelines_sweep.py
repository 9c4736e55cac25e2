"""Many drawn pipelines under injected delays, each compared with autograd; exit status 1 if one differs or hangs.

`torchrun --nproc-per-node 2 -m tests.distributed.pipelines_sweep --count 40`; as many ranks as pipeline stages.
"""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.distributed.test_pipeline import drawn


def main() -> int:
    """Run them and say how many."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=40, metavar="N", help="pipelines to draw (default 40)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (default 0)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    wrong = drawn(args.count, args.seed)
    if dist.get_rank() == 0:
        print(f"{args.count} pipelines of {dist.get_world_size()} ranks, {len(wrong)} wrong", *wrong, sep="\n")
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
