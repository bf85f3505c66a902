"""Ranks that are a thread with a FakeRunner, and a tokenizer of letters: LLM without processes or a model."""

import threading
from pathlib import Path
from typing import Any

import pytest
from engine.fakes import VOCAB, make_core

from tokenweave.comm.links import Link
from tokenweave.config import ModelConfig
from tokenweave.engine import llm as module
from tokenweave.engine.core import EngineCore
from tokenweave.engine.events import Ready
from tokenweave.engine.llm import LLM
from tokenweave.engine.worker import serve

CONTEXT = 64
MODEL = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, head_dim=2, max_position_embeddings=CONTEXT,
)  # fmt: skip


def letters(ids: list[int]) -> str:
    return "".join(chr(0x100 + token) for token in ids)


class LetterTokenizer:
    """Token i is the letter 0x100 + i. The conversation is the contents one after another."""

    available = True

    def __init__(self, directory: Path) -> None:
        self.held = ""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return [ord(letter) - 0x100 for letter in text]

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        return letters(ids)

    def stream(self, skip_special: bool = True) -> "LetterTokenizer":
        return self

    def push(self, token_id: int) -> str:
        return letters([token_id])

    def flush(self) -> str:
        return ""

    def chat(self, messages: Any) -> list[int]:
        return self.encode("".join(message["content"] for message in messages))


class ThreadRanks:
    """What start_ranks returns, as far as LLM uses it."""

    def __init__(self, core: EngineCore) -> None:
        self.core, self.failure, self.closed = core, None, False
        self.here, self.there = Link.pair()
        self.there.send(Ready("shared_memory", core.scheduler.pool.num_blocks, ""))
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            serve(self.there, self.core)
        except Exception as error:
            self.failure = error
        finally:
            self.there.close()

    def send(self, rank: int, value: Any) -> None:
        self.here.send(value)

    def receive(self, rank: int = 0, timeout: float | None = None) -> Any:
        try:
            return self.here.recv()
        except EOFError:
            raise self.failure or EOFError("ended") from None

    def close(self, grace: float = 1.0) -> None:
        self.closed = True
        self.thread.join(5)
        assert not self.thread.is_alive()


def thread_llm(monkeypatch: pytest.MonkeyPatch, *, core: dict[str, Any] | None = None, **options: Any) -> LLM:
    """An LLM over ThreadRanks; llm.ranks is those."""
    started = []

    def start(*args: Any, **kwargs: Any) -> ThreadRanks:
        started.append(ThreadRanks(make_core(**core or {})))
        return started[0]

    monkeypatch.setattr(module, "start_ranks", start)
    monkeypatch.setattr(module, "resolve", lambda model, dtype: Path("model"))
    monkeypatch.setattr(module, "read_config", lambda directory: MODEL)
    monkeypatch.setattr(module, "Tokenizer", LetterTokenizer)
    llm = LLM("model", **options)
    llm.ranks = started[0]  # type: ignore[attr-defined]
    return llm
