"""A text's token ids, of which a rank reads what it needs."""

from pathlib import Path

import numpy as np


class TokenFile:
    """Ids start to stop of a .npy file of one dimension: slices of it are read from the file when they are taken.

    Pages of a mapped file count as the process's memory, and random windows touch all of them in the end.
    """

    def __init__(self, path: Path, start: int = 0, stop: int | None = None) -> None:
        mapped = np.load(path, mmap_mode="r")
        self._path, self._dtype, self._offset = path, mapped.dtype, mapped.offset
        self._start, self._stop, _ = slice(start, stop).indices(len(mapped))

    def __len__(self) -> int:
        return max(0, self._stop - self._start)

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, step = part.indices(len(self))
        assert step == 1
        skipped = self._offset + (self._start + start) * self._dtype.itemsize
        return np.fromfile(self._path, self._dtype, max(0, stop - start), offset=skipped)
