"""Compiled kernels kept on disk, so that they are compiled once on a machine."""

import hashlib
from pathlib import Path
from typing import Any

from numba.core.caching import IndexDataCacheFile


def keep(compiled: Any) -> Any:
    """Have a function of `njit(cache=True)` kept by what it is made of.

    Numba compares what it kept with the function's own file only; here with all files of its folder, whose functions
    it calls. And it numbers the files of code and writes the index first: two processes that compile for two types at
    once could leave one type's entry with the other's code, and one that is killed in between an entry with old code.
    Here a file is named by the entry and written before the index: the worst is to compile once more.
    """
    cache, folder = compiled._cache, Path(compiled.py_func.__code__.co_filename).parent
    cache._cache_file = _Files(cache.cache_path, cache._impl.filename_base, sources(folder))
    return compiled


def sources(folder: Path) -> str:
    """A hash of all Python files in a folder."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))).hexdigest()


class _Files(IndexDataCacheFile):
    def __init__(self, folder: str, base: str, sources: str) -> None:
        super().__init__(folder, base, sources)
        self._folder, self._base, self._sources = Path(folder), base, sources

    def save(self, key: Any, data: Any) -> None:
        if not self._load_index():  # the first since the sources changed
            for old in self._folder.glob(f"{self._base}.*.nbc"):
                old.unlink(missing_ok=True)
        name = f"{self._base}.{hashlib.sha256(repr((self._sources, key)).encode()).hexdigest()[:16]}.nbc"
        self._save_data(name, data)
        self._save_index(self._load_index() | {key: name})
