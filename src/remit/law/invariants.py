"""The twelve invariants and what enforces each.

Statements for the documentation. The checks are in simulate/checkers/.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Invariant(NamedTuple):
    number: int
    name: str
    statement: str
    enforced_by: str


INVARIANTS: Final[tuple[Invariant, ...]] = (
    Invariant(
        1,
        "one-owner-per-device",
        "An exclusive device has at most one owner.",
        "A device is a resource of its node with 1000 thousandths; a whole device takes all of them.",
    ),
    Invariant(
        2,
        "node-ledgers-balance",
        "A node's ledger is the sum of its replicas, and never exceeds its capacity.",
        "Rows are the only postings; a claim is accepted only if `fit` holds against the books and the batch so far.",
    ),
    Invariant(
        3,
        "one-binding",
        "A replica has at most one binding; a fenced replica never runs twice at once.",
        "`bind` starts only from pending or reserved; an unknown replica fails only after its node's fence has passed.",
    ),
    Invariant(
        4,
        "grants-cover",
        "Granted on plus used never exceeds the granted amount, in every scope.",
        "Each draw and each issue is checked against the grant's ledger; amounts are debited before they are credited.",
    ),
    Invariant(
        5,
        "quota-covers",
        "A tenant's usage never exceeds its quota and emergency quota.",
        "Every bind is charged to the tenant's quota, a grant from it, or its share of a budget, in the same transaction.",
    ),
    Invariant(
        6,
        "constraints-held",
        "A replica is bound only where the policy in force allowed it and its hard constraints held at that revision.",
        "The authority runs the same rules as the scheduler, on its own books, with the latest live policy.",
    ),
    Invariant(
        7,
        "owned-transitions",
        "Each transition was made by its owner, from its source phase, at a current epoch.",
        "One lifecycle table; every claim under a lease is checked against the lease's epoch (fencing token).",
    ),
    Invariant(
        8,
        "one-outcome",
        "An operation id has one outcome.",
        "Outcomes are stored with the operation's changes; an id older than the retained outcomes is never executed.",
    ),
    Invariant(
        9,
        "gangs-whole",
        "One transaction binds at least the minimum of a gang, or none of it.",
        "A gang is decided in a draft of its own, which is merged completely or discarded.",
    ),
    Invariant(
        10,
        "overrides-end",
        "An override has no effect after its deadline.",
        "The authority sets every deadline; one function decides what is in force, and treats uncertain overrides as ended.",
    ),
    Invariant(
        11,
        "nothing-lost",
        "No acknowledged write is lost.",
        "The authority replies only after the commit is durable; after a lost reply of the store it settles the outcome first.",
    ),
    Invariant(
        12,
        "reservations-end",
        "A reservation is bound once or released.",
        "A reservation is a phase of its replica: one row, which is bound, cancelled, or reclaimed after a timeout.",
    ),
)
