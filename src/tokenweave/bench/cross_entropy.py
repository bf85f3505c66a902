"""tokenweave bench cross-entropy: one rank's cross entropy over its slice of the vocabulary, beside torch's over the
gathered logits; and head and loss together, by chunks of tokens.

One process stands in for one rank of --ranks: what the others would send are copies of its own four numbers a token, so
losses are not those of a model, but every pass and copy of one rank is there, except the way over the link. Times are
of forward and backward, medians of calls that take turns, a copy of the logits included for ours, whose gradient is
written over them. The peak is what torch's allocator held at most, inputs included; it knows it on CUDA only.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.nn import functional as F

from tokenweave.bench import output
from tokenweave.comm import Collective
from tokenweave.config import partition
from tokenweave.layers.cross_entropy import Vocabulary, vocab_parallel_cross_entropy
from tokenweave.layers.head_loss import head_loss

WARM = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--tokens", type=int, default=8192, help="(default: 8192)")
    parser.add_argument("--vocabulary", type=int, default=128256, help="of all ranks (default: 128256)")
    parser.add_argument("--ranks", type=int, default=8, help="one of which is measured (default: 8)")
    parser.add_argument("--hidden", type=int, default=4096, help="of the head (default: 4096)")
    parser.add_argument(
        "--chunks",
        type=int,
        nargs="+",
        default=[1024, 2048, 8192],
        help="tokens of the head at once (default: 1024 2048 8192)",
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--repeats", type=int, default=31, help="timed calls of each, at least 31 (default: 31)")
    output.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.repeats < 31:
        raise ValueError(f"--repeats must be at least 31, got {args.repeats}")
    if min(args.tokens, args.ranks, args.hidden, *args.chunks) < 1 or args.vocabulary < args.ranks:
        raise ValueError("--tokens, --ranks, --hidden and --chunks must be at least 1, --vocabulary at least --ranks")
    if args.plot:
        output.check_plot(args.plot)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch sees no CUDA device; --device cpu measures the CPU path")
    rows = measure(args)
    print(output.table(list(rows[0]), [[_shown(value) for value in row.values()] for row in rows]))
    where = torch.cuda.get_device_name() if args.device == "cuda" else output.machine()["processor"]
    print(
        f"{where}, torch {torch.__version__}; [{args.tokens}, {args.vocabulary}] {args.dtype}, rank 0 of {args.ranks}"
    )
    if args.json:
        output.write_json(args.json, rows, where=where)
    if args.plot:
        _plot(args.plot, rows)
    return 0


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each way: milliseconds, peak in MiB (None on the CPU), both as shares of torch's."""
    own = partition(args.vocabulary, args.ranks, 0)
    width, dtype, device = own.stop - own.start, getattr(torch, args.dtype), torch.device(args.device)
    torch.manual_seed(0)
    targets = torch.randint(args.vocabulary, (args.tokens,), device=device)

    def vocabulary(chunk: int) -> Vocabulary:
        others = cast(Collective, _Others(args.ranks))
        return Vocabulary(args.vocabulary, own, args.ranks, others, min(chunk, args.tokens))

    def drawn(rows: int, columns: int, deviation: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, columns, device=device) * deviation).to(dtype)

    def ours() -> Callable[[], object]:
        logits, whole = drawn(args.tokens, width), vocabulary(args.tokens)

        def step() -> None:
            own_copy = logits.clone().requires_grad_()
            vocab_parallel_cross_entropy(own_copy, targets, whole, reduction="mean").backward()

        return step

    def torchs() -> Callable[[], object]:
        logits = drawn(args.tokens, args.vocabulary).requires_grad_()

        def step() -> None:
            logits.grad = None
            F.cross_entropy(logits, targets).backward()

        return step

    def head(chunk: int) -> Callable[[], object]:
        rows, weight = (
            drawn(args.tokens, args.hidden).requires_grad_(),
            drawn(width, args.hidden, 0.02).requires_grad_(),
        )
        pieces = vocabulary(chunk)

        def step() -> None:
            rows.grad = weight.grad = None
            head_loss(rows, weight, targets, pieces).backward()

        return step

    ways = {"ours": ours, "torch, gathered logits": torchs}
    heads = {f"head and loss, chunks of {chunk}": lambda c=chunk: head(c) for chunk in args.chunks}
    every = ways | heads
    peaks = {name: peak(make) for name, make in every.items()} if device.type == "cuda" else {}
    seconds = in_turns({name: make() for name, make in ways.items()}, args.repeats, device)
    seconds |= in_turns({name: make() for name, make in heads.items()}, args.repeats, device)
    theirs = "torch, gathered logits"
    rows: list[dict[str, Any]] = []
    for name, taken in seconds.items():
        alike = name in ways  # what head and loss do, torch's loss alone does not
        rows.append({
            "forward and backward": name,
            "ms": 1e3 * taken,
            "÷ torch's": taken / seconds[theirs] if alike else None,
            "peak MiB": peaks[name] / 2**20 if peaks else None,
            "of torch's": peaks[name] / peaks[theirs] if peaks and alike else None,
        })  # fmt: skip
    return rows


class _Others:
    """The all-gather of ranks that all came with the same rows."""

    def __init__(self, size: int) -> None:
        self._size = size

    def all_gather(self, rows: torch.Tensor, tokens: int) -> torch.Tensor:
        assert tokens == len(rows) * self._size
        return rows.repeat(self._size, 1)


def peak(make: Callable[[], Callable[[], object]]) -> int:
    """Bytes of a call, its inputs included, after one that takes what libraries take once."""
    step = make()
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()


def in_turns(steps: dict[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, float]:
    """Median seconds of each."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(WARM + repeats):
        for name, step in steps.items():
            _wait(device)
            start = time.perf_counter()
            step()
            _wait(device)
            if turn >= WARM:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tokenweave.bench.cross_entropy", description=__doc__)
    add_arguments(parser)
    sys.exit(run(parser.parse_args()))


def _plot(path: str, rows: list[dict[str, Any]]) -> None:
    fig, axes = output.figure()
    axes.barh([row["forward and backward"] for row in rows], [row["ms"] for row in rows])
    axes.invert_yaxis()
    axes.set(xlabel="ms, forward and backward")
    fig.savefig(path)
