"""The executors: one stage list, run in several ways."""

from tokenweave.execute.executor import Executor

__all__ = ["Executor"]
