"""Ranks, groups of them, and the collectives they share."""

from tokenweave.comm.collective import Collective, CommunicationError
from tokenweave.comm.group import Group, group_from_environment
from tokenweave.comm.launcher import launch

__all__ = ["Collective", "CommunicationError", "Group", "group_from_environment", "launch"]
