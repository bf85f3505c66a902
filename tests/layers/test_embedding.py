import pytest
import torch
from layer_cases import BASE, HALF_TOLERANCE, distance, fill

from tokenweave.config import ModelConfig, shard
from tokenweave.layers.batch import Batch
from tokenweave.layers.embedding import VocabParallelEmbedding, VocabParallelHead

SIZES = [(31, 1), (31, 3), (5, 5), (32001, 2), (32064, 5), (151552, 6)]


def model(vocabulary: int, hidden: int = 4) -> ModelConfig:
    return ModelConfig(**BASE | dict(vocab_size=vocabulary, hidden_size=hidden, num_attention_heads=6))


def make(
    table: torch.Tensor, size: int, rank: int, output: torch.Tensor | None = None
) -> tuple[VocabParallelEmbedding, VocabParallelHead]:
    config = model(*table.shape)
    embedding = VocabParallelEmbedding(config, shard(config, size, rank), dtype=table.dtype)
    head = VocabParallelHead(embedding, tied=output is None)
    fill(embedding.pieces("embed"), {"weight": table}, "embed")
    fill(head.pieces("lm_head"), {} if output is None else {"weight": output}, "lm_head")
    return embedding, head


def ids(*values: int) -> Batch:
    return Batch.prompts([list(values)])


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("vocabulary, size", SIZES)
def test_each_id_is_found_by_one_rank(vocabulary: int, size: int, kernels: bool) -> None:
    table = torch.randn(vocabulary, 4)
    edges = [shard(model(vocabulary), size, rank).vocab_rows for rank in range(size)]
    wanted = [i for rows in edges for i in (rows.start, rows.stop - 1)] + [0, vocabulary - 1]
    with torch.set_grad_enabled(not kernels):
        parts = torch.stack([make(table, size, rank)[0](None, ids(*wanted), None) for rank in range(size)])
    assert torch.equal(parts.sum(0), table[wanted])
    assert (parts != 0).any(2).sum(0).eq(1).all()


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("vocabulary, size", SIZES)
def test_slices_of_the_logits_side_by_side(vocabulary: int, size: int, tied: bool, kernels: bool) -> None:
    table, output = torch.randn(vocabulary, 4), torch.randn(vocabulary, 4)
    rows = torch.randn(3, 4)
    with torch.set_grad_enabled(not kernels):
        slices = [make(table, size, rank, None if tied else output)[1](rows) for rank in range(size)]
    oracle = rows.double() @ (table if tied else output).double().T
    assert distance(torch.cat(slices, 1), oracle) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [0, 1, 3, 70])
def test_dtypes_and_row_counts(dtype: torch.dtype, tokens: int) -> None:
    table = torch.randn(67, 33).to(dtype)
    embedding, head = make(table, 2, 1)
    batch, rows = ids(*torch.randint(67, (tokens,)).tolist()), torch.randn(tokens, 33).to(dtype)
    out = torch.full((tokens, 33), 7.0, dtype=dtype)
    with torch.inference_mode():
        fresh = embedding(None, batch, None)
        assert embedding(None, batch, out) is out
        logits = head(rows)
    foreign = batch.token_ids < 33
    assert torch.equal(out, table[batch.token_ids].masked_fill(foreign.unsqueeze(1), 0)) and torch.equal(out, fresh)
    assert distance(logits, rows.double() @ table[33:].double().T) < HALF_TOLERANCE.get(dtype, 1e-6)


def test_tied_weights_are_one_memory() -> None:
    embedding, head = make(torch.randn(31, 4), 2, 0)
    assert head.weight is embedding.weight and not list(head.pieces("lm_head"))


def test_gradients_reach_the_rows_that_were_looked_up() -> None:
    embedding, head = make(torch.randn(31, 4), 2, 0)
    embedding.requires_grad_(True)
    head(embedding(None, ids(2, 30, 2), None)).sum().backward()
    assert embedding.weight.grad is not None and embedding.weight.grad[2].ne(0).all()


@pytest.mark.parametrize("kernels", [True, False])
def test_out_of_the_wrong_size_is_refused(kernels: bool) -> None:
    embedding, _ = make(torch.randn(31, 4), 1, 0)
    with torch.set_grad_enabled(not kernels):
        for tokens, wrong in ((3, (2, 4)), (3, (3, 5)), (1, (3, 4)), (0, (1, 4))):
            with pytest.raises(ValueError, match=rf"out must be \[{tokens}, 4\], got \[{wrong[0]}, {wrong[1]}\]"):
                embedding(None, ids(*range(tokens)), torch.empty(wrong))
