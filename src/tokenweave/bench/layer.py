"""tokenweave bench layer: one layer of a large model on one GPU that stands in for one rank of several.

The rank's own weights, drawn at random, and its real matmuls and attention; its communication with the real number of
thread blocks, held back to published times (`bench.emulation`). Every mode is a CUDA graph, and the graphs take turns.
A layer's time is the difference between a step of more layers and one of fewer, over the difference: a layer within a
model. Every figure is emulated.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tokenweave.bench import output
from tokenweave.bench.dimensions import DIMENSIONS, model_directory
from tokenweave.bench.paired import LEAST_ROUNDS, upper_bound
from tokenweave.plan.nearest import nearest_plan
from tokenweave.plan.scan import Scan, Scanned
from tokenweave.plan.shape import StepShape
from tokenweave.plan.step import StepPlan
from tokenweave.plan.table import TunedTable
from tokenweave.plan.trial import Trial, TrialResult

FEW, MANY = 2, 8  # layers
FUSED_BUDGETS = (8, 16, 32)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="Llama-3.3-70B", choices=DIMENSIONS, help="(default: %(default)s)")
    ranks = parser.add_mutually_exclusive_group(required=True)
    ranks.add_argument("--emulate-tp", type=int, help="ranks of which this GPU is to be one: 8")
    ranks.add_argument("--tp", type=int, help="ranks, each on a GPU of its own")
    parser.add_argument("--traffic", choices=("multicast", "p2p"), default="multicast", help="(default: multicast)")
    parser.add_argument("--slower", type=float, default=1.0, help="factor on the published times (default: 1)")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="(default: 1024 2048 4096 8192)"
    )
    parser.add_argument("--cut", type=int, nargs="+", help="weave at these cuts only, on --budget thread blocks")
    parser.add_argument("--budget", type=int, default=8, help="thread blocks, with --cut (default: 8)")
    parser.add_argument(
        "--tuned", metavar="FILE",
        help="weave as what `tune --json` wrote says, instead of trying, and tell how its plan, auto, does",
    )  # fmt: skip
    parser.add_argument(
        "--sustained", type=float, metavar="SECONDS",
        help="also run each mode's best plan for so long without a pause, and tell the clock that the GPU keeps",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=21, help="interleaved rounds; medians are shown (default: 21)")
    output.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    least = LEAST_ROUNDS if args.tuned else 3
    if min(args.tokens) < 1 or args.rounds < least:
        raise ValueError(f"--tokens must be at least 1, --rounds at least {least}")
    if args.sustained is not None and args.sustained <= 0:
        raise ValueError(f"--sustained must be more than 0 seconds, got {args.sustained}")
    if args.plot:
        output.check_plot(args.plot)
    if args.tp:
        from tokenweave.bench import layer_gpus

        rows = layer_gpus.rows(args)
    else:
        with layer_trials(
            args.model, args.emulate_tp, traffic=args.traffic, slower=args.slower, most=max(args.tokens)
        ) as trials:
            rows = measured_sizes(trials, args)
    print(output.table(list(_shown(rows[0])), [list(_shown(row).values()) for row in rows]))
    whose = (
        f"{args.model}, {args.tp} ranks on GPUs of their own, serial and reordered by NCCL"
        if args.tp
        else f"emulated: {args.model}, rank 0 of {args.emulate_tp}, {args.traffic} traffic, published times "
        f"x {args.slower}"
    )
    print(
        f"{whose}; µs a layer, medians of {args.rounds} interleaved rounds\n"
        "split: compute of both lanes alone over that of the whole; overlap: woven over the sum of what is longer, a "
        "stage of one lane alone or the other lane's communication alone\n"
        "auto: upper 95 % bound of its steps over those of the better of serial and fused, of the same round"
    )
    if args.sustained:
        cells = [line for row in rows for line in _sustained_cells(row)]
        print(output.table(["tokens", "mode", "ms a step", "serial ÷ mode", "MHz", "W"], cells))
        print(f"sustained: a step of {MANY} layers again and again for {args.sustained:g} s, its second half")
    if args.plot:
        _plot(args.plot, rows, args)
    return 0


def measured_sizes(trials: Any, args: argparse.Namespace, speaks: bool = True) -> list[dict[str, Any]]:
    """A row for each size. speaks: whether this process says how far it is and writes the file."""
    rows = []
    for tokens in args.tokens:
        began = time.perf_counter()
        woven, auto = _woven(trials, tokens, args), _auto(tokens, args)
        row = measured(trials, StepShape.prefill(tokens), woven, args.rounds, auto)
        if args.sustained:
            row["sustained"] = sustained(trials, StepShape.prefill(tokens), row, args.sustained)
        rows.append(row)
        rows[-1]["seconds"] = time.perf_counter() - began
        if speaks:
            print(" ".join(f"{name} {cell}" for name, cell in _shown(rows[-1]).items()), file=sys.stderr)
        if speaks and args.json:  # after each size: they take a while
            output.write_json(args.json, rows, **_about(args))
    return rows


def _about(args: argparse.Namespace) -> dict[str, Any]:
    if args.tp:
        return {"model": args.model, "tp": args.tp}
    return {"model": args.model, "emulate_tp": args.emulate_tp, "traffic": args.traffic, "slower": args.slower}


class LayerTrials:
    """Trials of the emulated rank in this process."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner

    def run(self, trial: Trial) -> TrialResult:
        return TrialResult([self.runner.run(trial)])

    def sustained(self, trial: Trial) -> Any:
        return self.runner.sustained(trial)


