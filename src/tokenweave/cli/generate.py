"""tokenweave generate: one prompt, answered as it is produced."""

import argparse
import sys

from tokenweave.cli import options
from tokenweave.cli.figures import StreamFigures
from tokenweave.engine.joined import world
from tokenweave.engine.llm import LLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="the question; - reads it from standard input")
    parser.add_argument("--raw", action="store_true", help="continue the text as it stands, without the chat template")
    options.add_engine(parser)
    options.add_sampling(parser, max_tokens=256, temperature=0.0)


def run(args: argparse.Namespace) -> int:
    params = options.sampling_params(args)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt.strip():  # a chat template would make a question of it
        raise ValueError("the prompt is empty; give some text")
    with LLM(args.model, **options.engine_options(args)) as llm:
        figures = StreamFigures()
        if args.raw or not llm.tokenizer.has_chat_template:
            pieces = llm.stream(prompt, params)
        else:
            pieces = llm.stream_chat([{"role": "user", "content": prompt}], params)
        shown = world()[0] == 0  # under torchrun every rank has the answer
        for piece in figures.watch(pieces):
            if shown:
                print(piece, end="", flush=True)
        if shown:
            print()
            print(figures.line(llm), file=sys.stderr)
    return 0
