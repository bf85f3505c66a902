import numpy as np
import pytest
import torch

from tokenweave.engine.step import Step
from tokenweave.engine.tables import BlockTables
from tokenweave.layers.cache import KVCache
from tokenweave.plan.step import StepPlan


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def step(
    slots: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    table: list[tuple[int, int, int]],
    prompts: dict[int, int] | None = None,
) -> Step:
    columns = np.array(table, dtype=np.int32).reshape(-1, 3).T
    total = int(counts.sum())
    return Step(
        StepPlan("fused"), slots, starts, counts, np.arange(total, dtype=np.int32), ints(), ints(), ints(), *columns,
        ints(*(prompts or {})), ints(*(prompts or {}).values()),
    )  # fmt: skip


def test_prompt_lengths_stay_with_their_slots() -> None:
    """Told once, when a request comes: slot 2 of three tokens, slot 0 of nine in two chunks, then slot 2 anew."""
    cache = KVCache.zeros(1, 9, 16, 1, 1, torch.float32)
    tables = BlockTables(slots=3, max_context=16, cache=cache, tells_prompts=True)
    steps = [
        (step(ints(2, 0), ints(0, 0), ints(3, 4), [(2, 0, 1), (0, 0, 2)], {2: 3, 0: 9}), [3, 9]),
        (step(ints(2, 0), ints(3, 4), ints(1, 5), []), [3, 9]),
        (step(ints(0, 2), ints(9, 0), ints(1, 7), [(2, 0, 3)], {2: 7}), [9, 7]),
    ]
    for one, expected in steps:
        lengths = tables.batch(one).prompt_lengths
        assert lengths is not None and lengths.tolist() == expected
    assert BlockTables(slots=3, max_context=16, cache=cache).batch(steps[0][0]).prompt_lengths is None


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_any_mixture_against_plain_loops(block_size: int) -> None:
    """Three steps in a row; slots out of order, chunks of 1, 3, 13 and 33 tokens."""
    rng = np.random.default_rng(block_size)
    tables = BlockTables(slots=5, max_context=100, cache=KVCache.zeros(1, 500, block_size, 1, 1, torch.float32))
    free = rng.permutation(500).tolist()
    blocks: dict[int, list[int]] = {slot: [] for slot in range(5)}
    lengths = dict.fromkeys(range(5), 0)
    for plan in ([(4, 1), (1, 13)], [(1, 1), (4, 1), (0, 33)], [(4, 3), (0, 1), (3, 1)], [(3, 1), (0, 1)]):
        table = []
        for slot, count in plan:
            while len(blocks[slot]) * block_size < lengths[slot] + count:
                table.append((slot, len(blocks[slot]), free.pop()))
                blocks[slot].append(table[-1][2])
        slots, counts = (np.array(column, dtype=np.int32) for column in zip(*plan, strict=True))
        starts = np.array([lengths[slot] for slot, _ in plan], dtype=np.int32)
        batch = tables.batch(step(slots, starts, counts, table))
        places = [(slot, lengths[slot] + i) for slot, count in plan for i in range(count)]
        assert batch.positions.tolist() == [position for _, position in places]
        expected = [blocks[s][p // block_size] * block_size + p % block_size for s, p in places]
        assert batch.slot_mapping is not None and batch.slot_mapping.tolist() == expected
        for slot, count in plan:
            lengths[slot] += count
        assert batch.context_lengths.tolist() == [lengths[slot] for slot, _ in plan]
        assert batch.query_offsets.tolist() == [0, *np.cumsum(counts).tolist()]
        assert batch.block_tables is not None
        for row, (slot, _) in zip(batch.block_tables.tolist(), plan, strict=True):
            assert row[: len(blocks[slot])] == blocks[slot]
        dtypes = [t.dtype for t in (batch.token_ids, batch.positions, batch.slot_mapping)]
        assert dtypes == [torch.int64] * 3
        assert {t.dtype for t in (batch.query_offsets, batch.context_lengths, batch.block_tables)} == {torch.int32}
