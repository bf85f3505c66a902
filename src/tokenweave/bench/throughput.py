"""tokenweave bench throughput: many requests at once or at a rate, modes side by side.

Prompts are random token ids; every answer has exactly the tokens its workload says. "host ms" is the median of what a
step takes beside the ranks' work: scheduling, sampling and bookkeeping.
"""

import argparse
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tqdm import tqdm

from tokenweave.bench import emulated, output
from tokenweave.engine.completion import Completion
from tokenweave.engine.llm import LLM
from tokenweave.engine.params import SamplingParams

WORKLOADS = ("512,128", "1024,128", "2048,128", "sharegpt")
# Mean tokens of a ShareGPT prompt and answer as the vLLM paper gives them (arXiv 2309.06180, figure 11).
SHAREGPT_MEANS, SHAREGPT_SIGMA, SHAREGPT_RANGE = (161, 338), 1.0, (4, 1024)


@dataclass
class Run:
    """One mode under one workload: seconds of each round, and every request's timing."""

    mode: str
    llm: LLM
    seconds: list[float] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help=emulated.MODEL_HELP)
    parser.add_argument("--tp", type=int, default=2, help="tensor parallel size (default: 2)")
    parser.add_argument("--dtype", default="auto", help="(default: the checkpoint's)")
    parser.add_argument(
        "--mode", nargs="+", default=["serial", "fused"], help="modes, side by side (default: serial fused)"
    )
    parser.add_argument(
        "--workload", nargs="+", default=list(WORKLOADS),
        help="INPUT,OUTPUT tokens, or sharegpt: lengths log-normal with the means of ShareGPT (161 in, 338 out), "
        "sigma 1, cut to 4-1024; default: all four",
    )  # fmt: skip
    parser.add_argument("--requests", type=int, default=16, help="requests of a workload (default: 16)")
    parser.add_argument("--rate", type=float, help="requests per second, Poisson; default: all at once")
    parser.add_argument("--chunk", type=int, default=2048, help="most tokens in a step (default: 2048)")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, lengths and arrivals (default: 0)")
    emulated.add_arguments(parser)
    output.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.requests < 1 or args.rounds < 1 or (args.rate is not None and not args.rate > 0):
        raise ValueError("--requests and --rounds must be at least 1, and --rate more than 0")
    if args.seed < 0:
        raise ValueError(f"--seed must not be negative, got {args.seed}")
    if args.plot:
        output.check_plot(args.plot)
    lengths = {name: workload(name, args.requests, args.seed) for name in args.workload}
    rows = []
    with ExitStack() as stack:
        runs = [Run(mode, stack.enter_context(_open(args, mode))) for mode in args.mode]
        with tqdm(total=len(lengths) * args.rounds * len(runs), unit="run", disable=None, leave=False) as bar:
            for name, pairs in lengths.items():
                rows += _measure(runs, name, pairs, args, bar)
        source = runs[-1].llm.plan_source
    print(output.table(list(rows[0]), [[_shown(value) for value in row.values()] for row in rows]))
    how = "all at once" if args.rate is None else f"{args.rate} a second"
    if args.emulate_tp:
        print(emulated.label(args))
    print(f"{args.requests} requests, {how}, at most {args.chunk} tokens a step; {args.rounds} interleaved rounds")
    print(f"plans: {source}")
    if args.json:
        output.write_json(args.json, rows)
    if args.plot:
        _plot(args.plot, rows)
    return 0


def workload(name: str, requests: int, seed: int) -> list[tuple[int, int]]:
    """(prompt tokens, answer tokens) of each request. Raises ValueError for a name that is neither form."""
    if name == "sharegpt":
        draw = np.random.default_rng(seed)
        columns = []
        for mean in SHAREGPT_MEANS:
            mu = np.log(mean) - SHAREGPT_SIGMA**2 / 2  # the mean of a log-normal is exp(mu + sigma²/2)
            columns.append(draw.lognormal(mu, SHAREGPT_SIGMA, requests).round().clip(*SHAREGPT_RANGE).astype(int))
        return list(zip(*(column.tolist() for column in columns), strict=True))
    parts = name.split(",")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(f"a workload is INPUT,OUTPUT in tokens or sharegpt, got {name!r}")
    return [(int(parts[0]), int(parts[1]))] * requests


