"""Puts the tests' own helper modules on the path of the tests and of the ranks they start; has most ranks forked."""

import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from forked_ranks import AS_USERS_DO, Starter

from tokenweave.comm import rank_process

# A shell starts what runs in the background with interrupts ignored, and children inherit that: those that are
# interrupted by a test would not notice.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_FORKED = Starter().start
_MARKS = ("started", "gpu", "multigpu", "vllm")


@pytest.hookimpl(tryfirst=True)  # before the fixtures of modules
def pytest_runtest_setup(item: pytest.Item) -> None:
    started = any(item.get_closest_marker(mark) for mark in _MARKS)
    rank_process.start = AS_USERS_DO if started else _FORKED  # type: ignore[assignment]
