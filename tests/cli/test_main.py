"""The command itself: help, version, streams that the shell has closed."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tokenweave.cli.main import COMMANDS, main


@pytest.mark.parametrize("words", [["--help"], ["-h"]])
def test_help_names_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    out = capsys.readouterr().out
    assert all(f"  {name}" in out for name in COMMANDS)


@pytest.mark.parametrize("words", [["bench"], ["bench", "--help"]])
def test_benchmarks_alone(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "  bench comm" in out and "  generate" not in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tokenweave {version('tokenweave')}\n"


@pytest.mark.parametrize("words", [[], ["nothing"], ["bench", "nothing"], ["nothing", "bench"], ["nothing", "--help"]])
def test_no_such_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.count("\n") == (1 if words else len(COMMANDS) + 3)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_the_shell_has_closed(closed: str) -> None:
    """No traceback: what would be read is empty, what is written goes nowhere."""
    command = f"{sys.executable} -m tokenweave generate - {closed}"
    done = subprocess.run(["sh", "-c", command], input="", capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr in ("tokenweave: error: the prompt is empty; give some text\n", "")


@pytest.mark.parametrize("option", ["--json", "--plot"])
@pytest.mark.parametrize("place", ["", "none/figures.json"])
def test_files_that_cannot_be_made_are_refused_before_the_work(
    option: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "Llama-3.1-8B", option, str(tmp_path / place)]) == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"tokenweave: error: {option} ") and str(tmp_path) in told.err and not told.out


def test_a_file_without_a_directory_is_made_in_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "Llama-3.1-8B", "--json", "figures.json"]) == 0
    assert (tmp_path / "figures.json").stat().st_size > 100


@pytest.mark.parametrize(
    "words, message",
    [
        (["plan", "Llama-3.1-8B", "--tokens", "1,99999999999999999999"], "--tokens takes numbers below 2**31"),
        (["bench", "load", "--gigabytes", "nan"], "--gigabytes must be more than 0"),
        (["bench", "load", "--gigabytes", "-1"], "--gigabytes must be more than 0"),
        (["bench", "load", "--rounds", "0"], "--rounds at least 1"),
        (["bench", "throughput", "--rate", "nan"], "--rate more than 0"),
        (["bench", "throughput", "--seed", "-1"], "--seed must not be negative, got -1"),
        (["bench", "network", "--rates", "1000", "nan"], "--rates more than 0"),
        (["bench", "network", "--rates", "inf"], "--rates more than 0"),
    ],
)
def test_numbers_that_are_none(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err
