"""Token ids read from a file as they are asked for."""

from pathlib import Path

import numpy as np
import pytest

from tokenweave.train.tokens import TokenFile
from tokenweave.train.windows import InOrder, Windows

TOKENS = np.arange(103, dtype=np.uint32)


@pytest.mark.parametrize(("start", "stop"), [(0, None), (0, 0), (7, 90), (90, None), (103, None)])
def test_slices_are_the_arrays(start: int, stop: int | None, tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", TOKENS)
    found, expected = TokenFile(tmp_path / "tokens.npy", start, stop), TOKENS[start:stop]
    assert len(found) == len(expected)
    for part in (slice(None), slice(0, 5), slice(13, 33), slice(40, 500), slice(9, 3)):
        assert found[part].dtype == np.uint32 and np.array_equal(found[part], expected[part])


def test_windows_are_the_arrays(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", TOKENS)
    file = TokenFile(tmp_path / "tokens.npy", 3)
    assert np.array_equal(Windows(file, 5, seed=1).rows(0, 40), Windows(TOKENS[3:], 5, seed=1).rows(0, 40))
    assert np.array_equal(InOrder(file, 5).rows(2, 9), InOrder(TOKENS[3:], 5).rows(2, 9))


def test_reading_keeps_nothing_mapped(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", TOKENS)
    file = TokenFile(tmp_path / "tokens.npy")
    assert file[2:4].tolist() == [2, 3] and "tokens.npy" not in Path("/proc/self/maps").read_text()
