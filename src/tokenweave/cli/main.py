"""The `tokenweave` command: finds the subcommand, and turns errors into one line and an exit code."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

# name: (module with add_arguments(parser) and run(args) -> exit code, what it does). A module is imported only when
# its command is chosen: torch alone costs a second.
COMMANDS = {
    "generate": ("tokenweave.cli.generate", "answer one prompt, streaming"),
    "chat": ("tokenweave.cli.chat", "hold a conversation"),
    "plan": ("tokenweave.cli.plan", "predict latency and memory per rank; needs no hardware"),
    "tune": ("tokenweave.cli.tune", "measure this machine for a model; every step is then planned from that"),
    "trace": ("tokenweave.cli.trace", "record steps of CPU ranks: a Chrome trace and a picture of lanes over time"),
    "train": ("tokenweave.cli.train", "train a model on text files, from scratch or further"),
    "convert": ("tokenweave.cli.convert", "write a model as a directory that transformers loads"),
    "doctor": ("tokenweave.cli.doctor", "which collective this machine gets, and why not a better one"),
    "bench comm": ("tokenweave.bench.comm", "the collectives: serial, reordered and fused side by side"),
    "bench throughput": ("tokenweave.bench.throughput", "tokens per second of many requests, modes side by side"),
    "bench network": ("tokenweave.bench.network", "prefill over a slow link between two network namespaces"),
    "bench step": ("tokenweave.bench.step", "one step, modes taking turns: the ratio of each pair and its bound"),
    "bench layer": ("tokenweave.bench.layer", "a layer of a large model on one GPU that stands in for one rank"),
    "bench kernel": ("tokenweave.bench.kernel", "the fused kernel alone on one GPU, beside a copy"),
    "bench load": ("tokenweave.bench.load", "reading a checkpoint into the ranks, beside reading as many bytes"),
    "bench cross-entropy": ("tokenweave.bench.cross_entropy", "one rank's cross entropy and head, beside torch's"),
    "bench latency": ("tokenweave.bench.latency", "decode and prefill, beside transformers"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command: 0 on success, 2 on wrong usage or unusable input, 1 on a failure while running."""
    _open_standard_streams()
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter complains when it flushes at its end
        return 1


def _open_standard_streams() -> None:
    """Those that the shell has closed (`<&-`) go nowhere: what is opened later must not take their places."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))


def _run(words: list[str]) -> int:
    name = next((n for n in (" ".join(words[:2]), " ".join(words[:1])) if n in COMMANDS), None)
    if name is None:
        return _usage(words)
    module_name, about = COMMANDS[name]
    parser = argparse.ArgumentParser(prog=f"tokenweave {name}", description=about)
    try:
        command = importlib.import_module(module_name)
        command.add_arguments(parser)
        args = parser.parse_args(words[len(name.split()) :])
        _check_files(args)
        return int(command.run(args))
    except (ValueError, FileNotFoundError) as error:
        return _fail(error, 2)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        raise
    except (RuntimeError, OSError) as error:
        return _fail(error, 1)


def _check_files(args: argparse.Namespace) -> None:
    """Raise ValueError for files that cannot be made: before the work, not after it."""
    for option in ("json", "plot", "trace"):
        path = Path(getattr(args, option, None) or os.devnull)
        if path.is_dir():
            raise ValueError(f"--{option} takes a file, and {path} is a directory")
        if not path.absolute().parent.is_dir():
            raise ValueError(f"--{option} {path}: there is no directory {path.parent}")


def _fail(error: Exception, code: int) -> int:
    # in one piece: torchrun's ranks write to the same place
    sys.stderr.write(f"tokenweave: error: {' '.join(str(error).split())}\n")
    return code


def _usage(words: Sequence[str]) -> int:
    if words == ["--version"]:
        print(f"tokenweave {version('tokenweave')}")
        return 0
    group = "bench" if words[:1] == ["bench"] else ""
    asked = bool(words) and [word for word in words if word not in ("-h", "--help")] in ([], ["bench"])
    if words and not asked:
        print(
            f"tokenweave: error: no command {' '.join(words[:2])!r}; there are: {', '.join(COMMANDS)}", file=sys.stderr
        )
        return 2
    lines = [f"usage: tokenweave {' '.join(filter(None, (group, 'COMMAND')))} [options]", ""]
    lines += ["commands (each takes --help):"]
    lines += [f"  {name:<22}{about}" for name, (_, about) in COMMANDS.items() if name.startswith(group)]
    print("\n".join(lines), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
