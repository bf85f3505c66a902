"""vLLM with the plugin against vLLM without: python -m tokenweave.integrations.vllm.benchmark operation | prefill

operation: its shared-memory all-reduce with its add + RMSNorm, against the fused operation with its copies.
prefill: whole prompts through two engines in the same processes, one with the plugin, in turns.
Ranks are processes with an engine of their own each (vLLM's external_launcher), bound to a core each.
"""

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from math import comb
from pathlib import Path
from typing import Any

from tokenweave.comm import Group, launch
from tokenweave.integrations.vllm.settings import VARIABLE

VOCABULARY = 8192
SHAPE = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=576, intermediate_size=1536,
    num_attention_heads=12, num_key_value_heads=4, head_dim=64, vocab_size=VOCABULARY, max_position_embeddings=4096,
    rms_norm_eps=1e-5, hidden_act="silu", tie_word_embeddings=True, torch_dtype="float32",
)  # fmt: skip
"""The demo model's layers, with heads that divide by 2 and a small vocabulary: what is outside the layers is the same
in both engines."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tokenweave.integrations.vllm.benchmark", description=__doc__)
    parser.add_argument("what", choices=["operation", "prefill"])
    parser.add_argument("--tp", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--tokens", default="", help="with commas (default: 1,16,128,512,1024,2048 or 512,1024,2048)")
    parser.add_argument("--hidden", type=int, default=4096, help="of the operation (default: 4096)")
    parser.add_argument("--layers", type=int, default=8, help="of the model (default: 8)")
    parser.add_argument("--pairs", type=int, default=15, help="runs of each, at least 6 (default: 15)")
    parser.add_argument("--compiled", action="store_true", help="both engines compile the model")
    parser.add_argument("--json", metavar="FILE", help="write every figure to this file")
    args = parser.parse_args()
    sizes = args.tokens or ("1,16,128,512,1024,2048" if args.what == "operation" else "512,1024,2048")
    args.tokens = [int(word) for word in sizes.split(",")]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    rank_main = operation if args.what == "operation" else prefill
    try:
        ranks = launch(rank_main, args.tp, "shared_memory", args=(vars(args), port), threads=1, pin=True)
    finally:
        for memory in Path("/dev/shm").glob(f"{port}-tp*"):  # vLLM leaves it when its ranks end
            memory.unlink()
    rows = _operation_rows(args, ranks) if args.what == "operation" else _prefill_rows(args, ranks)
    cells = [list(rows[0]), *([_shown(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    if args.json:
        Path(args.json).write_text(json.dumps({"arguments": vars(args), "rows": rows}, indent=1), encoding="utf-8")
    return 0


def operation(group: Group, args: dict[str, Any], port: int) -> dict[int, dict[str, list[float]]]:
    """Seconds of every call on one rank, by tokens and competitor."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        init_distributed_environment,
        initialize_model_parallel,
        tensor_model_parallel_all_reduce,
    )
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.layernorm import RMSNorm

    from tokenweave.integrations.vllm.operation import EagerReducingRMSNorm, all_reduce_add_rms_norm
    from tokenweave.integrations.vllm.runtime import FUSED, KEY, Runtime

    _environment(group, port)
    os.environ["VLLM_DIST_IDENT"] = str(port)
    config, dtype = VllmConfig(), getattr(torch, args["dtype"])
    found: dict[int, dict[str, list[float]]] = {}
    collective = group.open_collective(args["hidden"], max(args["tokens"]), dtype)
    runtime = Runtime(group, collective, lambda counts, contexts: FUSED, weaves=False)
    config.compilation_config.static_forward_context[KEY] = runtime
    with set_current_vllm_config(config), set_forward_context(None, config), torch.no_grad():
        init_distributed_environment(group.size, group.rank, f"tcp://127.0.0.1:{port}", group.rank, "gloo")
        initialize_model_parallel(group.size)
        norm = RMSNorm(args["hidden"], dtype=dtype)
        compiled = torch.compile(norm.forward_native, dynamic=True)

        def stock(x: torch.Tensor, residual: torch.Tensor) -> object:
            return norm(tensor_model_parallel_all_reduce(x), residual)

        def stock_compiled(x: torch.Tensor, residual: torch.Tensor) -> object:
            return compiled(tensor_model_parallel_all_reduce(x), residual)

        def fused(x: torch.Tensor, residual: torch.Tensor) -> None:
            all_reduce_add_rms_norm(x, residual, norm.weight, norm.variance_epsilon)

        eager = EagerReducingRMSNorm(args["hidden"], dtype=dtype)
        calls: dict[str, Callable[..., object]] = {
            "vLLM": stock,
            "vLLM, norm compiled": stock_compiled,
            "fused": fused,
            "fused, eager": eager,
        }
        for tokens in args["tokens"]:
            source = torch.randn(2, tokens, args["hidden"]).to(dtype)
            found[tokens] = {name: [] for name in calls}
            for _ in range(4 * args["pairs"]):
                for name, call in calls.items():
                    x, residual = source.clone()  # both are overwritten
                    collective.barrier()
                    found[tokens][name].append(_seconds(lambda: call(x, residual)))  # noqa: B023
    return found


