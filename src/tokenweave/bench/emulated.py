"""One GPU that stands in for one rank of several, as options of an engine."""

import argparse
from pathlib import Path
from typing import Any

from tokenweave.bench.dimensions import DIMENSIONS, model_directory
from tokenweave.bench.emulation import published_emulation
from tokenweave.comm.emulated import TRAFFIC
from tokenweave.engine.config import EngineConfig

MODEL_LENGTH = 8192  # of a request, beside which there is room for many
CACHE = 12 << 30  # bytes of keys and values: 300 000 tokens of Llama-70B at tp 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--emulate-tp", type=int,
        help=f"one GPU as one rank of so many (8), on random weights; the model is one of {', '.join(DIMENSIONS)}",
    )  # fmt: skip
    parser.add_argument("--traffic", choices=TRAFFIC, default="multicast", help="of --emulate-tp (default: multicast)")


def emulated_rank(args: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """The directory of args.model, and options for LLM or EngineConfig. Raises ValueError for an unknown model."""
    name = args.model or "Llama-3.3-70B"
    directory = model_directory(name)
    emulation = published_emulation(
        size=args.emulate_tp, hidden_size=DIMENSIONS[name]["hidden_size"], traffic=args.traffic
    )
    return directory, dict(
        tensor_parallel_size=args.emulate_tp, device="cuda", dtype="bfloat16", collective="emulated",
        emulation=emulation, weights="random",
    )  # fmt: skip


def label(args: argparse.Namespace) -> str:
    """What stands below every figure of such a rank."""
    return (
        f"emulated: one GPU as rank 0 of {args.emulate_tp}, random weights, {args.traffic} traffic, communication held "
        "back to published times"
    )


def emulated_config(args: argparse.Namespace, **more: Any) -> tuple[Path, EngineConfig]:
    directory, options = emulated_rank(args)
    return directory, EngineConfig(**options | more)