@contextmanager
def layer_trials(model: str, size: int, *, traffic: str, slower: float, most: int) -> Iterator[LayerTrials]:
    """The rank with MANY layers of `model`, for steps of up to `most` tokens."""
    import torch

    from tokenweave.bench.emulation import published_emulation
    from tokenweave.comm.devices import claim
    from tokenweave.comm.emulated import emulated_group
    from tokenweave.execute.gpu_trials import GpuTrialRunner
    from tokenweave.models.random_weights import random_model

    claim(0, 1, "emulated")  # says if there is no GPU, before weights are drawn
    dtype = torch.bfloat16
    directory = model_directory(model, layers=MANY)
    rank = random_model(directory, rank=0, size=size, dtype=dtype, device="cuda")
    emulation = published_emulation(
        size=size, hidden_size=rank.config.hidden_size, dtype_bytes=dtype.itemsize, traffic=traffic, slower=slower
    )
    with (
        emulated_group(emulation, device="cuda") as group,
        group.open_collective(rank.config.hidden_size, most, dtype, 2) as collective,
        closing(GpuTrialRunner(rank, collective, max_tokens=most, cache_tokens=2 * most)) as runner,
    ):
        yield LayerTrials(runner)


def _woven(trials: LayerTrials, tokens: int, args: argparse.Namespace) -> list[StepPlan]:
    """The woven plans to measure: those asked for, or the best that a scan finds."""
    if args.cut:
        return [StepPlan("weave", cut, args.budget) for cut in args.cut if 0 < cut < tokens]
    if args.tuned:
        checks = _table(args.tuned).checks
        return [check.plan for check in checks if sum(check.counts) == tokens and check.plan.mode == "weave"]
    found: Scanned = Scan(trials).best(StepShape.prefill(tokens))
    return [plan for plan, _ in found.plans]


def _auto(tokens: int, args: argparse.Namespace) -> StepPlan | None:
    """What the tuned table says of such a step; None without one."""
    return nearest_plan(_table(args.tuned), StepShape.prefill(tokens), "auto") if args.tuned else None


