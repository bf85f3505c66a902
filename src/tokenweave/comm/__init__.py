"""Ranks, groups of them, and the collectives they share."""

from typing import TYPE_CHECKING, Any

from tokenweave.comm.collective import Collective, CommunicationError
from tokenweave.comm.launcher import launch

if TYPE_CHECKING:
    from tokenweave.comm.environment import group_from_environment
    from tokenweave.comm.group import Group

__all__ = ["Collective", "CommunicationError", "Group", "group_from_environment", "launch"]


def __getattr__(name: str) -> Any:
    """These need torch, which a process that only starts ranks does not: they are imported on first use."""
    if name == "Group":
        from tokenweave.comm.group import Group

        return Group
    if name == "group_from_environment":
        from tokenweave.comm.environment import group_from_environment

        return group_from_environment
    raise AttributeError(f"module 'tokenweave.comm' has no attribute {name!r}")
