"""The command itself: help, version, streams that the shell has closed."""

import subprocess
import sys
from importlib.metadata import version

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
