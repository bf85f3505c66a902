"""tokenweave plan: latency and memory per rank, of a model and on hardware that need not be here."""

import argparse
import json
from pathlib import Path

from tokenweave.bench.dimensions import DIMENSIONS, model_directory
from tokenweave.cli import options
from tokenweave.config import hub
from tokenweave.config.foreign import model_config, read_config, read_json
from tokenweave.config.model import ModelConfig
from tokenweave.plan.analytical import DTYPE_BYTES
from tokenweave.plan.hardware import catalogue, hardware
from tokenweave.plan.plot import draw
from tokenweave.plan.report import Question, report
from tokenweave.plan.text import text

TOKENS = "1,64,512,1024,2048,4096,8192"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        help=f"a config.json, a directory with one, a hub id, or one of {', '.join(DIMENSIONS)}; reads no weights",
    )
    parser.add_argument("--hardware", choices=list(catalogue()), default="h100", help="GPU (default: h100)")
    parser.add_argument("--tp", type=int, default=8, help="tensor parallel size: GPUs (default: 8)")
    parser.add_argument("--tokens", default=TOKENS, help="tokens of the steps, with commas (default: %(default)s)")
    parser.add_argument("--context", type=int, default=0, help="tokens already in the cache (default: 0)")
    parser.add_argument("--kv-tokens", type=int, help="tokens the KV cache holds (default: the model's full context)")
    parser.add_argument("--dtype", choices=list(DTYPE_BYTES), default="bfloat16", help="(default: bfloat16)")
    parser.add_argument("--compare", choices=("pipeline",), help="put the same GPUs as pipeline stages beside it")
    parser.add_argument("--json", metavar="FILE", help="write every figure to this file")
    parser.add_argument("--plot", metavar="FILE", help="draw it to this .png or .svg file")


def run(args: argparse.Namespace) -> int:
    question = Question(
        config=_config(args.model),
        hardware=hardware(args.hardware),
        tensor_parallel_size=args.tp,
        tokens=options.numbers("--tokens", args.tokens),
        context=args.context,
        dtype=args.dtype,
        kv_tokens=args.kv_tokens,
    )
    found = report(question, compare_pipeline=args.compare == "pipeline")
    if args.plot:
        draw(question, found, args.plot)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(text(found))
    return 0


def _config(model: str) -> ModelConfig:
    if model in DIMENSIONS:
        return read_config(model_directory(model))
    path = Path(model).expanduser()
    if path.is_dir():
        return read_config(path)
    if path.is_file():
        try:
            return model_config(read_json(path))
        except ValueError as error:
            raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    if not hub.ID.fullmatch(model):
        raise ValueError(f"no such model: {model!r} does not exist; give a config.json, a directory or a hub id")
    return model_config(read_json(_from_hub(model)))


def _from_hub(name: str) -> Path:
    """The config.json of a hub model, and nothing else of it."""
    from huggingface_hub import hf_hub_download

    reason = hub.obstacle(name)
    try:
        path = hf_hub_download(name, "config.json", etag_timeout=hub.TIMEOUT, local_files_only=bool(reason))
    except Exception as error:  # of whichever HTTP client the installed version uses
        reason = reason or f"fetching it failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        raise ValueError(
            f"no such model: {name!r} is no config.json or directory here, none of {', '.join(DIMENSIONS)}, and not in "
            f"the hub's cache, and {reason}"
        ) from None
    return Path(path)
