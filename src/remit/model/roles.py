"""Roles in which actors make claims."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Role(StrEnum):
    """The capacity in which an actor makes a claim. Each lifecycle transition is owned by exactly one role."""

    __hash__ = str.__hash__  # Enum's own hash is written in Python, and every claim looks roles up.

    USER = "user"
    OPERATOR = "operator"
    SCHEDULER = "scheduler"
    AGENT = "agent"
    NODES = "node-lifecycle"
    REPAIR = "repair"
    ROLLOUT = "rollout"
    WORKLOADS = "workloads"
    ENDPOINTS = "endpoints"
    BUDGETS = "budgets"
    POLICY = "policy"
    AUTOSCALER = "autoscaler"
    AUTHORITY = "authority"


OPERATORS: Final = frozenset({Role.OPERATOR})
PEOPLE: Final = frozenset({Role.USER, Role.OPERATOR})