def _table(path: str) -> TunedTable:
    try:
        return TunedTable.from_json(json.loads(Path(path).read_text())["table"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not what `tokenweave tune --json` writes: {error}") from None


def measured(
    trials: LayerTrials, shape: StepShape, woven: list[StepPlan], rounds: int, auto: StepPlan | None = None
) -> dict[str, Any]:
    """Seconds a layer by mode, the best of each, the losses of the best woven plan, and how `auto` does."""
    plans = tuple(dict.fromkeys((
        StepPlan("serial"), StepPlan("reordered"), StepPlan("nocomm"),
        *(StepPlan("fused", budget=budget) for budget in FUSED_BUDGETS), *woven, *([] if auto is None else [auto]),
    )))  # fmt: skip
    few, many = (
        trials.run(Trial.of(shape, plans, rounds=rounds, layers=layers, parts=False)).steps for layers in (FEW, MANY)
    )
    layer = np.median(many, axis=1) - np.median(few, axis=1)
    seconds = {plan: float(took) / (MANY - FEW) for plan, took in zip(plans, layer, strict=True)}
    best = {
        mode: min((plan for plan in plans if plan.mode == mode), key=lambda plan: seconds[plan])
        for mode in dict.fromkeys(plan.mode for plan in plans)
    }
    row: dict[str, Any] = {"tokens": shape.tokens, "plans": {mode: asdict(plan) for mode, plan in best.items()}}
    row |= {f"{mode}_us": 1e6 * seconds[plan] for mode, plan in best.items()}
    if auto is not None:
        took = {mode: many[plans.index(best[mode])] for mode in ("serial", "fused")}
        better = min(took, key=lambda mode: float(np.median(took[mode])))
        row |= {"auto": auto.mode, "auto_bound": upper_bound(many[plans.index(auto)] / took[better])}
    if "weave" not in best:
        return row
    plan = best["weave"]
    row |= {"cut": plan.cut, "budget": plan.budget, "narrow": plan.narrow}
    row["speedup"] = seconds[best["serial"]] / seconds[plan]
    return row | losses(trials, shape, plan, seconds[plan])


def sustained(
    trials: LayerTrials, shape: StepShape, row: dict[str, Any], seconds: float
) -> dict[str, dict[str, float]]:
    """By mode: what a step of MANY layers takes, run for so many seconds without a pause, and the clock and power."""
    found = {}
    for mode, plan in row["plans"].items():
        rounds = max(10, math.ceil(seconds / (1e-6 * row[f"{mode}_us"] * MANY)))
        found[mode] = asdict(trials.sustained(Trial.of(shape, [StepPlan(**plan)], rounds=rounds, layers=MANY)))
    return found


def _sustained_cells(row: dict[str, Any]) -> list[list[str]]:
    serial = row["sustained"]["serial"]["seconds"]
    return [
        [str(row["tokens"]), mode, f"{1e3 * found['seconds']:.2f}", f"{serial / found['seconds']:.3f}"]
        + [f"{found['mhz']:.0f}", f"{found['watts']:.0f}"]
        for mode, found in row["sustained"].items()
    ]


def losses(trials: LayerTrials, shape: StepShape, plan: StepPlan, woven: float) -> dict[str, Any]:
    """What the cut and what running side by side cost, apart: see the module's text."""
    lanes, whole = (
        trials.runner.lane_times(Trial.of(shape, [one], rounds=1), MANY) for one in (plan, StepPlan("serial"))
    )
    first, second = lanes.communication
    ideal = (
        max(lanes.attention[0], second) + max(lanes.attention[1], first)
        + max(lanes.mlp[0], second) + max(lanes.mlp[1], first)
    )  # fmt: skip
    compute = sum(lanes.attention) + sum(lanes.mlp)
    return {
        "split": compute / (whole.attention[0] + whole.mlp[0]),
        "overlap": woven / ideal,
        "whole_us": {"attention": 1e6 * whole.attention[0], "mlp": 1e6 * whole.mlp[0]},
        "lanes_us": {
            name: [1e6 * seconds for seconds in getattr(lanes, name)] for name in ("attention", "mlp", "communication")
        },
    }


def _shown(row: dict[str, Any]) -> dict[str, str]:
    cells = {"tokens": str(row["tokens"])}
    for mode in ("serial", "reordered", "fused", "weave", "nocomm"):
        cells[mode] = f"{row[f'{mode}_us']:.1f}" if f"{mode}_us" in row else "-"
    for name in ("speedup", "split", "overlap"):
        cells[name] = f"{row[name]:.3f}" if name in row else "-"
    if "auto" in row:
        cells["auto"] = f"{row['auto']} {row['auto_bound']:.3f}"
    cells["plan"] = f"{row['cut']} on {row['budget']}, narrow {row['narrow']:08b}" if "cut" in row else "-"
    return cells


def _plot(path: str, rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    rows = sorted(rows, key=lambda row: row["tokens"])
    fig, axes = output.figure()
    tokens = [row["tokens"] for row in rows]
    for mode in ("serial", "reordered", "fused", "weave", "nocomm"):
        ratios = [row["serial_us"] / row[f"{mode}_us"] if f"{mode}_us" in row else float("nan") for row in rows]
        axes.plot(tokens, ratios, marker="o", label=mode)
    whose = f"{args.tp} GPUs" if args.tp else f"emulated, rank 0 of {args.emulate_tp}"
    axes.set(xscale="log", xlabel="tokens", ylabel="serial ÷ mode", title=f"a layer of {args.model}, {whose}")
    axes.set_xticks(tokens, [str(count) for count in tokens])
    axes.minorticks_off()
    axes.axhline(1.0, color="0.8", lw=0.8, zorder=0)
    axes.legend()
    fig.savefig(path)
