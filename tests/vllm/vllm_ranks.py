"""Models inside vLLM, many in one start: python vllm_ranks.py JOB.json, run by the tests with a time limit.

Every rank is a process with an engine of its own, as torchrun would start them (vLLM's external_launcher).

JOB: {"size": ranks, "models": directory, "cases": [{"family": ..., "compiled": bool, "runs": [...]}], "out": file}
A run is a mode of the plugin, or "stock" without it, or a fault put in: "unreduced", "swapped". Stock ones come first.
"""

import gc
import json
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_models import ARCHITECTURES, VOCABULARY

PROMPTS = (1, 5, 33, 64, 100, 150, 13)  # tokens; steps take 64, so that prompts are cut into chunks
STEP_TOKENS = 64


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    os.environ.update(
        WORLD_SIZE=str(job["size"]), MASTER_ADDR="127.0.0.1", MASTER_PORT=port, VLLM_HOST_IP="127.0.0.1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0", OMP_NUM_THREADS="1",
    )  # fmt: skip
    _import_models(plugin=False)
    # Forked, as vLLM's own workers are: importing vLLM takes a core 12 s, and four ranks have two.
    ranks = [multiprocessing.get_context("fork").Process(target=rank_main, args=(job, r)) for r in range(job["size"])]
    for rank in ranks:
        rank.start()
    try:
        while any(rank.exitcode is None for rank in ranks):
            if any(rank.exitcode for rank in ranks):
                break
            time.sleep(0.1)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
        for memory in Path("/dev/shm").glob(f"{port}-tp*"):  # vLLM leaves it in this mode
            memory.unlink()
    sys.exit(max(abs(rank.exitcode or 0) for rank in ranks))


def rank_main(job: dict[str, Any], rank: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    _meet_at(f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}", rank)
    plugin, found = False, []
    for case in job["cases"]:
        if not plugin and case["runs"] != ["stock"]:
            plugin = True
            _import_models(plugin=True)
        found += run_case(job, case)
    if rank == 0:
        with open(job["out"], "w", encoding="utf-8") as file:
            json.dump(found, file)


def _end_with_parent(parent: int) -> None:
    """Of a parent that was killed, at a time limit, no rank stays."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _meet_at(address: str, rank: int) -> None:
    """vLLM names the ranks' shared memory after the address where they meet, which would be "env://" for every set of
    ranks on this machine, and what a killed one has left stays."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    ExecutorWithExternalLauncher._distributed_args = lambda self: (address, rank, rank)


def _import_models(*, plugin: bool) -> None:
    """Have vLLM load its plugins, none or this one. Models by themselves: vLLM looks at a class that is registered by
    its name in a process of its own, which imports vLLM once more."""
    from vllm import envs, plugins
    from vllm.model_executor.model_loader import utils
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.v1.attention import selector

    os.environ["VLLM_PLUGINS"] = "tokenweave" if plugin else ""
    envs.disable_envs_cache()
    selector._cached_get_attn_backend.cache_clear()  # here and in the next vLLM keeps what it has looked up
    utils._MODEL_ARCH_BY_HASH.clear()
    plugins.plugins_loaded = False
    plugins.load_general_plugins()
    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())


def run_case(job: dict[str, Any], case: dict[str, Any]) -> list[dict[str, Any]]:
    import torch
    from vllm import LLM

    began = time.monotonic()
    llm = LLM(
        f"{job['models']}/{case['family']}", tensor_parallel_size=job["size"], skip_tokenizer_init=True,
        distributed_executor_backend="external_launcher", dtype=case.get("dtype", "float32"),
        enforce_eager=not case["compiled"], enable_prefix_caching=False, kv_cache_memory_bytes=32 << 20,
        max_model_len=256, max_num_batched_tokens=STEP_TOKENS, max_num_seqs=len(PROMPTS),
    )  # fmt: skip
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    started = time.monotonic() - began
    found = []
    for run in case["runs"]:
        began = time.monotonic()
        found.append({**case, "run": run, **_run(llm, model, run), "start": started})
        found[-1]["seconds"] = time.monotonic() - began
    del llm, model
    gc.collect()
    torch._dynamo.reset()
    return found


def _run(llm: Any, model: Any, run: str) -> dict[str, Any]:
    runtime = getattr(model, "tokenweave", None)
    steps: list[dict[str, Any]] = []
    if runtime is not None:
        runtime.counts.steps.clear()
        runtime.counts.fused = 0
        runtime.planned = _recorded(runtime.planned if run == "auto" else _plan(run), steps)
    with_faults = _swapped_lanes if run == "swapped" else _as_it_is
    with with_faults():
        outputs = _generate(llm)
    return {
        "outputs": outputs,
        "on": runtime is not None,
        "class": f"{type(model).__module__}.{type(model).__name__}",
        "counts": {} if runtime is None else dict(runtime.counts.steps),
        "fused": 0 if runtime is None else runtime.counts.fused,
        "copies": 0 if runtime is None else runtime.collective.copies,
        "steps": steps,
    }


def _generate(llm: Any) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    prompts = [
        {"prompt_token_ids": [(7 * i + 13 * j * j + j) % VOCABULARY for j in range(length)]}
        for i, length in enumerate(PROMPTS)
    ]
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=3, prompt_logprobs=0, detokenize=False)
    found = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        best = output.outputs[0]
        found.append({
            "tokens": list(best.token_ids),
            "logprobs": [{str(token): p.logprob for token, p in step.items()} for step in best.logprobs],
            "prompt_logprobs": [
                step[token].logprob
                for token, step in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
                if step is not None
            ],
        })  # fmt: skip
    return found


def _plan(run: str) -> Callable[..., Any]:
    from tokenweave.plan import StepPlan

    def planned(counts: Any, contexts: Any) -> Any:
        tokens = int(counts.sum())
        if run == "unreduced":
            return StepPlan("nocomm")
        if run in ("weave", "swapped"):
            return StepPlan("weave", cut=max(1, 2 * tokens // 5))
        return StepPlan(run)

    return planned


def _recorded(plan: Callable[..., Any], steps: list[dict[str, Any]]) -> Callable[..., Any]:
    def planned(counts: Any, contexts: Any) -> Any:
        found = plan(counts, contexts)
        steps.append({"counts": counts.tolist(), "contexts": contexts.tolist(), "mode": found.mode, "cut": found.cut})
        return found

    return planned


class _as_it_is:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        pass


class _swapped_lanes:
    """In every layer lane 1 runs before lane 0; the rows come back in their right order."""

    def __enter__(self) -> None:
        import torch

        from tokenweave.integrations.vllm import models, weave

        self._weave, self._models, self._lanes, self._woven = weave, models, weave._lanes, models.woven

        def woven(runtime: Any, step: Any, embedded: Any, positions: Any) -> Any:
            rows = self._woven(runtime, step, embedded, positions)
            second = rows.shape[0] - step.plan.cut
            return torch.cat([rows[second:], rows[:second]])

        weave._lanes = lambda *args: self._lanes(*args)[::-1]
        models.woven = woven

    def __exit__(self, *exc: object) -> None:
        self._weave._lanes, self._models.woven = self._lanes, self._woven


if __name__ == "__main__":
    main()
