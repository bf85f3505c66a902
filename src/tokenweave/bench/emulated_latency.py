"""bench latency --emulate-tp: prefill of whole prompts of many lengths, modes side by side, beside published ratios.

A prompt is one step of all layers, from the request to its first token, host and sampling included.
"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np

from tokenweave.bench import emulated, output
from tokenweave.engine.llm import LLM
from tokenweave.engine.params import SamplingParams
from tokenweave.plan.published import figures

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
WARM = 3  # prompts of a length: as it is, captured, replayed


def run(args: argparse.Namespace) -> int:
    if args.rounds < 1:
        raise ValueError(f"--rounds must be at least 1, got {args.rounds}")
    modes = ["serial", *[mode for mode in args.mode if mode != "serial"]]
    with ExitStack() as stack:
        llms = _open(args, modes, stack)
        rows = [_row(args, llms, tokens) for tokens in LENGTHS]
        source = llms[modes[-1]].plan_source
    print(output.table(list(rows[0]), [[_shown(value) for value in row.values()] for row in rows]))
    print(f"{emulated.label(args)}; prefill to the first token, medians of {args.rounds} interleaved rounds")
    print(f"plans: {source}")
    if args.json:
        output.write_json(args.json, rows)
    return 0


def _open(args: argparse.Namespace, modes: list[str], stack: ExitStack) -> dict[str, LLM]:
    directory, rank = emulated.emulated_rank(args)
    most = max(LENGTHS)

    def one(mode: str) -> LLM:
        return LLM(
            directory, **rank, mode=mode, max_tokens_per_step=most, max_model_len=most + 256,
            enable_prefix_caching=False, kv_cache_memory=4 << 30,
        )  # fmt: skip

    with ThreadPoolExecutor() as pool:  # each takes 20 s to start
        return {mode: stack.enter_context(llm) for mode, llm in zip(modes, pool.map(one, modes), strict=True)}


def _row(args: argparse.Namespace, llms: dict[str, LLM], tokens: int) -> dict[str, Any]:
    prompt = [(7919 * i + 13) % 30000 + 5 for i in range(tokens)]
    seconds: dict[str, list[float]] = {mode: [] for mode in llms}
    for round_ in range(WARM + args.rounds):
        for mode, llm in llms.items():
            began = time.perf_counter()
            llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), progress=False)
            if round_ >= WARM:
                seconds[mode].append(time.perf_counter() - began)
    row: dict[str, Any] = {"tokens": tokens}
    row |= {f"{mode} ms": 1e3 * float(np.median(taken)) for mode, taken in seconds.items()}
    for mode, llm in llms.items():
        if mode != "serial":
            row[f"serial / {mode}"] = float(np.median(np.array(seconds["serial"]) / np.array(seconds[mode])))
            plan = llm.stats()[-1]
            row[f"{mode} plan"] = f"{plan.mode} {plan.cut} on {plan.budget}"
    published = {
        system: found.get(tokens) for (model, size, system), found in figures().items()
        if model.startswith(str(args.model or "Llama-3.3-70B")) and size == args.emulate_tp
    }  # fmt: skip
    serial, woven = published.get("serial_multimem"), published.get("tokenweave")
    row["published"] = serial / woven if serial and woven else float("nan")
    return row


def _shown(value: object) -> str:
    return (
        f"{value:.3f}"
        if isinstance(value, float) and value < 10
        else f"{value:.1f}"
        if isinstance(value, float)
        else str(value)
    )
