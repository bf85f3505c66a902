import pytest
import torch
from layer_cases import (
    CONFIGS,
    DEMO,
    EVERYTHING,
    HALF_TOLERANCE,
    ONE_KV,
    TINY,
    Paged,
    attention_oracle,
    distance,
    fill,
    paged,
    tensors,
)  # fmt: skip

from tokenweave.config import ModelConfig, shard
from tokenweave.layers.attention import Attention
from tokenweave.layers.batch import Batch
from tokenweave.layers.rotary import Rope

REQUESTS = {
    "one token": [(1, 1)],
    "prompt": [(13, 13)],
    "mixed": [(3, 3), (1, 40), (5, 21), (1, 16), (1, 17)],
    "long context": [(1, 577), (2, 33)],
    "chunk and decodes": [(33, 50), (1, 2), (1, 64)],
}


def make(config: ModelConfig, checkpoint: dict[str, torch.Tensor], *, size: int = 1, rank: int = 0, layer: int = 0,
         dtype: torch.dtype = torch.float32) -> Attention:  # fmt: skip
    attention = Attention(config, shard(config, size, rank), layer, Rope(config), dtype=dtype)
    fill(attention.pieces("model.layers.0.self_attn"), checkpoint, "model.layers.0.self_attn")
    return attention


def partials(
    config: ModelConfig, checkpoint: dict[str, torch.Tensor], x: torch.Tensor, case: Paged, size: int, layer: int = 0
) -> list[torch.Tensor]:
    return [
        make(config, checkpoint, size=size, rank=rank, layer=layer, dtype=x.dtype)(
            x, case.rank(shard(config, size, rank).kv_heads), None
        )
        for rank in range(size)
    ]


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("block_size", [1, 3, 7, 16])
@pytest.mark.parametrize("requests", REQUESTS.values(), ids=REQUESTS)
def test_equals_the_formula(requests: list[tuple[int, int]], block_size: int, kernels: bool) -> None:
    for config in CONFIGS.values():
        case = paged(config, requests, block_size=block_size)
        x = torch.randn(case.batch.num_tokens, config.hidden_size)
        oracle = attention_oracle(config, tensors(config), x, case, layer=1)
        with torch.set_grad_enabled(not kernels):  # gradients are torch's
            [partial] = partials(config, tensors(config), x, case, 1, layer=1)
        assert distance(partial, oracle) < 2e-5


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_partial_sums_add_up_to_the_unsharded_layer(config: ModelConfig, size: int, kernels: bool) -> None:
    """Includes KV heads replicated over ranks (2 heads on 4 ranks, 1 on 2), a bias counted once, and norms per head."""
    case = paged(config, REQUESTS["mixed"], block_size=3)
    x = torch.randn(case.batch.num_tokens, config.hidden_size)
    oracle = attention_oracle(config, tensors(config), x, case)
    with torch.set_grad_enabled(not kernels):
        parts = partials(config, tensors(config), x, case, size)
    assert distance(torch.stack(parts).double().sum(0), oracle) < 2e-5
    # control: one rank missing, or counted twice, is seen
    for wrong in (parts[1:], [*parts, parts[0]]):
        assert distance(torch.stack(wrong).double().sum(0), oracle) > 1e-2


