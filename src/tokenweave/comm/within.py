"""Deadlines for calls of libraries that have none."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def within(seconds: float | None, call: Callable[[], T]) -> T:
    """What the call returns or raises, in a thread of its own. seconds: None for any number.

    Raises TimeoutError if it takes longer; the thread is left behind, and does not keep the process from ending.
    """
    found: list[Any] = []

    def run() -> None:
        try:
            found.extend((call(), None))
        except BaseException as error:
            found.extend((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        raise TimeoutError(f"not done within {seconds:g} s")
    value, error = found
    if error is not None:
        raise error
    return value
