"""LLM on ranks that torchrun has started: every rank gets the answers that LLM's own ranks give."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch.distributed as dist
from tiny import FAMILIES, save

from tokenweave import LLM
from tokenweave.comm.collective import CommunicationError
from tokenweave.comm.streams import LOOPBACK, connect
from tokenweave.engine.config import EngineConfig
from tokenweave.engine.event_codec import decode, encode
from tokenweave.engine.events import Ready, StepEvents
from tokenweave.engine.joined import JoinedRanks, StreamChannel, suited, world
from tokenweave.engine.stats import StepStats

PROMPTS = [[5, 9, 300], [7] * 40, [11, 12]]
STATS = StepStats(3, 2, 1, "weave", 1, None, 0.1, 0.2, 0.05, 0.15, 1 / 3, 4, 5, 6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save(FAMILIES[0], tmp_path_factory.mktemp("joined"))
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(509)}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(path / "tokenizer.json"))
    return path


PROGRAM = """
    import json, os, sys, time
    from tokenweave import LLM, SamplingParams

    def answers(llm):
        greedy = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, logprobs=1)
        drawn = SamplingParams(max_tokens=9, temperature=1.0, seed=3, ignore_eos=True)
        first = llm.generate({prompts}, [greedy, drawn, greedy])
        time.sleep({sleep})
        stopped = llm.generate([4, 8], SamplingParams(max_tokens=30, temperature=0.0, stop=[first[0].text.split()[1]]))
        pieces = llm.stream([30, 31], greedy)
        begun = [next(pieces), next(pieces)]
        pieces.close()
        scores = llm.score([5, 9, 300, 2]).tolist()
        return [[(c.token_ids, c.text, c.logprobs, c.finish_reason) for c in first + stopped], begun, scores]
