import subprocess
import sys
from pathlib import Path

from tokenweave.comm.kernels import exchange, kept

KERNEL = """
from numba import njit
from helper import step
from tokenweave.comm.kernels.kept import keep

@keep
@njit(nogil=True, cache=True)
def kernel(x):
    return step(x)
"""
RUN = """
from kernel import kernel
{before}
print(kernel({argument}), sum(kernel.stats.cache_misses.values()))
"""


def run(folder: Path, argument: str, before: str = "") -> str:
    program = RUN.format(argument=argument, before=before)
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=60)
    assert not done.stderr or before, done.stderr
    return done.stdout.strip()


def write(folder: Path, factor: int) -> None:
    (folder / "helper.py").write_text(f"from numba import njit\n\n@njit\ndef step(x):\n    return {factor} * x\n")
    (folder / "kernel.py").write_text(KERNEL)


def codes(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("__pycache__/*.nbc")}


def test_compiled_once_for_each_type_and_anew_when_another_file_of_the_folder_changes(tmp_path: Path) -> None:
    write(tmp_path, 2)
    assert [run(tmp_path, "5"), run(tmp_path, "5"), run(tmp_path, "0.5")] == ["10 1", "10 0", "1.0 1"]
    before = codes(tmp_path)
    (tmp_path / "helper.py").write_text((tmp_path / "helper.py").read_text().replace("2 * x", "3 * x"))
    assert [run(tmp_path, "5"), run(tmp_path, "5")] == ["15 1", "15 0"]
    assert len(before) == 2 and len(codes(tmp_path)) == 1 and not codes(tmp_path) & before  # the old code is gone


def test_a_process_that_ends_between_two_writes_leaves_no_entry_with_old_code(tmp_path: Path) -> None:
    write(tmp_path, 2)
    assert run(tmp_path, "5") == "10 1"
    write(tmp_path, 3)
    for write_that_dies in ("_save_index", "_save_data"):
        dies = f"import os; kernel._cache._cache_file.{write_that_dies} = lambda *_: os._exit(1)"
        assert run(tmp_path, "5", dies) == ""
    assert run(tmp_path, "5") == "15 1"


def test_two_processes_at_once_do_not_mix_their_code(tmp_path: Path) -> None:
    """Both have seen an empty index; the second, for another type, writes between the first one's two writes."""
    write(tmp_path, 2)
    second = RUN.format(argument="0.5", before="kernel._cache._cache_file._load_index = dict")
    first = f"""
import subprocess, sys
files, save_data = kernel._cache._cache_file, kernel._cache._cache_file._save_data
def save_later(name, data):
    subprocess.run([sys.executable, "-c", {second!r}], check=True)
    save_data(name, data)
files._save_data = save_later
"""
    assert run(tmp_path, "5", first).splitlines() == ["1.0 1", "10 1"]
    assert [run(tmp_path, "0.5"), run(tmp_path, "5")] == ["1.0 0", "10 0"]


def test_the_kernels_of_the_collective_are_kept_so() -> None:
    stamp = kept.sources(Path(kept.__file__).parent)
    for kernel in (exchange.exchange, exchange.combine, exchange.meet):
        assert kernel._cache._cache_file._source_stamp == stamp
