"""torchrun on two hosts: two network namespaces with a link between them, each with a rank."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from tiny import FAMILIES, save

from tokenweave import LLM, SamplingParams
from tokenweave.bench.namespaces import ADDRESSES, NetworkRanks

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save(FAMILIES[0], tmp_path_factory.mktemp("hosts"))
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(509)}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Processes, one in the network namespace of each host."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    with NetworkRanks("engine.idle_host", {}) as ranks:
        ranks.set_rate(1e9)
        yield ranks.pids


def torchrun(hosts: list[int], *words: str, **variables: str) -> list[tuple[str, str, int]]:
    """stdout, stderr and code of the launcher of every host."""
    where = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", ADDRESSES[0], "--master-port", "29400"]
    launchers = [
        subprocess.Popen(
            ["nsenter", "--target", str(pid), "--net", sys.executable, "-m", "torch.distributed.run", *where,
             "--node-rank", str(node), *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | variables,
        )
        for node, pid in enumerate(hosts)
    ]  # fmt: skip
    try:
        return [(*launcher.communicate(timeout=90), launcher.returncode) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()


@pytest.mark.network
@pytest.mark.parametrize("mode", ["auto", "weave"])
def test_generate_across_hosts(model: Path, hosts: list[int], mode: str) -> None:
    words = [
        "generate",
        "--raw",
        "w5 w9 w300",
        "--model",
        str(model),
        "--max-tokens",
        "7",
        "--ignore-eos",
        "--mode",
        mode,
    ]
    found = torchrun(hosts, "-m", "tokenweave", *words, OMP_NUM_THREADS="1")
    assert [code for *_, code in found] == [0, 0], found
    with LLM(model, tensor_parallel_size=2, collective="distributed") as llm:
        params = SamplingParams(max_tokens=7, temperature=0.0, ignore_eos=True)
        (expected,) = llm.generate(["w5 w9 w300"], params, progress=False)
    assert [out.strip() for out, *_ in found] == [expected.text.strip(), ""]
    assert "2 ranks" in found[0][1] and "distributed" in found[0][1]