def _open(args: argparse.Namespace, mode: str) -> LLM:
    options = dict(mode=mode, max_tokens_per_step=args.chunk, enable_prefix_caching=False)
    model, model_options = emulated.chosen_model(args)
    engine = dict(tensor_parallel_size=args.tp, dtype=args.dtype) | emulated.beside_others(model_options)
    if not args.emulate_tp:
        engine |= emulated.plainly(mode, args.tp)
    return LLM(model, **engine, **options)


def _measure(
    runs: list[Run], name: str, pairs: list[tuple[int, int]], args: argparse.Namespace, bar: Any
) -> list[dict[str, Any]]:
    draw = np.random.default_rng(args.seed)
    vocabulary = min(run.llm.model_config.vocab_size for run in runs)
    prompts = [draw.integers(0, vocabulary, size=given).tolist() for given, _ in pairs]
    params = [SamplingParams(max_tokens=asked, temperature=0.0, ignore_eos=True) for _, asked in pairs]
    arrivals = None if args.rate is None else np.cumsum(draw.exponential(1 / args.rate, len(pairs))).tolist()
    for run in runs:
        run.seconds, run.completions = [], []
        # warms up; on a GPU steps of every size are captured in a whole round
        some = slice(None) if run.llm.config.device == "cuda" else slice(1)
        run.llm.generate(prompts[some], params[some], progress=False)
    for _ in range(args.rounds):
        for run in runs:
            bar.set_description(f"{name} {run.mode}")
            began = time.perf_counter()
            run.completions += run.llm.generate(prompts, params, progress=False, arrivals=arrivals)
            run.seconds.append(time.perf_counter() - began)
            bar.update()
    tokens, new = sum(map(sum, pairs)), sum(asked for _, asked in pairs)
    return [_row(name, run, tokens, new, runs[0]) for run in runs]


def _row(name: str, run: Run, tokens: int, new: int, first: Run) -> dict[str, Any]:
    seconds = float(np.median(run.seconds))
    firsts = [1000 * (c.timing.time_to_first_token or 0.0) for c in run.completions]
    gaps = [1000 * gap for c in run.completions for gap in c.timing.inter_token_latencies] or [0.0]
    return {
        "workload": name,
        "mode": run.mode,
        "tokens/s": tokens / seconds,
        "new tokens/s": new / seconds,
        "TTFT p50 ms": float(np.percentile(firsts, 50)),
        "TTFT p99 ms": float(np.percentile(firsts, 99)),
        "ITL p50 ms": float(np.percentile(gaps, 50)),
        "ITL p99 ms": float(np.percentile(gaps, 99)),
        "host ms": 1000 * float(np.median([step.host for step in run.llm.stats()])),
        f"÷ {first.mode}": float(np.median(first.seconds)) / seconds,
    }


def _shown(value: object) -> str:
    return value if isinstance(value, str) else f"{value:.2f}" if value < 100 else f"{value:.0f}"  # type: ignore[operator]


def _plot(path: str, rows: list[dict[str, Any]]) -> None:
    fig, axes = output.figure()
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    names = list(dict.fromkeys(row["workload"] for row in rows))
    width = 0.8 / len(modes)
    for index, mode in enumerate(modes):
        values = [row["tokens/s"] for row in rows if row["mode"] == mode]
        axes.bar([i + index * width for i in range(len(names))], values, width, label=mode)
    axes.set_xticks([i + width * (len(modes) - 1) / 2 for i in range(len(names))], names)
    axes.set_xlabel("workload: input, output tokens")
    axes.set_ylabel("tokens/s")
    axes.legend()
    fig.savefig(path)
