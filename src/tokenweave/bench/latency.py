"""tokenweave bench latency: decode and prefill of one request, tensor-parallel sizes and transformers side by side.

All competitors are alive at once and take turns, round by round, so that what else the machine does falls on all alike.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from tokenweave.bench import emulated, emulated_latency, output
from tokenweave.bench.dimensions import DIMENSIONS
from tokenweave.bench.memory import read_bandwidth
from tokenweave.engine.llm import LLM
from tokenweave.engine.params import SamplingParams
from tokenweave.models.resolve import resolve

Measure = Callable[
    [list[int], int], tuple[float, float]
]  # (prompt, new tokens) -> seconds to first token, per later one

PROMPT = 16  # tokens, after which is decoded


@dataclass
class Competitor:
    """One way to run the model. prefill, decode: seconds of every round, to the first token and per later token."""

    name: str
    dtype: str
    measure: Measure
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help=emulated.MODEL_HELP)
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2], help="tensor parallel sizes (default: 1 2)")
    parser.add_argument(
        "--dtype", nargs="+", help="(default: float32 bfloat16; bfloat16 where the weights are random)"
    )  # fmt: skip
    parser.add_argument("--mode", nargs="+", default=["auto"], help="modes, side by side (default: auto)")
    parser.add_argument("--prefill", type=int, default=512, help="prompt tokens of the prefill (default: 512)")
    parser.add_argument("--decode", type=int, default=64, help="tokens decoded after a short prompt (default: 64)")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds; medians are shown (default: 9)")
    parser.add_argument("--transformers", action="store_true", help="beside transformers on as many threads as cores")
    emulated.add_arguments(parser)
    output.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.emulate_tp:
        return emulated_latency.run(args)
    if args.rounds < 1 or args.prefill < 1 or args.decode < 2:
        raise ValueError("--rounds and --prefill must be at least 1, --decode at least 2")
    if args.transformers and args.model in DIMENSIONS:
        raise ValueError(f"--transformers needs a model with weights; of {args.model} there are the dimensions alone")
    if args.plot:
        output.check_plot(args.plot)
    rows, memory = [], [read_bandwidth()]
    for dtype in _dtypes(args):
        with ExitStack() as stack:
            rows += _rows(_measured(_competitors(args, dtype, stack), args), args)
    print(output.table(list(rows[0]), [[_shown(value) for value in row.values()] for row in rows]))
    print(f"medians of {args.rounds} interleaved rounds; decode after {PROMPT} tokens, prefill of {args.prefill}")
    memory.append(read_bandwidth())
    for when, (cores, alone, together) in zip(("before", "after"), memory, strict=True):
        print(f"memory {when}: a core alone reads {alone:.0f} GB/s, each of {cores} at once {together:.0f}")
    if args.json:
        output.write_json(args.json, rows)
    if args.plot:
        _plot(args.plot, rows)
    return 0


def _dtypes(args: argparse.Namespace) -> list[str]:
    return args.dtype or (["bfloat16"] if args.model in DIMENSIONS else ["float32", "bfloat16"])


def _competitors(args: argparse.Namespace, dtype: str, stack: ExitStack) -> list[Competitor]:
    cores = len(os.sched_getaffinity(0))
    model, model_options = emulated.chosen_model(args)
    competitors = []
    for size in args.tp:
        for mode in args.mode:
            options = emulated.beside_others(model_options) | emulated.plainly(mode, size)
            llm = stack.enter_context(
                LLM(
                    model,
                    tensor_parallel_size=size,
                    mode=mode,
                    dtype=dtype,
                    threads=1,
                    enable_prefix_caching=False,
                    **options,
                )
            )
            name = f"tp {size}" + (f" {mode}" if len(args.mode) > 1 else "")
            competitors.append(Competitor(name, dtype, _tokenweave(llm)))
    if args.transformers:
        name = f"transformers, {cores} threads"
        competitors.append(Competitor(name, dtype, _transformers(resolve(args.model, dtype), dtype, cores)))
    return competitors


def _tokenweave(llm: LLM) -> Measure:
    def measure(prompt: list[int], new: int) -> tuple[float, float]:
        if len(prompt) + new > llm.context:
            raise ValueError(f"{len(prompt)} tokens and {new} more are more than the context, {llm.context}")
        params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        times = llm.generate(prompt, params, progress=False)[0].timing.token_times
        return times[0], (times[-1] - times[0]) / max(new - 1, 1)

    return measure


def _transformers(directory: Path, dtype: str, threads: int) -> Measure:
    """transformers' model in a bare loop over its own cache: no generate() overhead counts against it."""
    try:
        import transformers
    except ImportError:
        raise ValueError("--transformers needs transformers: pip install transformers") from None
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def measure(prompt: list[int], new: int) -> tuple[float, float]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        start = time.perf_counter()
        cache = transformers.DynamicCache()
        result = model(torch.tensor([prompt]), past_key_values=cache, logits_to_keep=1)
        token = result.logits[:, -1].argmax(-1, keepdim=True)
        first = time.perf_counter()
        for _ in range(new - 1):
            token = model(token, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
        end = time.perf_counter()
        torch.set_num_threads(before)
        return first - start, (end - first) / max(new - 1, 1)

    return measure


def _measured(competitors: list[Competitor], args: argparse.Namespace) -> list[Competitor]:
    long = [(7 * i + 13) % 400 + 5 for i in range(args.prefill)]
    with tqdm(total=(args.rounds + 1) * len(competitors), desc=competitors[0].dtype, disable=None, leave=False) as bar:
        for round_ in range(args.rounds + 1):
            for competitor in competitors:
                prefill, _ = competitor.measure(long, 1)
                _, decode = competitor.measure(long[:PROMPT], args.decode)
                bar.update()
                if round_:  # the first round warms up
                    competitor.prefill.append(prefill)
                    competitor.decode.append(decode)
    return competitors


def _rows(competitors: list[Competitor], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Ratios are of medians: above 1, this competitor is faster than the first, and than transformers."""
    first = competitors[0]
    theirs = next((c for c in competitors if c.name.startswith("transformers")), None)
    rows = []
    for c in competitors:
        decode, prefill = statistics.median(c.decode), statistics.median(c.prefill)
        row = {"": c.name, "dtype": c.dtype, "decode tokens/s": 1 / decode, "prefill ms": 1000 * prefill}
        for label, other in ((f"÷ {first.name}", first), ("÷ transformers", theirs)):
            if other is not None:
                row[f"decode {label}"] = statistics.median(other.decode) / decode
                row[f"prefill {label}"] = statistics.median(other.prefill) / prefill
        rows.append(row)
    return rows


def _shown(value: object) -> str:
    return value if isinstance(value, str) else f"{value:.2f}" if value < 100 else f"{value:.1f}"  # type: ignore[operator]


def _plot(path: str, rows: list[dict[str, Any]]) -> None:
    fig, axes = output.figure()
    axes.remove()
    for index, label in enumerate(("decode tokens/s", "prefill ms")):
        part = fig.add_subplot(1, 2, index + 1)
        part.barh([f"{row['']} {row['dtype']}" for row in rows][::-1], [row[label] for row in rows][::-1])
        part.set_xlabel(label)
    fig.savefig(path)
