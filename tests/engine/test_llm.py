import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from engine.fakes import answer_alone, next_logits
from engine.threads import CONTEXT, letters, thread_llm

from tokenweave.engine.completion import Answer
from tokenweave.engine.llm import LLM
from tokenweave.engine.params import SamplingParams


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, **more)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    with thread_llm(monkeypatch) as made:
        yield made


def wait_until_idle(llm: LLM) -> None:
    core = llm.ranks.core  # type: ignore[attr-defined]
    deadline = time.monotonic() + 5
    while core.busy and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not core.busy and core.scheduler.pool.available == core.scheduler.pool.num_blocks


def test_many_prompts_of_both_kinds_in_order(llm: LLM) -> None:
    prompts = [[i, 2, 3] if i % 2 else letters([i, 5]) for i in range(20)]
    params = [greedy(1 + i % 7) for i in range(20)]
    done = llm.generate(prompts, params, progress=False)
    for prompt, wanted, completion in zip(prompts, params, done, strict=True):
        ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        assert completion.token_ids == answer_alone(ids, wanted.max_tokens)
        assert completion.text == letters(completion.token_ids)
        assert (completion.finish_reason, completion.logprobs) == ("length", None)
        assert completion.prompt_token_ids == ids
        times = completion.timing.token_times
        assert len(times) == wanted.max_tokens and times == sorted(times)
        assert 0 < completion.timing.time_to_first_token == times[0] <= completion.timing.total  # type: ignore[operator]
        assert len(completion.timing.inter_token_latencies) == wanted.max_tokens - 1
    assert llm.last_completion is done[-1]
    assert not llm._client._inboxes


def test_one_prompt_and_none(llm: LLM) -> None:
    assert llm.generate([1, 2], greedy(3))[0].token_ids == answer_alone([1, 2], 3)
    assert len(llm.generate(letters([1]), greedy(1))) == 1
    assert llm.generate([]) == []


def test_pieces_of_a_stream_are_the_text(llm: LLM) -> None:
    pieces = list(llm.stream([4, 5], greedy(9)))
    assert len(pieces) == 9 and "".join(pieces) == letters(answer_alone([4, 5], 9))
    assert llm.last_completion is not None and llm.last_completion.text == "".join(pieces)


def test_a_model_without_a_tokenizer_has_no_text(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.tokenizer, "available", False)
    (completion,) = llm.generate([4, 5], greedy(3))
    assert completion.text == "" and completion.token_ids == answer_alone([4, 5], 3)
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.stream([4, 5], greedy(3))
    with pytest.raises(ValueError, match="stop_token_ids"):
        llm.generate([4, 5], greedy(3, stop="x"))


def test_closing_a_stream_cancels_the_request(llm: LLM) -> None:
    stream = llm.stream([4, 5], greedy(60))
    assert next(stream) == letters(answer_alone([4, 5], 1))
    stream.close()  # type: ignore[attr-defined]
    wait_until_idle(llm)
    assert llm.last_completion is not None and llm.last_completion.finish_reason == "cancelled"
    assert llm.generate([1], greedy(2))[0].token_ids == answer_alone([1], 2)


def test_an_interrupt_cancels_and_the_engine_goes_on(llm: LLM) -> None:
    stream = llm.stream([4, 5], greedy(60))
    next(stream)
    with pytest.raises(KeyboardInterrupt):
        stream.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    wait_until_idle(llm)
    assert llm.generate([1], greedy(2))[0].token_ids == answer_alone([1], 2)


def test_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": letters([1])}, {"role": "assistant", "content": letters([2])}]
    assert llm.chat(messages, greedy(4)).token_ids == answer_alone([1, 2], 4)
    assert "".join(llm.stream_chat(messages, greedy(4))) == letters(answer_alone([1, 2], 4))


def test_stop_strings_end_the_text_and_the_request(llm: LLM) -> None:
    answer = answer_alone([7, 8], 30)
    stop = letters(answer[5:7])
    end = letters(answer).index(stop)
    (completion,) = llm.generate([7, 8], greedy(50, stop=stop))
    assert completion.text == letters(answer)[:end] and completion.finish_reason == "stop"
    assert completion.token_ids == answer[: end + 2]
    assert "".join(llm.stream([7, 8], greedy(50, stop=[stop, "never"]))) == completion.text
    wait_until_idle(llm)


