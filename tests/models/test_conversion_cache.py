"""Conversions in the cache: one per content, whole or not at all, whatever happens on the way."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenweave.models.conversion_cache import cache_root, converted


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenweave"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"content")
    return path


class Convert:
    """Writes two files, and counts."""

    def __init__(self, fail: Callable[[], None] = lambda: None) -> None:
        self.calls, self.fail = 0, fail

    def __call__(self, source: Path, directory: Path, dtype: str) -> None:
        self.calls += 1
        (directory / "config.json").write_text(dtype)
        self.fail()
        (directory / "weights").write_bytes(source.read_bytes())


def entries(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name != "digests")


def test_made_once(root: Path, source: Path) -> None:
    convert = Convert()
    first = converted(source, "float32", convert)
    assert first.parent == root and (first / "weights").read_bytes() == b"content"
    assert converted(source, "float32", convert) == first and convert.calls == 1
    assert converted(source, "bfloat16", convert) != first and convert.calls == 2


def test_belongs_to_the_content(root: Path, source: Path, tmp_path: Path) -> None:
    convert = Convert()
    first = converted(source, "float32", convert)
    copy = tmp_path / "elsewhere" / "model.gguf"
    copy.parent.mkdir()
    shutil.copy(source, copy)
    os.utime(copy, (1, 1))
    assert converted(copy, "float32", convert) == first and convert.calls == 1
    source.write_bytes(b"CONTENT")  # as long, but other
    os.utime(source, (2, 2))
    assert converted(source, "float32", convert) != first and convert.calls == 2


def test_known_file_is_not_read_again(root: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = converted(source, "float32", Convert())
    source.chmod(0)
    monkeypatch.setattr("hashlib.file_digest", lambda *_: pytest.fail("the content was read"))
    assert converted(source, "float32", Convert()) == first


@pytest.mark.parametrize("error", [ValueError("damaged"), KeyboardInterrupt(), MemoryError()])
def test_nothing_is_left_of_a_failure(error: BaseException, root: Path, source: Path) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        converted(source, "float32", Convert(fail))
    assert entries(root) == []
    assert (converted(source, "float32", Convert()) / "weights").is_file()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk(code: int, root: Path, source: Path) -> None:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    with pytest.raises(ValueError, match="cache .* is full.*free some, or set XDG_CACHE_HOME") as caught:
        converted(source, "float32", Convert(fail))
    assert entries(root) == [] and "\n" not in str(caught.value)


def test_place_that_cannot_be_written(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="cannot be written"):
        converted(source, "float32", Convert())


def test_starts_at_the_same_time(root: Path, source: Path) -> None:
    convert, found = Convert(lambda: time.sleep(0.1)), []
    threads = [threading.Thread(target=lambda: found.append(converted(source, "f", convert))) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert convert.calls == 1 and len(set(found)) == 1 and len(found) == 5


CHILD = """
import sys, time
from pathlib import Path
from tokenweave.models.conversion_cache import converted

def convert(source, directory, dtype):
    with open(directory / "weights", "wb") as file:
        for _ in range(100):
            file.write(bytes(1 << 16))
            file.flush()
            print("writing", flush=True)
            time.sleep(float(sys.argv[2]))

try:
    print(converted(Path(sys.argv[1]), "float32", convert))
except ValueError as error:
    print(error)
"""


def child(source: Path, pause: float, **options: object) -> subprocess.Popen:
    command = [sys.executable, "-c", CHILD, str(source), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]


def test_killed_while_converting(root: Path, source: Path) -> None:
    process = child(source, 0.05)
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert entries(root)[0].endswith(".partial")
    entry = converted(source, "float32", Convert())
    assert entries(root) == [entry.name] and (entry / "weights").read_bytes() == b"content"


def test_disk_that_really_refuses(root: Path, source: Path) -> None:
    """A limit on file size stands in for a full disk: the write itself fails half-way."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    process = child(source, 0, preexec_fn=limit)
    output, _ = process.communicate(timeout=60)
    assert output.splitlines()[-1].startswith(f"the cache {root} cannot be written (")
    assert entries(root) == []


def test_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/path"):  # relative ones are to be ignored, says the XDG specification
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_root() == tmp_path / ".cache" / "tokenweave"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_root() == tmp_path / "x" / "tokenweave"
