"""Models by their dimensions alone as options of an engine: on ranks of their own, or on one GPU that stands in for one
rank of several."""

import argparse
from pathlib import Path
from typing import Any

from tokenweave.bench.dimensions import DIMENSIONS, model_directory
from tokenweave.bench.emulation import published_emulation
from tokenweave.comm.emulated import TRAFFIC
from tokenweave.engine.device import device_for

MODEL_HELP = (
    f"directory, .gguf file or hub id; default: the demo model. {', '.join(DIMENSIONS)}: random weights of its "
    "dimensions, on GPUs"
)
MODEL_LENGTH = 8192  # of a request, beside which there is room for many
CACHE = 12 << 30  # bytes of keys and values: 300 000 tokens of Llama-70B at tp 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--emulate-tp", type=int,
        help="one GPU as one rank of so many (8), on random weights; the model is one of those named",
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


def chosen_model(args: argparse.Namespace) -> tuple[str | Path | None, dict[str, Any]]:
    """The model of args, and what an engine has to be told of it: of a name of DIMENSIONS, random weights. The type is
    the caller's choice, but for an emulated rank's."""
    if args.emulate_tp:
        return emulated_rank(args)
    if args.model in DIMENSIONS:
        return model_directory(args.model), dict(device="cuda", weights="random")
    return args.model, {}


def beside_others(options: dict[str, Any]) -> dict[str, Any]:
    """Options of chosen_model for one of several engines of random weights that live on the same GPUs at once."""
    return options | dict(max_model_len=MODEL_LENGTH, kv_cache_memory=CACHE) if options else options


def plainly(mode: str, size: int) -> dict[str, Any]:
    """serial and reordered on GPUs go by NCCL, as in other engines, and not by this package's own kernels."""
    plain = mode in ("serial", "reordered") and size > 1 and device_for("auto", size, "auto") == "cuda"
    return {"collective": "distributed"} if plain else {}


def label(args: argparse.Namespace) -> str:
    """What stands below every figure of such a rank."""
    return (
        f"emulated: one GPU as rank 0 of {args.emulate_tp}, random weights, {args.traffic} traffic, communication held "
        "back to published times"
    )
