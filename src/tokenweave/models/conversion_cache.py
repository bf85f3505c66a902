"""Converted models in the user's cache: made once, whole or not at all, found again in a millisecond."""

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenweave.config.cache import cache_root

VERSION = 1  # of what a conversion writes; another number makes every entry anew
_PARTIAL = ".partial"


def converted(source: Path, dtype: str, convert: Callable[[Path, Path, str], None]) -> Path:
    """The directory that convert(source, directory, dtype) fills, from the cache where it is there already.

    An entry belongs to the file's content, so that a copy, or the same file in another environment, finds it; the
    content's digest is kept by path, size and time of change, and only taken anew (1 GB a second) if these changed.
    Starts at the same time make one entry: the others wait for it. Raises ValueError if the cache cannot be written.
    """
    root = cache_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        entry = root / f"{source.stem[:80]}-{_digest(source, root)}-{dtype}-v{VERSION}"
        if not entry.is_dir():
            with _locked(root):
                if not entry.is_dir():
                    _make(entry, lambda directory: convert(source, directory, dtype))
    except OSError as error:
        what = "is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"cannot be written ({error})"
        raise ValueError(
            f"the cache {root} {what}: converting {source.name} needs room there; "
            "free some, or set XDG_CACHE_HOME to another place"
        ) from None
    return entry


def _make(entry: Path, fill: Callable[[Path], None]) -> None:
    """Fill a directory beside `entry` and rename it. Under the lock any other partial one is what a kill has left."""
    for stale in entry.parent.glob(f"*{_PARTIAL}"):
        shutil.rmtree(stale, ignore_errors=True)
    partial = entry.with_name(entry.name + _PARTIAL)
    try:
        partial.mkdir()
        fill(partial)
        for path in [*partial.iterdir(), partial]:
            _sync(path)
        partial.rename(entry)
        _sync(entry.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _digest(source: Path, root: Path) -> str:
    """Of the file's content, 16 hexadecimal digits."""
    status = source.stat()
    key = f"{source.resolve()}|{status.st_size}|{status.st_mtime_ns}"
    note = root / "digests" / hashlib.sha256(key.encode()).hexdigest()[:32]
    try:
        known = note.read_text(encoding="ascii")
        if len(known) == 16:
            return known
    except OSError:
        pass
    with open(source, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    fresh = note.with_name(f"{note.name}.{os.getpid()}")
    try:
        note.parent.mkdir(exist_ok=True)
        fresh.write_text(digest, encoding="ascii")
        fresh.rename(note)
    except OSError:  # a full or read-only cache may still hold the entry
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
    return digest


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """One conversion at a time. The lock is on the directory itself: no file is left, and a killed holder frees it."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
