"""Whole steps on a GPU: against the CPU's float32, and replayed graphs against the steps they were captured from."""

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from execute.gpu_models import Alone, caches, pair

from tokenweave.execute import Executor
from tokenweave.execute.steps import made_up_step
from tokenweave.layers.batch import Batch
from tokenweave.layers.cache import KVCache
from tokenweave.models.decoder import Decoder
from tokenweave.plan.step import StepPlan

pytestmark = pytest.mark.gpu
MOST = 512
# (new tokens, tokens before them) of each request, step by step
STEPS = [
    ([13, 1, 33], [0, 0, 0]),
    ([7, 1, 1], [13, 1, 33]),
    ([1, 1, 1], [20, 2, 34]),
    ([300], [35]),
    ([577 % MOST], [0]),
]


def plans(tokens: int) -> list[StepPlan]:
    modes = [StepPlan(mode) for mode in ("serial", "reordered", "fused", "nocomm")]
    cuts = {0, 1, tokens // 3, tokens // 2, tokens}
    return (
        modes
        + [StepPlan("weave", cut, 8) for cut in cuts if cut <= tokens]
        + [StepPlan("weave", tokens // 2, 8, narrow=0b10101101)]
    )


@pytest.fixture(scope="module", params=["plain", "qk_norm", "one_kv_head"])
def models(request: pytest.FixtureRequest) -> tuple[Decoder, Decoder]:
    changes = {"plain": {}, "qk_norm": dict(qk_norm=True), "one_kv_head": dict(num_key_value_heads=1, qkv_bias=True)}
    return pair(torch.bfloat16, **changes[request.param])


@pytest.fixture
def executors(models: tuple[Decoder, Decoder]) -> Iterator[tuple[Executor, Executor]]:
    ours, theirs = models
    hidden = ours.config.hidden_size
    with (
        closing(Executor(ours, Alone(MOST, hidden, ours.dtype, "cuda"), max_tokens=MOST)) as gpu,  # type: ignore[arg-type]
        closing(Executor(theirs, Alone(MOST, hidden, torch.float32, "cpu"), max_tokens=MOST)) as cpu,  # type: ignore[arg-type]
    ):
        yield gpu, cpu


@pytest.mark.parametrize("block_size", [16, 256])
def test_steps_against_the_cpu(executors: tuple[Executor, Executor], block_size: int) -> None:
    """Chunks, decodes and mixtures over one cache, in every mode and at many cuts."""
    gpu, cpu = executors
    vocab = gpu.model.config.vocab_size
    ours, theirs = caches(gpu.model, 40, block_size)
    for counts, starts in STEPS:
        expected = cpu.forward(made_up_step(theirs, counts, starts, vocab_size=vocab), StepPlan("serial"))
        for plan in plans(sum(counts)):
            found = gpu.forward(made_up_step(ours, counts, starts, vocab_size=vocab), plan).cpu().float()
            error = (found - expected).norm() / expected.norm()
            assert error < 0.02, (counts, plan, float(error))


def graphed(model: Decoder) -> Executor:
    collective = Alone(MOST, model.config.hidden_size, model.dtype, "cuda")
    return Executor(model, collective, max_tokens=MOST, graphs=True)  # type: ignore[arg-type]


def test_replays_equal_what_was_captured_bit_for_bit(models: tuple[Decoder, Decoder]) -> None:
    """Sizes interleaved, other lengths and tokens at each replay; an executor without graphs runs the padded step."""
    model = models[0]
    cache = caches(model, 60, 16)[0]
    random.seed(0)
    with closing(graphed(model)) as graphs, closing(Executor(model, graphs.collective, max_tokens=MOST)) as plain:
        for _ in range(60):
            counts, starts = random_step()
            total = sum(counts)
            plan = random.choice([StepPlan("fused"), StepPlan("weave", total // 2, 8), StepPlan("serial")])
            batch = with_tokens(made_up_step(cache, counts, starts, vocab_size=97), random.randrange(97))
            found = graphs.forward(batch, plan).clone()
            padded = [replace(lane) for lane in graphs.graphs._padded(batch, plan)]  # type: ignore[union-attr]
            lanes = [moved(lane) for lane in padded]
            with torch.inference_mode():
                expected = plain.run(lanes, plan)
            assert found.equal(expected[:total]), (counts, starts, plan)
        assert graphs.graphs is not None and graphs.graphs.count >= 3
        assert graphs.graphs.pool_bytes > 0


def moved(lane: Batch) -> Batch:
    names = ("token_ids", "positions", "query_offsets", "context_lengths", "slot_mapping", "block_tables")
    return replace(lane, **{name: getattr(lane, name).cuda() for name in names})


def random_step() -> tuple[list[int], list[int]]:
    kind = random.randrange(3)
    if kind == 0:  # decodes
        count = random.choice([1, 3, 8])
        return [1] * count, [random.randrange(40) for _ in range(count)]
    if kind == 1:
        return [random.choice([60, 64, 57])], [0]
    return [random.choice([30, 33]), 1, 29], [random.choice([0, 17]), random.randrange(1, 30), 5]


def with_tokens(batch: Batch, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return replace(batch, token_ids=torch.randint(0, 97, batch.token_ids.shape, generator=generator))


def test_a_step_inside_a_capture_is_refused(models: tuple[Decoder, Decoder]) -> None:
    model = models[0]
    cache: KVCache = caches(model, 8, 16)[0]
    with closing(graphed(model)) as graphs:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            graph.capture_begin()
            try:
                with pytest.raises(RuntimeError, match="outside of a capture"):
                    graphs.forward(made_up_step(cache, [3], [0], vocab_size=97), StepPlan("fused"))
            finally:
                graph.capture_end()