"""


def program(sleep: float = 0.0) -> str:
    return textwrap.dedent(PROGRAM).format(prompts=PROMPTS, sleep=sleep)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def start(*words: str, **variables: str) -> "subprocess.Popen[str]":
    variables |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | variables
    )


def torchrun(*words: str, nodes: int = 1) -> list["subprocess.Popen[str]"]:
    """Two ranks: the launcher of every node, on this host."""
    where = ["--nproc-per-node", str(2 // nodes), "--master-addr", "127.0.0.1", "--master-port", free_port()]
    return [
        start("-m", "torch.distributed.run", "--nnodes", str(nodes), "--node-rank", str(node), *where, *words)
        for node in range(nodes)
    ]


def finished(launchers: list["subprocess.Popen[str]"]) -> list[tuple[int, str, str]]:
    """Code, stdout and stderr of every process."""
    try:
        found = [launcher.communicate(timeout=90) for launcher in launchers]
        return [(launcher.returncode, *texts) for launcher, texts in zip(launchers, found, strict=True)]
    finally:
        for launcher in launchers:
            launcher.kill()


@pytest.mark.parametrize("mode", ["weave"])
def test_every_rank_gets_the_answers(model: Path, tmp_path: Path, mode: str) -> None:
    """Also after nothing was asked for longer than any wait may take."""
    namespace: dict[str, Any] = {}
    exec(program(), namespace)
    with LLM(model, tensor_parallel_size=2, mode=mode, collective="distributed") as llm:
        expected = json.loads(json.dumps(namespace["answers"](llm)))
    script = tmp_path / "script.py"
    script.write_text(program(sleep=2.5) + textwrap.dedent(f"""
        with LLM({str(model)!r}, mode={mode!r}, timeout=1.0) as llm:
            found = [answers(llm), llm.collective_in_use, llm.config.tensor_parallel_size]
            json.dump(found, open(sys.argv[1] + os.environ["RANK"], "w"))
        try:
            llm.generate([1])
        except RuntimeError as error:
            assert "closed" in str(error)
    """))  # fmt: skip
    [(code, _, errors)] = finished(torchrun(str(script), str(tmp_path / "found")))
    assert code == 0, errors
    for rank in (0, 1):
        (answers, scores), collective, size = _parted(json.loads((tmp_path / f"found{rank}").read_text()))
        assert answers == _parted([expected, 0, 0])[0][0]
        np.testing.assert_allclose(scores, expected[2], atol=1e-5)
        assert (collective, size) == ("distributed", 2)


def _parted(found: list[Any]) -> tuple[tuple[Any, Any], Any, Any]:
    """What must be equal, and the scores and log-probabilities, whose last bits depend on who owned a row."""
    (completions, begun, scores), collective, size = found
    return ((([[c[0], c[1], c[3]] for c in completions], begun), scores), collective, size)


def test_generate_on_two_nodes_prints_one_answer(model: Path) -> None:
    words = ["-m", "tokenweave", "generate", "--raw", "w5 w9", "--model", str(model), "--max-tokens", "7"]
    found = finished(torchrun(*words, "--ignore-eos", nodes=2))
    assert [code for code, _, _ in found] == [0, 0], found
    assert len(found[0][1].split()) == 7 and found[1][1] == ""
    assert "2 ranks" in found[0][2] and "distributed" in found[0][2]


@pytest.mark.multigpu
def test_generate_on_two_gpus_prints_one_answer(model: Path) -> None:
    words = ["-m", "tokenweave", "generate", "--raw", "w5 w9", "--model", str(model), "--max-tokens", "7"]
    found = finished(torchrun(*words, "--ignore-eos", "--device", "cuda", "--mode", "weave"))
    assert [code for code, _, _ in found] == [0], found
    assert len(found[0][1].split()) == 7
    assert "2 ranks" in found[0][2] and "distributed" in found[0][2]


def test_a_killed_rank_is_told_to_the_other(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(f"""
        import os, signal, sys, threading, time
        from tokenweave import LLM, SamplingParams
        llm = LLM({str(model)!r})
        rank = os.environ["RANK"]
        if rank == "1":
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        try:
            while True:
                llm.generate([5], SamplingParams(max_tokens=100, ignore_eos=True), progress=False)
        except RuntimeError as error:
            print(f"{{type(error).__name__}}: {{error}}")
    """))  # fmt: skip
    about = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    began = time.monotonic()
    found = finished([start(str(script), RANK=rank, **about) for rank in ("0", "1")])
    assert time.monotonic() - began < 40  # the deadline of a wait is 60
    assert [code for code, _, _ in found] == [0, -signal.SIGKILL]
    assert found[0][1].startswith("CommunicationError: rank 1 has ")


def test_two_threads_that_end_it_close_the_group_once() -> None:
    """The engine's and the caller's: closing a group of GPUs takes its time, and cannot be done twice at once."""
    closes: list[str] = []
    ends = [threading.Event(), threading.Event()]

    def close_group() -> None:
        closes.append("group")
        ends[0].set()
        ends[1].wait(10.0)

    ranks = JoinedRanks.__new__(JoinedRanks)
    ranks.rank, ranks._closed, ranks._failure, ranks._group_closes = 1, True, None, threading.Lock()
    ranks._steps, ranks._mirror = (SimpleNamespace(close=lambda: closes.append("channel")) for _ in range(2))
    ranks._group = SimpleNamespace(close=close_group)
    engine = threading.Thread(target=ranks._end)
    engine.start()
    assert ends[0].wait(10.0)
    ranks._end()
    ends[1].set()
    engine.join()
    assert closes == ["channel", "channel", "group", "channel", "channel"]


def test_outside_of_a_world(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert world() == (0, 1)


def test_what_does_not_suit_the_world(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    assert world() == (1, 4)
    assert [suited(EngineConfig(tensor_parallel_size=n)).tensor_parallel_size for n in (1, 4)] == [4, 4]
    with pytest.raises(ValueError, match="tensor_parallel_size is 2, but this process is one of 4"):
        LLM(model, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="pin cannot be used"):
        LLM(model, pin=True)
    assert [suited(EngineConfig(device=device)).device for device in ("auto", "cpu", "cuda")] == ["cpu", "cpu", "cuda"]
    with pytest.raises(ValueError, match="needs a GPU that torch can use"):
        LLM(model, device="cuda")
    with pytest.raises(ValueError, match="'shared_memory' cannot be used here"):
        LLM(model, collective="shared_memory")


@pytest.fixture
def channels() -> Iterator[list[StreamChannel]]:
    store, made = dist.HashStore(), {}

    def open_one(rank: int) -> None:
        streams = connect(store, "key", rank, 3, lanes=1, timeout=10.0, address=LOOPBACK)[0]
        made[rank] = StreamChannel(streams, rank, 3, timeout=0.3)

    run_all([threading.Thread(target=open_one, args=(rank,)) for rank in range(3)])
    yield [made[rank] for rank in range(3)]
    for channel in made.values():
        channel.close()


def run_all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_channel(channels: list[StreamChannel]) -> None:
    found: dict[int, int] = {}
    values = [7, 3, 1 << 40]
    run_all([
        threading.Thread(target=lambda r: found.update({r: channels[r].least(values[r])}), args=(rank,))
        for rank in range(3)
    ])  # fmt: skip
    assert found == {0: 3, 1: 3, 2: 3}
    messages = [b"", b"x", os.urandom(70_000)]
    for message in messages:
        channels[0].send(message)
    assert [[channels[rank].receive() for _ in messages] for rank in (1, 2)] == [messages] * 2
    channels[0].close()
    assert channels[1].receive() is None


def test_channel_to_a_rank_that_does_not_listen(channels: list[StreamChannel]) -> None:
    with pytest.raises(CommunicationError, match="rank [12] does not make the same calls as rank 0"):
        channels[0].send(bytes(64 << 20))


def test_channel_to_a_rank_that_has_ended(channels: list[StreamChannel]) -> None:
    channels[2].close()
    with pytest.raises(CommunicationError, match="rank 2 has ended"):
        while True:
            channels[0].send(b"x")
            channels[1].receive()


@pytest.mark.parametrize(
    "message",
    [
        Ready("distributed", 77, "tuned: a file"),
        StepEvents([], [], [], {}, {}, STATS),
        StepEvents(
            [3, 1], [40, 7], [0, 2], {1: {7: -1 / 3, 9: -np.inf}}, {5: np.array([0.1, -2.5e-30], np.float32)}, STATS
        ),
    ],
)
def test_events_travel_to_the_last_bit(message: Any) -> None:
    found = decode(encode(message))
    assert type(found) is type(message)
    if isinstance(found, StepEvents):
        assert found.scores.keys() == message.scores.keys()
        for ident, scores in found.scores.items():
            assert scores.dtype == np.float32 and (scores == message.scores[ident]).all()
            message.scores[ident] = found.scores[ident] = None  # type: ignore[assignment]
    assert found == message
