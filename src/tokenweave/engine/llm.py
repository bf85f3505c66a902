"""The public face of the engine."""

import secrets
import sys
import time
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from tqdm import tqdm

from tokenweave.comm.processes import RankProcesses, start_ranks
from tokenweave.config import ModelConfig, shard
from tokenweave.config.foreign import read_config
from tokenweave.engine import joined
from tokenweave.engine.client import Arrival, EngineClient, Inbox
from tokenweave.engine.completion import Answer, Completion
from tokenweave.engine.config import EngineConfig
from tokenweave.engine.device import device_for
from tokenweave.engine.events import Ready
from tokenweave.engine.joined import JoinedRanks
from tokenweave.engine.params import SamplingParams
from tokenweave.engine.prompts import Prompt, as_list, as_params, token_ids
from tokenweave.engine.request import Request
from tokenweave.engine.stats import StepStats
from tokenweave.engine.tokenizer import Message, Tokenizer
from tokenweave.models.resolve import resolve
from tokenweave.plan import plan_step

WORKER = "tokenweave.engine.worker:main"
BLOCK_SIZES = {"cpu": 16, "cuda": 256}


class LLM:
    """A model on `tensor_parallel_size` rank processes, ready to answer. In a program that torchrun has started on all
    ranks it uses these, and every rank makes the same calls in the same order and gets the same answers.

    model: a Hugging Face directory, a .gguf file or a hub id; None is the demo model. options: fields of EngineConfig.
    The processes end with `close`, with the `with` block, with this object or with this process, whatever ends it.
    Raises ValueError, in one line that says what to do, for a model or options that cannot work. After a failure of
    the ranks every call raises it.
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        config = EngineConfig(**options)
        joins = joined.world()[1] > 1
        if joins:
            config = joined.suited(config)
        directory = resolve(model, config.dtype)
        self.model_config = read_config(directory)
        self.config = resolved(config, self.model_config)
        self.tokenizer = Tokenizer(directory)
        self.last_completion: Completion | None = None
        ranks = JoinedRanks(directory, self.config) if joins else _start(directory, self.config)
        try:
            self._ready: Ready = ranks.receive(0)
            self._client = EngineClient(ranks)
        except BaseException:
            ranks.close(grace=0.0)
            raise
        self._finalizer = weakref.finalize(self, EngineClient.close, self._client)

    @property
    def context(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        assert self.config.max_model_len is not None
        return self.config.max_model_len

    @property
    def mode_in_use(self) -> str:
        """The mode of the last step, or of a step of one token before there was any."""
        stats = self._client.stats
        return stats[-1].mode if stats else plan_step(self.config.mode, 1).mode

    @property
    def collective_in_use(self) -> str:
        return self._ready.collective

    @property
    def plan_source(self) -> str:
        """Where the costs come from by which mode "auto" decides: a tuned table, or why there is none for here."""
        return self._ready.plan_source

    @property
    def pids(self) -> list[int]:
        """The rank processes, in rank order."""
        return self._client.pids

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""
        return self._ready.num_blocks

    @property
    def dtype_in_use(self) -> str:
        return self.config.dtype

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        arrivals: Sequence[float] | None = None,
    ) -> list[Completion]:
        """Answer one prompt or many, each text or token ids; completions in the same order.

        params: the same for all, or one for each. progress: show a bar; by default for several prompts on a terminal.
        arrivals: seconds from now at which each prompt is sent, not falling; by default all at once.
        Raises ValueError before anything is queued if any prompt is empty, too long or of another vocabulary.
        """
        given = as_list(prompts)
        answers = [
            self._answer(self._token_ids(prompt), wanted)
            for prompt, wanted in zip(given, as_params(params, len(given)), strict=True)
        ]
        if arrivals is not None and len(arrivals) != len(answers):
            raise ValueError(f"there are {len(answers)} prompts and {len(arrivals)} arrivals; give one for each")
        for answer in answers:
            if answer.params.stop:
                answer.follow_text()
        done: dict[int, Completion] = {}
        shown = sys.stderr.isatty() and len(answers) > 1 if progress is None else progress
        bar = tqdm(total=len(answers), desc="generating", unit="prompt", disable=not shown)
        with bar, closing(self._run(answers, arrivals)) as tokens:
            for answer, _, ended in tokens:
                if answer.finish_reason is not None:
                    done[answer.ident] = answer.completion(ended)
                    bar.update()
        completions = [done[answer.ident] for answer in answers]
        self.last_completion = completions[-1] if completions else None
        return completions

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """The answer's text in pieces, as they come. Closing the iterator cancels the request."""
        return self._stream(self._token_ids(prompt), params)

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Completion:
        """The answer to a conversation, e.g. [{"role": "user", "content": "Hello"}], by the model's chat template."""
        return self.generate([self.tokenizer.chat(messages)], params)[0]

    def stream_chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Iterator[str]:
        """The same in pieces, as they come."""
        return self.stream(self.tokenizer.chat(messages), params)

    def score(self, token_ids: Prompt) -> np.ndarray:
        """float32 [len - 1]: the log-probability of each next token given those before it. Text is tokenised first."""
        ids = self._token_ids(token_ids)
        if len(ids) == 1:
            return np.zeros(0, dtype=np.float32)
        inbox: Inbox = SimpleQueue()
        request = Request(self._client.new_ident(), np.array(ids, dtype=np.int32), None, limit=len(ids))
        self._client.submit([request], inbox)
        try:
            arrival = _open(inbox.get())
            return arrival.events.scores[request.ident]
        finally:
            self._client.cancel([request.ident])

    def stats(self) -> list[StepStats]:
        """What each of the last steps was and took, the oldest first."""
        return list(self._client.stats)

    def close(self) -> None:
        """End the rank processes. Later calls raise RuntimeError."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _token_ids(self, prompt: Prompt) -> list[int]:
        self._client.check()
        return token_ids(prompt, self.tokenizer, vocab_size=self.model_config.vocab_size, context=self.context)

    def _answer(self, prompt: list[int], params: SamplingParams) -> Answer:
        if params.stop and not self.tokenizer.available:
            raise ValueError("stop strings need a tokenizer, and the model has none; use stop_token_ids")
        return Answer(self._client.new_ident(), prompt, params, self.tokenizer)

    def _stream(self, prompt: list[int], params: SamplingParams | None) -> Iterator[str]:
        if not self.tokenizer.available:
            raise ValueError("a stream is text, and the model has no tokenizer; use generate")
        answer = self._answer(prompt, params or SamplingParams())
        answer.follow_text()

        def pieces() -> Iterator[str]:
            ended = time.perf_counter()
            try:
                with closing(self._run([answer])) as tokens:
                    for _, piece, ended in tokens:  # noqa: B007  the last is used below
                        if piece:
                            yield piece
            finally:
                self.last_completion = answer.completion(ended)

        return pieces()

    def _run(
        self, answers: Sequence[Answer], arrivals: Sequence[float] | None = None
    ) -> Generator[tuple[Answer, str, float]]:
        """Send the requests, and yield (answer, its new text, when) at each new token until all are finished. Closing
        it cancels what is not."""
        inbox: Inbox = SimpleQueue()
        began = time.perf_counter()
        due = [began + (arrivals[i] if arrivals is not None else 0.0) for i in range(len(answers))]
        live: dict[int, Answer] = {}
        sent = 0
        try:
            while sent < len(answers) or live:
                while sent < len(answers) and due[sent] <= time.perf_counter():
                    answer = answers[sent]
                    answer.began, sent = time.perf_counter(), sent + 1
                    if self._send(answer, inbox):
                        live[answer.ident] = answer
                    else:
                        yield answer, "", answer.began
                wait = max(0.0, due[sent] - time.perf_counter()) if sent < len(answers) else None
                if not live and wait is None:
                    break
                try:
                    arrival = _open(inbox.get(timeout=wait))
                except Empty:
                    continue
                for entry in arrival.entries:
                    found = live.get(arrival.events.idents[entry])
                    if found is None:
                        continue  # a stop string has ended it: the engine was a step ahead
                    answer = found
                    piece = answer.take(arrival, entry)
                    if answer.finish_reason is not None:
                        del live[answer.ident]
                        self._client.cancel([answer.ident])  # a stop string: the engine does not know
                    yield answer, piece, arrival.time
        finally:
            self._client.cancel(list(live))

    def _send(self, answer: Answer, inbox: Inbox) -> bool:
        """Queue the answer's request. False if there is nothing to generate, be it for want of room."""
        prompt, params = answer.prompt_token_ids, answer.params
        limit = min(len(prompt) + params.max_tokens, self.context)
        if limit == len(prompt):
            answer.finish_reason = "length"
            return False
        seed = secrets.randbits(63) if params.seed is None else params.seed
        request = Request(answer.ident, np.array(prompt, dtype=np.int32), params, limit, seed=seed)
        self._client.submit([request], inbox)
        return True


