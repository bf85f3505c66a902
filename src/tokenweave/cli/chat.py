"""tokenweave chat: a conversation on the terminal."""

import argparse
import sys

from tokenweave.cli import options
from tokenweave.cli.figures import StreamFigures
from tokenweave.engine.joined import world
from tokenweave.engine.llm import LLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", help="a system message to begin with")
    options.add_engine(parser)
    options.add_sampling(parser, max_tokens=512, temperature=0.7, top_p=0.95)


def run(args: argparse.Namespace) -> int:
    if world()[1] > 1:
        raise ValueError("chat takes its questions from one terminal and cannot run under torchrun; use generate")
    params = options.sampling_params(args)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    with LLM(args.model, **options.engine_options(args)) as llm:
        if not llm.tokenizer.has_chat_template:
            raise ValueError("the model has no chat template; use `tokenweave generate --raw`")
        if sys.stdin.isatty():
            print("An empty line or Ctrl-D ends the conversation; Ctrl-C stops an answer.", file=sys.stderr)
        while question := _ask():
            messages.append({"role": "user", "content": question})
            answer, figures = [], StreamFigures()
            try:
                for piece in figures.watch(llm.stream_chat(messages, params)):
                    answer.append(piece)
                    print(piece, end="", flush=True)
            except KeyboardInterrupt:
                print(" [stopped]", end="")
            print()
            print(figures.line(llm), file=sys.stderr)
            messages.append({"role": "assistant", "content": "".join(answer)})
    return 0


def _ask() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""
