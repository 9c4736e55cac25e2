"""The options that every command shares, and what they mean: a model, its data and how its step runs."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

from overlap.cli.backend_options import (
    BackendOptions,
    add_backend_options,
    describe_backend,
    read_backend_options,
)
from overlap.cli.parallel_options import (
    RANK_TRANSPORTS,
    ROUTES,
    ParallelOptions,
    capacity_of,
    describe_parallel,
    lengths,
    own_length,
    read_parallel,
    transport_of,
)
from overlap.cli.recompute_options import add_recompute_options, describe_recompute, read_recompute
from overlap.lead import check_second
from overlap.model.config import Attention, DType, ModelConfig, Score
from overlap.orders import ORDER_NAMES
from recompute.config import RecomputeConfig
from recompute.errors import ConfigError

DEFAULT_ORDER = "multi_queue"
MAX_SEED = 10**12
"""Seeds of the data of single steps are derived by counting, and must fit 63 bits."""
DEVICES = ("cpu", "cuda")
TRANSPORTS = ("local", "host_loopback", "sm_copy", *RANK_TRANSPORTS)
_OWN_MODEL_RULE = "has no effect with --program: the function decides it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A run as the command line describes it."""

    model: ModelConfig
    recompute: RecomputeConfig
    order: str
    delay_wgrad: bool
    lead: int
    seq: int
    """Tokens of a sequence of this rank's data."""
    batch: int
    """Sequences of a microbatch."""
    microbatches: int
    """Microbatches of a step."""
    seed: int
    program: str
    """`module:function` of one's own model; empty: the built-in decoder."""
    threads: int
    """CPU threads of torch."""
    device: str
    transport: str
    loopback_scale: float
    backend: BackendOptions
    json: bool
    parallel: ParallelOptions = field(default_factory=ParallelOptions)


def add_shared_options(parser: argparse.ArgumentParser) -> None:
    """Add the shared options to a command's parser."""
    model = parser.add_argument_group("model")
    default = ModelConfig()
    for name, text in (
        ("layers", "decoder layers"),
        ("dense-layers", "leading layers with a dense feed-forward"),
        ("hidden", "width of the residual stream"),
        ("heads", "query heads"),
        ("kv-heads", "key/value heads (gqa)"),
        ("ffn-width", "inner width of a dense feed-forward"),
        ("experts", "experts of a MoE layer"),
        ("topk", "experts per token"),
        ("expert-width", "inner width of an expert"),
        ("shared-width", "inner width of the shared expert, 0 for none"),
        ("expert-groups", "groups of experts"),
        ("topk-groups", "groups a token may choose from"),
    ):
        value = getattr(default, name.replace("-", "_"))
        model.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"{text} (default {value})")
    model.add_argument("--attention", choices=[*Attention], default=str(default.attention), help="kind of attention")
    model.add_argument("--score", choices=[*Score], default=str(default.score), help="router scores")
    model.add_argument("--dropout", type=float, default=0.0, metavar="P", help="residual dropout (default 0)")
    model.add_argument("--attention-dropout", type=float, default=0.0, metavar="P", help="dropout of attention weights")
    model.add_argument("--jitter", type=float, default=0.0, metavar="E", help="router input noise (default 0)")
    model.add_argument("--cut-attention", action="store_true", help="what follows attention is a stage post_attn")
    model.add_argument("--tied", action="store_true", help="embedding and head share their weight")
    model.add_argument("--per-token-loss", action="store_true", help="mean over all tokens of a step")
    model.add_argument("--dtype", default=str(default.dtype), help=f"one of {', '.join(DType)}")
    _add_token_options(model)
    add_backend_options(parser)
    model.add_argument("--program", default="", metavar="MODULE:FUNCTION", help="your own model instead")
    step = parser.add_argument_group("training step")
    add_recompute_options(step)
    _add_schedule_options(step)
    step.add_argument(
        "--seq", type=lengths, default=(16,), metavar="N[,N...]",
        help="tokens of a sequence, or of each rank's sequences (default 16)",
    )  # fmt: skip
    step.add_argument("--batch", type=int, default=1, metavar="N", help="sequences of a microbatch (default 1)")
    step.add_argument("--microbatches", type=int, default=2, metavar="N", help="microbatches of a step (default 2)")
    step.add_argument("--seed", type=int, default=0, metavar="N", help="seed of weights, data and draws (default 0)")
    step.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads of torch (default 1)")
    step.add_argument("--device", choices=DEVICES, default=DEVICES[0], help="where to run (default cpu)")
    step.add_argument(
        "--transport", choices=TRANSPORTS, help="how tokens reach their experts (default local, all_to_all with --ep)"
    )
    step.add_argument(
        "--loopback-scale", type=float, metavar="X", help="share of the bytes that host_loopback moves (default 1)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else there")
    parser.set_defaults(default_of=parser.get_default)


