"""Registry of all planted bugs, and of those that must be among them."""

from __future__ import annotations

from typing import Final

from tests.planted import (
    authority_bugs,
    controller_bugs,
    grant_bugs,
    keeper_bugs,
    ledger_bugs,
    liveness_bugs,
    node_bugs,
    scheduling_bugs,
)
from tests.planted.planted_bug import BUGS, Bug

PAGES: Final = (
    authority_bugs, ledger_bugs, node_bugs, keeper_bugs, controller_bugs, liveness_bugs, grant_bugs, scheduling_bugs
)  # fmt: skip
"""Importing these modules fills the registry."""

REQUIRED: Final[dict[str, str]] = {
    "the epoch check is skipped": "the-epoch-check-is-skipped",
    "an operation id is forgotten": "operation-ids-are-forgotten",
    "an expired id is executed": "expired-ids-are-executed",
    "a lost transaction lands after the read-back": "a-lost-commit-is-settled-by-a-read",
    "a refusal is answered by a deposed authority": "refusals-are-answered-before-the-commit",
    "released capacity is counted twice": "released-capacity-is-counted-twice",
    "capacity is freed at the drain": "capacity-is-freed-at-the-drain",
    "bound before the victim stopped": "bound-before-the-victims-stopped",
    "a gang is bound in two transactions": "a-gang-is-bound-in-two-transactions",
    "a stale list is trusted after a restart": "a-stale-list-is-trusted-after-a-restart",
    "a wake-up is dropped": "a-wake-up-is-dropped",
    "a grant outlives its parent": "a-grant-outlives-its-parent",
    "a grant of an unreported holder is granted again": "an-unreported-grant-is-granted-again",
    "a grant is resurrected by a restore": "a-grant-is-resurrected-by-a-restore",
    "a lease's term is counted from receipt": "a-term-counts-from-receipt",
    "a takeover keeps the old lease clocks": "a-takeover-keeps-the-old-clocks",
    "an order is executed after its release": "an-attempt-is-started-after-its-release",
    "a policy is used past its lease": "a-policy-is-used-past-its-lease",
}
"""Required bugs, and the names under which they are planted."""

__all__ = ["BUGS", "PAGES", "REQUIRED", "Bug"]
