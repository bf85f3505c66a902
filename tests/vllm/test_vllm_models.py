"""Models inside vLLM with the plugin against vLLM without it: the same tokens, logprobs within 1e-5 in float32.

Every set of ranks is one subprocess with a time limit: importing vLLM takes ten times as long as what these models do.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from vllm_models import FAMILIES, write, write_int8

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
SIZES = (2, 4)
TOLERANCE = 1e-5
_SCRATCH = tempfile.TemporaryDirectory(prefix="tokenweave-vllm-")
sizes = pytest.mark.parametrize("size", SIZES)


def compiled_families(size: int) -> list[str]:
    """Compiling takes 12 s a family at 4 ranks on 2 cores, so there one stands for all."""
    return ["llama"] if size > 2 else list(FAMILIES)


def cases(size: int) -> list[dict[str, Any]]:
    found = [{"family": family, "compiled": False, "runs": ["fused", "weave"]} for family in FAMILIES]
    found[0]["runs"] = ["auto", "fused", "weave", "serial", "reordered", "unreduced", "swapped"]
    found += [{"family": family, "compiled": True, "runs": ["fused", "weave"]} for family in compiled_families(size)]
    if size == 2:
        found.append({"family": "llama-int8", "compiled": False, "runs": ["fused", "weave"]})
    return [case | {"runs": ["stock"]} for case in found] + found


every_case = pytest.mark.parametrize(
    ("size", "compiled", "family"),
    [(size, False, family) for size in SIZES for family in FAMILIES]
    + [(size, True, family) for size in SIZES for family in compiled_families(size)],
)


@functools.cache
def directory() -> Path:
    path = Path(_SCRATCH.name)
    for family in FAMILIES:
        write(family, path / "models")
    write_int8(path / "models" / "llama", path / "models")
    return path


@functools.cache
def outcome(size: int) -> tuple[str, list[dict[str, Any]]]:
    """What went wrong, if anything did, and what was found."""
    job, out = directory() / f"{size}.json", directory() / f"{size}.out.json"
    words = {"size": size, "models": str(directory() / "models"), "cases": cases(size), "out": str(out)}
    job.write_text(json.dumps(words))
    environment = os.environ | {
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CACHE_ROOT": str(directory() / "cache"),
    }  # fmt: skip
    script = Path(__file__).with_name("vllm_ranks.py")
    try:
        ran = subprocess.run(
            [sys.executable, str(script), str(job)], env=environment, timeout=540, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired as error:
        return f"{error}\n{(error.stderr or b'')[-6000:].decode(errors='replace')}", []
    if ran.returncode:
        return ran.stdout[-2000:] + ran.stderr[-6000:], []
    return "", json.loads(out.read_text())


def result(size: int, family: str, compiled: bool, run: str) -> dict[str, Any]:
    failure, found = outcome(size)
    assert not failure, failure
    return next(one for one in found if (one["family"], one["compiled"], one["run"]) == (family, compiled, run))


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The largest of any logprob, of prompts' tokens and of the three best of each generated one; infinity if the
    tokens differ."""
    worst = 0.0
    for a, b in zip(ours["outputs"], theirs["outputs"], strict=True):
        if a["tokens"] != b["tokens"] or any(
            x.keys() != y.keys() for x, y in zip(a["logprobs"], b["logprobs"], strict=True)
        ):
            return float("inf")
        pairs = list(zip(a["prompt_logprobs"], b["prompt_logprobs"], strict=True))
        pairs += [(x[token], y[token]) for x, y in zip(a["logprobs"], b["logprobs"], strict=True) for token in x]
        worst = max(worst, *(abs(x - y) for x, y in pairs))
    return worst


@every_case
def test_the_plugin_is_not_in_stock(size: int, compiled: bool, family: str) -> None:
    stock = result(size, family, compiled, "stock")
    assert not stock["on"] and stock["class"].startswith("vllm.")
    assert len(stock["outputs"]) == 7 and all(len(o["tokens"]) == 8 for o in stock["outputs"])


@every_case
def test_fused_steps_give_stock_results(size: int, compiled: bool, family: str) -> None:
    found = result(size, family, compiled, "fused")
    assert difference(found, result(size, family, compiled, "stock")) <= TOLERANCE
    assert set(found["counts"]) == {"fused"} and found["fused"] == 4 * found["counts"]["fused"]  # 2 layers, 2 blocks


@every_case
def test_woven_steps_give_stock_results(size: int, compiled: bool, family: str) -> None:
    """Chunked prefill, cuts inside requests, decodes in both lanes."""
    found = result(size, family, compiled, "weave")
    assert difference(found, result(size, family, compiled, "stock")) <= TOLERANCE
    woven = [step for step in found["steps"] if 0 < step["cut"] < sum(step["counts"])]
    assert found["counts"]["weave"] == len(woven) >= 10
    borders = [{sum(step["counts"][: i + 1]) for i in range(len(step["counts"]))} for step in woven]
    inside = [step for step, ends in zip(woven, borders, strict=True) if step["cut"] not in ends]
    chunked = [s for s in inside if any(k > n > 1 for n, k in zip(s["counts"], s["contexts"], strict=True))]
    assert len(inside) >= 5 and len(chunked) >= 2
    single = found["counts"].get("fused", 0)
    assert found["fused"] == 8 * len(woven) + 4 * single


@pytest.mark.parametrize("mode", ["serial", "reordered"])
@sizes
def test_the_other_modes_give_stock_results(mode: str, size: int) -> None:
    found = result(size, "llama", False, mode)
    assert difference(found, result(size, "llama", False, "stock")) <= TOLERANCE
    assert set(found["counts"]) == {mode} and found["fused"] == 0


@sizes
def test_steps_are_planned(size: int) -> None:
    """By default, without a tuned table: over shared memory a core that communicates is one that computes, so that no
    step is woven."""
    found = result(size, "llama", False, "auto")
    assert difference(found, result(size, "llama", False, "stock")) <= TOLERANCE
    assert {step["mode"] for step in found["steps"]} <= {"serial", "fused"}
    assert sum(found["counts"].values()) == len(found["steps"])


@pytest.mark.parametrize("fault", ["unreduced", "swapped"])
@sizes
def test_faults_are_seen(fault: str, size: int) -> None:
    """Partial sums that are not summed; lane 1 before lane 0, whose keys it attends to."""
    found = result(size, "llama", False, fault)
    assert difference(found, result(size, "llama", False, "stock")) > 0.01


@pytest.mark.parametrize("mode", ["fused", "weave"])
def test_a_quantised_checkpoint(mode: str) -> None:
    """8-bit weights and activations. A sum that differs in its last bit may round to the next of 127 steps of one
    activation, so the logprobs are compared as such checkpoints are: to a tenth of what a fault makes of them."""
    stock = result(2, "llama-int8", False, "stock")
    found = result(2, "llama-int8", False, mode)
    assert found["on"] and found["counts"][mode] >= 10
    assert difference(found, stock) <= 1e-3