def _add_schedule_options(step: argparse._ArgumentGroup) -> None:
    """Options about the sequence in which slots are issued."""
    step.add_argument(
        "--order",
        help=f"issue order: {', '.join(ORDER_NAMES)}, or a file with a text table (default {DEFAULT_ORDER}, plain with "
        "--program)",
    )
    step.add_argument("--delay-wgrad", action="store_true", help="weight gradients in slots of their own")
    step.add_argument(
        "--lead", type=int, default=0, metavar="N",
        help="layers of the second microbatch's forward that run beside the first's, which has nothing else to hide "
        "its transfers behind; costs their inputs (default 0)",
    )  # fmt: skip


def _add_token_options(model: argparse._ArgumentGroup) -> None:
    """Options about tokens ahead, residual streams, and rows that are not one full sequence."""
    model.add_argument("--mtp", type=int, default=0, metavar="D", help="multi-token prediction depths (default 0)")
    model.add_argument("--mtp-repeat", action="store_true", help="all depths use one and the same layer")
    model.add_argument("--mhc", type=int, metavar="N", help="residual streams with hyper-connections (default: none)")
    model.add_argument("--pad", dest="padding", action="store_true", help="rows end in padding")
    model.add_argument("--packed", action="store_true", help="rows hold several sequences")


def read_options(args: argparse.Namespace) -> Options:
    """Check the shared options.

    Raises:
        ConfigError: Names field, value and rule.
    """
    model = ModelConfig(
        **{name: getattr(args, name) for name in ModelConfig.__dataclass_fields__ if name in vars(args)},
        max_seq=max(*args.seq, 1),
        capacity=capacity_of(args),
    )
    parallel = read_parallel(args)
    if parallel.route != ROUTES[0] and model.dense_layers == model.layers and not model.mtp:
        rule = "has no effect: no layer of the model has experts"
        raise ConfigError(field="route", value=parallel.route, rule=rule)
    seq = own_length(args.seq, parallel)
    if min(args.seq) < 1:
        raise ConfigError(field="seq", value=min(args.seq), rule="must be at least 1")
    for name in ("batch", "microbatches", "threads"):
        if getattr(args, name) < 1:
            raise ConfigError(field=name, value=getattr(args, name), rule="must be at least 1")
    check_second(args.lead, args.microbatches)
    if abs(args.seed) > MAX_SEED:
        raise ConfigError(field="seed", value=args.seed, rule=f"must lie within -{MAX_SEED} and {MAX_SEED}")
    if args.loopback_scale is not None and args.transport != "host_loopback":
        rule = "has no effect without --transport host_loopback"
        raise ConfigError(field="loopback_scale", value=args.loopback_scale, rule=rule)
    if args.program:
        _check_own_model(args)
    elif args.recompute_mtp and args.mtp == 0:
        raise ConfigError(field="recompute_mtp", value=True, rule="has no effect without --mtp: leave it out")
    return Options(
        model=model,
        recompute=read_recompute(args),
        order=_default_order(args) if args.order is None else args.order,
        delay_wgrad=args.delay_wgrad,
        lead=args.lead,
        seq=seq,
        batch=args.batch,
        microbatches=args.microbatches,
        seed=args.seed,
        program=args.program,
        threads=args.threads,
        device=args.device,
        transport=transport_of(args),
        loopback_scale=1.0 if args.loopback_scale is None else args.loopback_scale,
        backend=read_backend_options(args),
        json=args.json,
        parallel=parallel,
    )


def _default_order(args: argparse.Namespace) -> str:
    return "plain" if args.program else DEFAULT_ORDER


def _check_own_model(args: argparse.Namespace) -> None:
    """Refuse options of the built-in decoder beside --program."""
    for name in (*ModelConfig.__dataclass_fields__, "seq", "batch", "transport", "ep", "capacity_factor", "route"):
        if name in vars(args) and getattr(args, name) != args.default_of(name):
            raise ConfigError(field=name, value=getattr(args, name), rule=_OWN_MODEL_RULE)


def describe(options: Options) -> dict[str, object]:
    """The options as a flat JSON object."""
    model = {name: getattr(options.model, name) for name in ModelConfig.__dataclass_fields__}
    return {
        **{name: str(value) if isinstance(value, str) else value for name, value in model.items()},
        **describe_recompute(options.recompute),
        "order": options.order,
        "delay_wgrad": options.delay_wgrad,
        "lead": options.lead,
        "seq": options.seq,
        "batch": options.batch,
        "microbatches": options.microbatches,
        "seed": options.seed,
        "program": options.program,
        "threads": options.threads,
        "device": options.device,
        "transport": options.transport,
        "loopback_scale": options.loopback_scale,
        **describe_backend(options.backend),
        **describe_parallel(options.parallel),
    }
