"""tokenweave convert: a model in any form as a directory that transformers and others load."""

import argparse
from pathlib import Path

from tokenweave.engine.config import DTYPES
from tokenweave.models.convert import convert


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a Hugging Face directory, a .gguf file or a hub id")
    parser.add_argument("directory", help="where to write; must not exist")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="type of the weights (default: the model's)")


def run(args: argparse.Namespace) -> int:
    target = Path(args.directory).expanduser()
    convert(args.model, target, args.dtype)
    size = sum(path.stat().st_size for path in target.iterdir())
    print(f"{target}: {size / 1e9:.3g} GB")
    return 0