def _open(item: Arrival | BaseException) -> Arrival:
    if isinstance(item, BaseException):
        raise item
    return item


def _start(directory: Path, config: EngineConfig) -> RankProcesses:
    return start_ranks(
        WORKER,
        config.tensor_parallel_size,
        (directory, config),
        collective=config.collective,
        device=config.device,
        timeout=config.timeout,
        threads=config.threads,
        pin=config.pin,
        emulation=config.emulation,
    )


def resolved(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """`config` with its "auto" values decided for this model. Raises ValueError for what the model cannot do."""
    for rank in range(config.tensor_parallel_size):
        shard(model, config.tensor_parallel_size, rank)
    longest = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ValueError(f"max_model_len is {config.max_model_len}, but the model's context is {longest} tokens")
    processes = 1 if config.collective == "emulated" else config.tensor_parallel_size
    dtype, device = config.dtype, device_for(config.device, processes, config.collective)
    if dtype == "auto":  # matmuls in float16 run several times slower than in float32 on most CPUs
        dtype = "float32" if model.dtype == "float16" and device == "cpu" else model.dtype
    return replace(
        config,
        dtype=dtype,
        device=device,
        block_size=config.block_size or BLOCK_SIZES[device],
        max_model_len=config.max_model_len or longest,
    )