def test_a_stop_string_where_the_engine_is_steps_ahead(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of an answer that has ended are still on their way to a slow caller, beside those of one that goes on."""
    take = Answer.take

    def slow(*args: Any) -> str:
        time.sleep(0.01)
        return take(*args)

    monkeypatch.setattr(Answer, "take", slow)
    stop = letters(answer_alone([7, 8], 3)[2:])
    ended, whole = llm.generate([[7, 8], [1, 2]], [greedy(50, stop=stop), greedy(30)])
    assert ended.finish_reason == "stop" and whole.token_ids == answer_alone([1, 2], 30)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_fail_their_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """With one line to who asked; others go on, and so does the engine."""

    def broken(context: list[int]) -> np.ndarray:
        return next_logits(context) * (np.nan if context[:2] == [7, 8] and len(context) > 3 else 1)

    monkeypatch.setattr("engine.fakes.next_logits", broken)
    with pytest.raises(RuntimeError, match="the logits after 4 tokens are not finite"):
        llm.generate([7, 8], SamplingParams(max_tokens=9, temperature=temperature, logprobs=1))
    assert llm.generate([1, 2], greedy(5))[0].token_ids == answer_alone([1, 2], 5)
    wait_until_idle(llm)


def test_a_stop_string_ends_the_work(llm: LLM) -> None:
    runner = llm.ranks.core.runner  # type: ignore[attr-defined]
    run = runner.run
    runner.run = lambda step: (time.sleep(0.01), run(step))[1]
    llm.generate([7, 8], greedy(50, stop=letters(answer_alone([7, 8], 3)[2:])))
    wait_until_idle(llm)
    assert len(llm.stats()) < 40


def test_logprobs(llm: LLM) -> None:
    (completion,) = llm.generate([7, 8], greedy(3, logprobs=2))
    assert completion.logprobs is not None and len(completion.logprobs) == 3
    for i, report in enumerate(completion.logprobs):
        logits = torch.from_numpy(next_logits([7, 8, *completion.token_ids[:i]])).double().log_softmax(0)
        assert list(report) == logits.topk(2).indices.tolist()
        assert report[completion.token_ids[i]] == pytest.approx(logits.max().item(), abs=1e-5)


def test_score(llm: LLM) -> None:
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    logits = [torch.from_numpy(next_logits(tokens[:i])).double().log_softmax(0) for i in range(1, 8)]
    scores = llm.score(tokens)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, [row[t].item() for row, t in zip(logits, tokens[1:], strict=True)], atol=1e-5)
    np.testing.assert_array_equal(llm.score(letters(tokens)), scores)
    assert llm.score([3]).shape == (0,)


@pytest.mark.parametrize("length", [CONTEXT - 2, CONTEXT - 1, CONTEXT])
def test_the_context_ends_an_answer(llm: LLM, length: int) -> None:
    (completion,) = llm.generate([1] * length, greedy(9))
    assert completion.finish_reason == "length"
    assert completion.token_ids == answer_alone([1] * length, CONTEXT - length)


def test_no_tokens_asked_for(llm: LLM) -> None:
    first, second = llm.generate([[1], [2]], [greedy(0), greedy(2)])
    assert (first.text, first.token_ids, first.finish_reason) == ("", [], "length")
    assert first.timing.time_to_first_token is None and len(second.token_ids) == 2
    assert list(llm.stream([1], greedy(0))) == []


def test_arrivals_are_kept(llm: LLM) -> None:
    began = time.perf_counter()
    done = llm.generate([[1], [2], [3]], greedy(2), arrivals=[0.0, 0.05, 0.1])
    assert time.perf_counter() - began >= 0.1
    assert [c.token_ids for c in done] == [answer_alone([i], 2) for i in (1, 2, 3)]
    with pytest.raises(ValueError, match="2 prompts and 1 arrivals"):
        llm.generate([[1], [2]], arrivals=[0.0])


@pytest.mark.parametrize(
    "prompts", ["", [[]], [[1], []], [[1], [1] * (CONTEXT + 1)], [[97]], [[1], [-1]], [["a"]], [None]]
)
def test_nothing_is_queued_if_any_prompt_is_wrong(llm: LLM, prompts: Any) -> None:
    with pytest.raises(ValueError, match="prompt|token ids"):
        llm.generate(prompts)
    assert llm.stats() == []


def test_a_wrong_prompt_is_refused_before_a_stream_is_read(llm: LLM) -> None:
    with pytest.raises(ValueError, match="empty"):
        llm.stream("")
    with pytest.raises(ValueError, match="65 tokens"):
        llm.score([1] * 65)


def test_several_threads_at_once(llm: LLM) -> None:
    answers: dict[int, str] = {}

    def ask(i: int) -> None:
        answers[i] = "".join(llm.stream([i], greedy(12)))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {i: letters(answer_alone([i], 12)) for i in range(8)}


def test_stats(llm: LLM) -> None:
    assert llm.mode_in_use == "fused"
    llm.generate([[1, 2, 3]], greedy(3))
    assert [step.tokens for step in llm.stats()] == [3, 1, 1]
    assert (llm.collective_in_use, llm.dtype_in_use) == ("shared_memory", "float32")


def test_a_failure_reaches_every_caller_and_closes(llm: LLM) -> None:
    runner = llm.ranks.core.runner  # type: ignore[attr-defined]
    stream = llm.stream([1], greedy(60))
    next(stream)
    runner.run = lambda step: (_ for _ in ()).throw(RuntimeError("rank 1 was killed"))
    with pytest.raises(RuntimeError, match="rank 1 was killed"):
        list(stream)
    for call in (lambda: llm.generate("a"), lambda: llm.score([1, 2]), lambda: llm.stream([1])):
        with pytest.raises(RuntimeError, match="rank 1 was killed"):
            call()
    assert llm.ranks.closed  # type: ignore[attr-defined]


def test_closed(llm: LLM) -> None:
    stream = llm.stream([1], greedy(60))
    next(stream)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        list(stream)
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([1])


def test_an_unreferenced_engine_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = thread_llm(monkeypatch)
    ranks = llm.ranks  # type: ignore[attr-defined]
    llm.generate([1], greedy(2))
    del llm
    gc.collect()
    assert ranks.closed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 5}, "num_attention_heads"),
        ({"max_model_len": CONTEXT + 1}, "context is 64"),
        ({"mode": "quick"}, "mode"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        thread_llm(monkeypatch, **options)


def test_unknown_option(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="speed"):
        thread_llm(monkeypatch, speed=3)
