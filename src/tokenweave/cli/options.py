"""Options that several commands share. Their defaults are those of the dataclasses they fill."""

import argparse
from typing import Any

from tokenweave.engine.config import COLLECTIVES, DEVICES, DTYPES, EngineConfig
from tokenweave.engine.params import SamplingParams
from tokenweave.plan import MODES

_ANSWERING = tuple(mode for mode in MODES if mode != "nocomm")  # which gives wrong answers, and is for benchmarks
_ENGINE: dict[str, dict[str, Any]] = {
    "--mode": dict(choices=("auto", *_ANSWERING), help="what happens between two blocks"),
    "--dtype": dict(choices=DTYPES, help="type of weights and activations"),
    "--device": dict(choices=DEVICES, help="where the ranks compute"),
    "--collective": dict(choices=COLLECTIVES, help="how the ranks reach each other"),
    "--max-tokens-per-step": dict(type=int, help="longer prompts are computed in chunks of this many tokens"),
    "--max-running-requests": dict(type=int, help="requests computed at once"),
    "--kv-cache-memory": dict(type=int, help="bytes of keys and values per rank; default: from free memory"),
}
_SAMPLING: dict[str, dict[str, Any]] = {
    "--max-tokens": dict(type=int, help="at most this many new tokens"),
    "--temperature": dict(type=float, help="0 takes the most likely token"),
    "--top-p": dict(type=float, help="the smallest set of likely tokens with this probability"),
    "--top-k": dict(type=int, help="the k most likely tokens; 0 for all"),
    "--seed": dict(type=int, help="the same seed gives the same answer"),
    "--stop": dict(action="append", help="a string that ends the answer; may be given several times"),
    "--ignore-eos": dict(action="store_true", help="go on past the model's end-of-text token"),
}


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        help="a Hugging Face directory, a .gguf file or a hub id; default: the demo model (SmolLM2-135M-Instruct)",
    )
    parser.add_argument(
        "--tp", type=int, default=EngineConfig.tensor_parallel_size, help="tensor parallel size: ranks (default: 1)"
    )


def add_engine(parser: argparse.ArgumentParser) -> None:
    """--model, --tp and the rest of EngineConfig."""
    add_model(parser)
    _add(parser, _ENGINE, EngineConfig())


def add_sampling(parser: argparse.ArgumentParser, **changed: Any) -> None:
    """The fields of SamplingParams; `changed` replaces defaults that do not suit a command."""
    _add(parser, _SAMPLING, SamplingParams(**changed))


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for LLM(args.model, ...)."""
    return {"tensor_parallel_size": args.tp} | _values(args, _ENGINE)


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    values = _values(args, _SAMPLING)
    return SamplingParams(**values | {"stop": tuple(values["stop"] or ())})


def numbers(option: str, words: str) -> tuple[int, ...]:
    """The whole numbers, below 2**31, of an option that takes several with commas. Raises ValueError for others."""
    try:
        found = tuple(int(word) for word in words.split(","))
    except ValueError:
        raise ValueError(f"{option} takes whole numbers with commas between them, got {words!r}") from None
    if max(found) >= 2**31:
        raise ValueError(f"{option} takes numbers below 2**31, got {max(found)}")
    return found


def _add(parser: argparse.ArgumentParser, options: dict[str, dict[str, Any]], defaults: Any) -> None:
    for flag, settings in options.items():
        default = getattr(defaults, _field(flag))
        if settings.get("action") == "append":
            default = list(default) or None
        shown = "" if default is None or default is False else f" (default: {default})"
        parser.add_argument(flag, default=default, **settings | {"help": settings["help"] + shown})


def _values(args: argparse.Namespace, options: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {_field(flag): getattr(args, _field(flag)) for flag in options}


def _field(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
