"""Ranks that die, callers that die, interrupts, scripts, notebooks: each time nothing may be left."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from tiny import FAMILIES, save

from tokenweave.engine.llm import LLM
from tokenweave.engine.params import SamplingParams

pytestmark = pytest.mark.started
ENDLESS = SamplingParams(max_tokens=500, temperature=0.0, ignore_eos=True)
SECONDS = 10.0  # until something that should happen at once counts as not happening

SCRIPT = """
import sys
from tokenweave import LLM, SamplingParams
llm = LLM(sys.argv[1], tensor_parallel_size=2)
print("ready", flush=True)
for i in range({rounds}):
    (completion,) = llm.generate([[3, 4, 5]], SamplingParams(max_tokens={tokens}, temperature=0.0, ignore_eos=True))
print(len(completion.token_ids), flush=True)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save(FAMILIES[0], tmp_path_factory.mktemp("models"))
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(509)}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(path / "tokenizer.json"))
    return path


def ranks_of(pid: int) -> list[int]:
    """Processes that run a rank for caller `pid`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"tokenweave.comm.worker" in words and json.loads(words[-2])["parent"] == pid:
                found.append(int(entry.name))
    return found


def gone(pid: int) -> bool:
    """Whether no rank of `pid` is left, at the latest after SECONDS."""
    deadline = time.monotonic() + SECONDS
    while ranks_of(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not ranks_of(pid)


@pytest.fixture
def script(model: Path, tmp_path: Path) -> Iterator:
    """Starts SCRIPT, without a __main__ guard, as a process; ends it if the test does not."""
    started: list[subprocess.Popen[str]] = []

    def start(rounds: int, tokens: int, *prefix: str) -> subprocess.Popen[str]:
        path = tmp_path / "script.py"
        path.write_text(SCRIPT.format(rounds=rounds, tokens=tokens))
        command = [*prefix, sys.executable, str(path), str(model)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[0]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_script_without_a_guard_that_does_not_close(script: Iterator) -> None:
    process = script(1, 7)  # type: ignore[operator]
    out, err = process.communicate(timeout=60)
    assert (out, process.returncode) == ("ready\n7\n", 0), err
    assert gone(process.pid)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_while_generating_is_named(model: Path, rank: int) -> None:
    with LLM(model, tensor_parallel_size=2) as llm:
        stream = llm.stream([3, 4, 5], ENDLESS)
        next(stream)
        pids = ranks_of(os.getpid())
        assert sorted(pids) == sorted(llm.pids)
        os.kill(llm.pids[rank], signal.SIGKILL)
        with pytest.raises(RuntimeError, match=f"rank {rank} was killed by SIGKILL"):
            list(stream)
        assert gone(os.getpid()), "before close"
        with pytest.raises(RuntimeError, match=f"rank {rank}"):
            llm.generate([1])


def test_a_rank_killed_while_idle_is_named_by_the_next_call(model: Path) -> None:
    with LLM(model, tensor_parallel_size=2) as llm:
        os.kill(llm.pids[1], signal.SIGKILL)
        assert gone(os.getpid())
        with pytest.raises(RuntimeError, match="rank 1 was killed by SIGKILL"):
            llm.generate([1])


def test_idle_ranks_use_no_processor(model: Path) -> None:
    with LLM(model, tensor_parallel_size=2) as llm:
        llm.generate([1, 2], SamplingParams(max_tokens=3))
        time.sleep(0.2)
        before = [ticks(pid) for pid in llm.pids]
        time.sleep(1.0)
        assert sum(ticks(pid) for pid in llm.pids) - sum(before) <= 2  # of 200 ticks in all


def ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_killed_caller_takes_its_ranks_with_it(script: Iterator) -> None:
    process = script(1000, 400)  # type: ignore[operator]
    assert process.stdout.readline() == "ready\n"
    assert len(ranks_of(process.pid)) == 2
    process.kill()
    process.wait()
    assert gone(process.pid)


@pytest.mark.parametrize("after", [0.2, 0.7, 1.2, 2.0, "ready"])
def test_an_interrupt_at_any_moment(script: Iterator, after: float | str) -> None:
    process = script(1000, 400)  # type: ignore[operator]
    if after == "ready":
        process.stdout.readline()
        time.sleep(0.3)
    else:
        time.sleep(after)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode in (-signal.SIGINT, 1, 130) and "KeyboardInterrupt" in err
    assert gone(process.pid)


def test_a_small_dev_shm(script: Iterator) -> None:
    small = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    if subprocess.run(["unshare", "--mount", "sh", "-c", small], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    left = 'test -z "$(ls -A /dev/shm)"'
    process = script(3, 300, "unshare", "--mount", "sh", "-c", f'{small} && "$@" && {left}', "sh")  # type: ignore[operator]
    out, err = process.communicate(timeout=60)
    assert (out, process.returncode) == ("ready\n300\n", 0), err


def test_a_notebook(model: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [
        nbformat.v4.new_code_cell(source)
        for source in (
            f"from tokenweave import LLM, SamplingParams\nllm = LLM({str(model)!r}, tensor_parallel_size=2)",
            "print(len(llm.generate([[3, 4]], SamplingParams(max_tokens=5, ignore_eos=True))[0].token_ids))",
            "print(len(list(llm.stream([3, 4], SamplingParams(max_tokens=6, ignore_eos=True)))))",
            "import os; print(os.getpid())",
        )
    ]
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    printed = [cell.outputs[-1]["text"].strip() if cell.outputs else "" for cell in notebook.cells]
    assert printed[1:3] == ["5", "6"]
    assert gone(int(printed[3]))
