"""The built-in issue orders as text tables, each for replays that are exposed and for replays that are hidden.

How to read one: orders. What hides what is said beside each all-to-all.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

EXPOSED: Mapping[str, str] = MappingProxyType({
    # No interleaving: the forward layer, then the backward layer. Fits any stage names.
    "plain": "F.* B.* W.*",
    # Many hardware queues: a lane never waits for the other's queue, so each all-to-all is issued as soon as its
    # input exists, next to the other microbatch's compute that hides it.
    "multi_queue": """
        B.mtp_post W.mtp_post
        B.post     W.post       B.combine
        F.attn     F.post_attn  # hide B.combine
        B.experts
        F.dispatch
        F.shared   W.experts    # hide F.dispatch
        B.dispatch
        B.shared   W.shared
        F.experts               # hides B.dispatch
        F.combine
        B.post_attn  W.post_attn
        B.attn     W.attn       # hide F.combine
        F.post     F.mtp_post
    """,
    # One hardware queue: kernels start in the order of launch, so each all-to-all is launched before the compute
    # that hides it, and never before its input is about to be ready: what stands behind it would wait with it.
    "single_queue": """
        B.mtp_post W.mtp_post
        B.post     W.post       B.combine
        F.attn     F.post_attn  F.shared    # hide B.combine
        F.dispatch
        B.experts               # hides F.dispatch
        B.dispatch
        F.experts  W.experts    # hide B.dispatch
        F.combine
        B.shared   W.shared
        B.post_attn  W.post_attn
        B.attn     W.attn       # hide F.combine
        F.post     F.mtp_post
    """,
    # Attention's backward as early as it can be, so that its activations are let go before the experts' forward needs
    # room: less memory at the peak, and F.combine is left with less to hide it.
    "early_release": """
        B.mtp_post W.mtp_post
        B.post     W.post       B.combine
        F.attn     F.post_attn  # hide B.combine
        B.experts
        F.dispatch
        F.shared   W.experts    # hide F.dispatch
        B.dispatch
        B.shared   W.shared     # hide B.dispatch
        B.post_attn  W.post_attn
        B.attn     W.attn
        F.experts
        F.combine
        F.post     F.mtp_post
    """,
    # For comparison, the order of the closest existing system (its weak points included): experts before the
    # dispatch that they should hide, and what follows combine right behind it.
    "fused": """
        B.mtp_post W.mtp_post
        B.post     W.post       B.combine
        F.attn     F.post_attn  F.shared
        B.experts
        F.dispatch
        W.experts
        B.dispatch
        F.experts
        F.combine  F.post
        B.shared   W.shared
        B.post_attn  W.post_attn
        B.attn
        F.mtp_post
        W.attn
    """,
})  # fmt: skip

# A replayed layer needs nothing of the pair beside it: its slots go where the pair has no compute left for a transfer.
# R.combine and R.post are left out where no replayed stage reads them: of a segment's last layer, unless its `post`
# needs the combine output for its gradient.
HIDDEN: Mapping[str, str] = MappingProxyType({
    "multi_queue": """
        B.mtp_post W.mtp_post
        B.post     W.post       B.combine
        F.attn     F.post_attn  # hide B.combine
        F.dispatch F.shared
        R.attn     R.post_attn  R.shared    # hide F.dispatch
        B.experts
        R.dispatch
        B.dispatch B.shared     W.shared
        F.experts               # hides R.dispatch and B.dispatch, with the next
        F.combine
        W.experts  R.experts
        R.combine
        B.post_attn  W.post_attn
        B.attn                  # hides F.combine and R.combine
        F.post     F.mtp_post
        W.attn
        R.post     R.mtp_post
    """,
    "early_release": """
        B.mtp_post W.mtp_post
        B.post     W.post       B.combine
        F.attn     F.post_attn  # hide B.combine
        F.dispatch F.shared
        B.experts  W.experts    # hide F.dispatch
        B.dispatch B.shared     W.shared
        F.experts               # hides B.dispatch
        F.combine
        B.post_attn  W.post_attn
        B.attn     W.attn       # hide F.combine; the pair's activations are gone before the next are rebuilt
        R.attn     R.post_attn  R.shared
        R.dispatch
        F.post     F.mtp_post
        R.experts
        R.combine
        R.post     R.mtp_post
    """,
    "single_queue": """
        B.mtp_post W.mtp_post
        B.post     W.post       B.combine
        F.attn     F.post_attn  # hide B.combine
        F.dispatch F.shared
        R.attn     R.post_attn  R.shared    # hide F.dispatch
        R.dispatch
        B.experts  W.experts    # hide R.dispatch
        B.dispatch B.shared     W.shared
        R.experts
        R.combine
        F.experts               # hides B.dispatch and R.combine, with R.experts
        F.combine
        B.post_attn  W.post_attn
        B.attn     W.attn       # hide F.combine
        R.post     R.mtp_post
        F.post     F.mtp_post
    """,
})  # fmt: skip
