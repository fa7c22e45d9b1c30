"""Which bugs are planted? All of them, from the pages where they are written; and those that must be among them."""

from __future__ import annotations

from typing import Final

from tests.planted import in_authority, in_grants, in_ledgers, in_nodes, in_progress
from tests.planted.bug import BUGS, Bug

PAGES: Final = (in_authority, in_ledgers, in_nodes, in_progress, in_grants)
"""Importing them fills the table."""

__all__ = ["BUGS", "PAGES", "Bug"]
