"""Ranks, groups of them, and the collectives they share."""

from typing import TYPE_CHECKING, Any

from tokenweave.comm.collective import Collective, CommunicationError
from tokenweave.comm.launcher import launch

if TYPE_CHECKING:
    from tokenweave.comm.group import Group

__all__ = ["Collective", "CommunicationError", "Group", "launch"]


def __getattr__(name: str) -> Any:
    """Group is imported on first use: it needs torch, which a process that only starts ranks does not."""
    if name == "Group":
        from tokenweave.comm.group import Group

        return Group
    raise AttributeError(f"module 'tokenweave.comm' has no attribute {name!r}")
