"""Which tokens a step sees."""

import numpy as np
import pytest
import torch

from tokenweave.train.windows import InOrder, Windows, as_batch

TOKENS = np.arange(103, dtype=np.uint32)


def test_a_pass_sees_every_window_once() -> None:
    windows = Windows(TOKENS, 5, seed=1)
    rows = windows.rows(0, windows.per_pass)
    assert windows.per_pass == 19 and rows.shape == (19, 6) and rows.dtype == np.int64
    starts = sorted(rows[:, 0])
    assert np.diff(starts).tolist() == [5] * 18 and starts[0] < 5
    assert all((row == np.arange(row[0], row[0] + 6)).all() for row in rows)
    again = windows.rows(19, 19)
    assert not np.array_equal(rows, again)


def test_a_function_of_seed_and_place() -> None:
    rows = Windows(TOKENS, 5, seed=1).rows(0, 60)
    other = Windows(TOKENS, 5, seed=1)
    assert np.array_equal(np.concatenate([other.rows(33, 27), other.rows(0, 33)]), np.roll(rows, 27, axis=0))
    assert not np.array_equal(Windows(TOKENS, 5, seed=2).rows(0, 60), rows)


def test_too_short_a_text() -> None:
    Windows(TOKENS[:11], 5, seed=0).rows(0, 3)
    with pytest.raises(ValueError, match="10 tokens"):
        Windows(TOKENS[:10], 5, seed=0)


def test_scoring_covers_the_text_once() -> None:
    windows = InOrder(TOKENS, 25)
    rows = np.concatenate([windows.rows(0, 3), windows.rows(3, 3)])
    assert len(windows) == len(rows) == 4 and rows.dtype == np.int64
    assert rows[:, 1:].flatten().tolist() == list(range(1, 101)) and rows[:, 0].tolist() == [0, 25, 50, 75]
    assert len(InOrder(TOKENS[:1], 25)) == len(InOrder(TOKENS[:0], 25)) == 0


def test_a_batch_of_prompts() -> None:
    batch, targets = as_batch(np.array([[1, 2, 3, 4], [5, 6, 7, 8]]), "cpu")
    assert batch.token_ids.tolist() == [1, 2, 3, 5, 6, 7] and targets.tolist() == [2, 3, 4, 6, 7, 8]
    assert batch.positions.tolist() == [0, 1, 2] * 2 and batch.query_offsets.tolist() == [0, 3, 6]
    assert batch.context_lengths.tolist() == [3, 3] and targets.dtype == torch.int64