def test_bias_on_every_rank_is_seen() -> None:
    case = paged(EVERYTHING, [(3, 5)], block_size=4)
    x = torch.randn(3, EVERYTHING.hidden_size)
    first, second = (make(EVERYTHING, tensors(EVERYTHING), size=2, rank=rank) for rank in range(2))
    assert first.output.bias is not None and second.output.bias is None
    oracle = attention_oracle(EVERYTHING, tensors(EVERYTHING), x, case)
    with torch.no_grad():
        total = sum(partials(EVERYTHING, tensors(EVERYTHING), x, case, 2))
    assert distance(total + first.output.bias, oracle) > 1e-2


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", HALF_TOLERANCE)
@pytest.mark.parametrize("requests", [REQUESTS["mixed"], [(65, 65), (1, 30)]])
def test_half_types_are_as_exact_as_torch(dtype: torch.dtype, requests: list[tuple[int, int]], threads: int) -> None:
    """65 rows of bfloat16 on two threads take the path on which torch multiplies."""
    torch.set_num_threads(threads)
    errors: dict[bool, list[float]] = {True: [], False: []}
    for config in (EVERYTHING, DEMO, ONE_KV):
        checkpoint = tensors(config, dtype=dtype)
        case = paged(config, requests, block_size=16, dtype=dtype)
        x = torch.randn(case.batch.num_tokens, config.hidden_size).to(dtype)
        oracle = attention_oracle(config, checkpoint, x, case)
        for kernels in errors:
            with torch.set_grad_enabled(not kernels):
                [partial] = partials(config, checkpoint, x, case, 1)
            errors[kernels].append((partial.double() - oracle).norm().item() / oracle.norm().item())
    assert max(errors[True]) < HALF_TOLERANCE[dtype]
    assert sum(errors[True]) < 1.1 * sum(errors[False])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_writes_what_torch_writes_to_the_cache(dtype: torch.dtype) -> None:
    for config in (EVERYTHING, DEMO):
        case = paged(config, REQUESTS["mixed"], block_size=3, dtype=dtype)
        x = torch.randn(case.batch.num_tokens, config.hidden_size).to(dtype)
        written = []
        for kernels in (True, False):
            batch = case.rank(slice(0, config.num_key_value_heads))
            with torch.set_grad_enabled(not kernels):
                make(config, tensors(config, dtype=dtype), dtype=dtype)(x, batch, None)
            assert batch.cache is not None
            written.append(torch.stack((batch.cache.keys, batch.cache.values)))
        torch.testing.assert_close(*written, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-5, equal_nan=True)
        new = torch.zeros(written[0].shape[2:4], dtype=torch.bool).flatten()
        new[case.batch.slot_mapping] = True
        assert case.batch.cache is not None
        before = torch.stack((case.batch.cache.keys, case.batch.cache.values))
        for now in written:  # nothing else is touched, the other layer least of all
            assert now[:, 1].equal(before[:, 1]) or now[:, 1].isnan().equal(before[:, 1].isnan())
            kept, were = now[:, 0].flatten(1, 2)[:, ~new], before[:, 0].flatten(1, 2)[:, ~new]
            assert torch.equal(kept.nan_to_num(7.0), were.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_request_alone_gives_the_same_bits_as_in_a_batch(dtype: torch.dtype) -> None:
    requests = [(1, 40), (2, 3), (1, 1), (5, 21), (1, 17)]
    for config in (EVERYTHING, DEMO):
        attention = make(config, tensors(config, dtype=dtype), dtype=dtype)
        case = paged(config, requests, block_size=4, dtype=dtype)
        x = torch.randn(case.batch.num_tokens, config.hidden_size).to(dtype)
        with torch.inference_mode():
            together = attention(x, case.rank(slice(0, config.num_key_value_heads)), None)
            start = 0
            for i, (new, context) in enumerate(requests):
                batch = case.rank(slice(0, config.num_key_value_heads))
                own = slice(start, start + new)
                alone = Batch(
                    batch.token_ids[own], batch.positions[own], torch.tensor([0, new], dtype=torch.int32),
                    torch.tensor([context], dtype=torch.int32), batch.slot_mapping[own], batch.block_tables[i : i + 1],
                    batch.cache,
                )  # fmt: skip
                assert torch.equal(attention(x[own], alone, None), together[own])
                start += new


def test_a_prompt_in_chunks_gives_the_same_bits_as_at_once() -> None:
    case = paged(DEMO, [(15, 15)], block_size=4)
    attention = make(DEMO, tensors(DEMO))
    x = torch.randn(15, DEMO.hidden_size)
    with torch.inference_mode():
        whole = attention(x, case.rank(slice(0, 3)), None)
        for cuts in ([1], [7], [3, 4, 12], list(range(1, 15))):
            rest, rows = case.rank(slice(0, 3)), []
            for begin, end in zip([0, *cuts], [*cuts, 15], strict=True):
                chunk, rest = rest.split(end - begin)
                rows.append(attention(x[begin:end], chunk, None))
            assert torch.equal(torch.cat(rows), whole)


@pytest.mark.parametrize("tokens", [3, 60])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_out_may_be_the_memory_of_the_input(dtype: torch.dtype, tokens: int) -> None:
    case = paged(EVERYTHING, [(tokens, tokens + 2)], block_size=3, dtype=dtype)
    attention = make(EVERYTHING, tensors(EVERYTHING, dtype=dtype), dtype=dtype)
    x = torch.randn(tokens, EVERYTHING.hidden_size).to(dtype)
    with torch.inference_mode():
        fresh = attention(x.clone(), case.rank(slice(0, 2)), None)
        for out in (x.clone(), torch.empty_like(x)):
            source = out if out.equal(x) else x
            result = attention(source, case.rank(slice(0, 2)), out)
            assert result.data_ptr() == out.data_ptr() and torch.equal(out, fresh)
        strided = torch.empty(tokens, 2 * EVERYTHING.hidden_size, dtype=dtype)[:, ::2]  # torch's path takes it
        assert distance(attention(x, case.rank(slice(0, 2)), strided), fresh.double()) < 2e-2


def test_without_a_cache_a_prompt_attends_to_itself_only() -> None:
    prompts = [[1, 2, 3], [4], [5] * 21]
    case = paged(EVERYTHING, [(len(p), len(p)) for p in prompts], block_size=16)
    x = torch.randn(25, EVERYTHING.hidden_size)
    oracle = attention_oracle(EVERYTHING, tensors(EVERYTHING), x, case)
    with torch.inference_mode():
        assert distance(make(EVERYTHING, tensors(EVERYTHING))(x, Batch.prompts(prompts), None), oracle) < 2e-5


@pytest.mark.parametrize("config", [EVERYTHING, ONE_KV], ids=["everything", "one kv head"])
def test_gradients_equal_those_of_the_formula(config: ModelConfig) -> None:
    prompts = [[1, 2, 3], [4], [5] * 9]
    case = paged(config, [(len(p), len(p)) for p in prompts], block_size=16)
    attention = make(config, tensors(config)).requires_grad_(True)
    x = torch.randn(13, config.hidden_size, requires_grad=True)
    attention(x, Batch.prompts(prompts), None).square().sum().backward()

    exact = {name: tensor.double().requires_grad_(True) for name, tensor in tensors(config).items()}
    x_exact = x.detach().double().requires_grad_(True)
    attention_oracle(config, exact, x_exact, case).square().sum().backward()
    gradients = {name: tensor.grad for name, tensor in exact.items()}
    fused = [torch.cat([gradients[f"{n}_proj.{part}"] for n in "qkv"]) for part in ("weight", "bias")
             if f"q_proj.{part}" in gradients]  # fmt: skip
    found = [attention.qkv.weight.grad, getattr(attention.qkv.bias, "grad", None)]
    for gradient, oracle in zip(found, fused, strict=False):
        assert distance(gradient, oracle) < 1e-4
    assert distance(attention.output.weight.grad, gradients["o_proj.weight"]) < 1e-4
    assert distance(attention.query_norm.weight.grad, gradients["q_norm.weight"]) < 1e-4
    assert distance(x.grad, x_exact.grad) < 1e-4


def test_no_tokens() -> None:
    case = paged(EVERYTHING, [], block_size=4)
    attention = make(EVERYTHING, tensors(EVERYTHING))
    for batch in (case.batch, Batch.prompts([])):
        for enabled in (True, False):
            with torch.set_grad_enabled(enabled):
                assert attention(torch.empty(0, EVERYTHING.hidden_size), batch, None).shape == (0, 20)


def test_nan_in_one_request_stays_there() -> None:
    case = paged(DEMO, [(1, 20), (1, 20), (3, 20)], block_size=16)
    x = torch.randn(5, DEMO.hidden_size)
    x[1] = float("nan")
    with torch.inference_mode():
        out = make(DEMO, tensors(DEMO))(x, case.rank(slice(0, 3)), None)
    assert out[1].isnan().all() and out[[0, 2, 3, 4]].isfinite().all()


def test_weights_that_moved_are_used() -> None:
    """Views of the old memory would give the old result, or another dtype's bits."""
    case = paged(EVERYTHING, [(2, 5)], block_size=4)
    attention = make(EVERYTHING, tensors(EVERYTHING))
    x = torch.randn(2, EVERYTHING.hidden_size)
    with torch.inference_mode():
        attention(x, case.rank(slice(0, 2)), None)
    for name, parameter in attention.named_parameters():
        assert name
        parameter.data = parameter.data.clone() * 0
    with torch.inference_mode():
        assert not attention(x, case.rank(slice(0, 2)), None).any()


def test_what_does_not_fit_is_refused() -> None:
    case = paged(TINY, [(2, 5)], block_size=4)
    attention = make(TINY, tensors(TINY))
    with torch.inference_mode():
        with pytest.raises(RuntimeError):
            attention(torch.randn(2, 9), case.batch, None)
        with pytest.raises(RuntimeError):
            attention(torch.randn(2, 8).bfloat16(), case.batch, None)
        long = paged(TINY, [(1, 1025)], block_size=64)
        with pytest.raises(ValueError, match="1025 tokens is longer than the model's 1024"):
            attention(torch.randn(1, 8), long.batch, None)
        halves = paged(TINY, [(2, 5)], block_size=4, dtype=torch.bfloat16)  # a cache of another type
        with pytest.raises(RuntimeError):
            attention(torch.randn(2, 8), halves.batch, None)