def prefill(group: Group, args: dict[str, Any], port: int) -> dict[int, dict[str, list[float]]]:
    """Seconds of every prompt on one rank, by tokens and engine."""
    import torch.distributed as dist

    _environment(group, port)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    prepare(f"tcp://127.0.0.1:{port}", group.rank)
    most = max(args["tokens"])
    engines = {}
    with tempfile.TemporaryDirectory() as directory:
        write_shape(Path(directory), args["layers"])
        for name, mode in (("vLLM", "off"), ("plugin", "auto")):
            engines[name] = engine(
                directory, group.size, mode=mode, dtype=args["dtype"], compiled=args["compiled"], max_tokens=most + 16
            )
    found: dict[int, dict[str, list[float]]] = {}
    for tokens in args["tokens"]:
        found[tokens] = {name: [] for name in engines}
        for turn in range(args["pairs"] + 1):
            order = list(engines.items())[:: 1 if turn % 2 else -1]
            for name, run in order:
                prompt = [{"prompt_token_ids": [(turn * 31 + 7 * i) % VOCABULARY for i in range(tokens)]}]
                dist.barrier()
                seconds = _seconds(lambda: run(prompt))  # noqa: B023
                if turn:  # the first warms up
                    found[tokens][name].append(seconds)
    return found


def prepare(address: str, rank: int) -> None:
    """Spare the ranks two things. vLLM names their shared memory after the address where they meet, which would be
    "env://" for every set of ranks on this machine, and what a killed one has left stays. And it looks at a class that
    is registered by its name in a process of its own, which imports vLLM once more."""
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.plugins import load_general_plugins
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    load_general_plugins()
    llama = "LlamaForCausalLM"
    ModelRegistry.register_model(llama, ModelRegistry.models[llama].load_model_cls())
    ExecutorWithExternalLauncher._distributed_args = lambda self: (address, rank, rank)


def write_shape(directory: Path, layers: int) -> None:
    """A model without weights: vLLM makes them up."""
    (directory / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": layers}), encoding="utf-8")


def engine(
    directory: str, ranks: int, *, mode: str, dtype: str, compiled: bool, max_tokens: int
) -> Callable[[Any], object]:
    """Runs prompts through an engine of vLLM that lives in this process, one token each. mode: the plugin's.

    Raises RuntimeError if the plugin is off that should be on."""
    from vllm import LLM, SamplingParams

    os.environ[VARIABLE] = mode
    llm = LLM(
        directory, tensor_parallel_size=ranks, distributed_executor_backend="external_launcher", load_format="dummy",
        skip_tokenizer_init=True, dtype=dtype, enforce_eager=not compiled, max_model_len=max_tokens,
        max_num_batched_tokens=max_tokens, max_num_seqs=4, enable_prefix_caching=False,
        kv_cache_memory_bytes=256 << 20,
    )  # fmt: skip
    runtime = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model.tokenweave
    if (runtime is None) != (mode == "off"):
        raise RuntimeError(f"the plugin is {'off' if runtime is None else 'on'} in mode {mode}")
    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    return lambda prompt: llm.generate(prompt, params, use_tqdm=False)


def _environment(group: Group, port: int) -> None:
    os.environ.update(
        RANK=str(group.rank), LOCAL_RANK=str(group.rank), WORLD_SIZE=str(group.size), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), VLLM_HOST_IP="127.0.0.1", VLLM_NO_USAGE_STATS="1",
    )  # fmt: skip


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _slowest(ranks: list[Any], tokens: int, name: str) -> list[float]:
    """Of every call, the seconds of the rank that took longest."""
    return [max(times) for times in zip(*(rank[tokens][name] for rank in ranks), strict=True)]


def _operation_rows(args: argparse.Namespace, ranks: list[Any]) -> list[dict[str, Any]]:
    rows = []
    for tokens in args.tokens:
        medians = {name: statistics.median(_slowest(ranks, tokens, name)) for name in ranks[0][tokens]}
        best = min(seconds for name, seconds in medians.items() if not name.startswith("fused"))
        rows.append(
            {"tokens": tokens}
            | {f"{name}, µs": 1e6 * seconds for name, seconds in medians.items()}
            | {"vLLM's best ÷ fused": best / medians["fused"], "÷ eager": best / medians["fused, eager"]}
        )
    return rows


def _prefill_rows(args: argparse.Namespace, ranks: list[Any]) -> list[dict[str, Any]]:
    rows = []
    for tokens in args.tokens:
        stock, plugin = (_slowest(ranks, tokens, name) for name in ("vLLM", "plugin"))
        ratios = [a / b for a, b in zip(plugin, stock, strict=True)]
        lowest, highest = interval(ratios)
        rows.append({
            "tokens": tokens,
            "vLLM, ms": 1e3 * statistics.median(stock),
            "plugin, ms": 1e3 * statistics.median(plugin),
            "plugin ÷ vLLM": statistics.median(ratios),
            "95 % from": lowest,
            "to": highest,
        })  # fmt: skip
    return rows


def interval(values: list[float]) -> tuple[float, float]:
    """Two of the values, which lie on either side of the median they are drawn around in at least 95 % of cases. Asks
    nothing of how they are spread: each is below that median with probability 1/2.

    Raises ValueError for fewer than 6, of which not even the outermost two are sure enough.
    """
    count, outside, below = len(values), 0, 0.0
    while (below := below + comb(count, outside) / 2**count) <= 0.025:
        outside += 1
    if not outside:
        raise ValueError(f"an interval of 95 % takes at least 6 values, got {count}")
    ordered = sorted(values)
    return ordered[outside - 1], ordered[-outside]


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
