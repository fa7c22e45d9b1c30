"""The twelve invariants and what enforces each.

The twelve invariants, each with what keeps it; the checks stand elsewhere.
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
        "A device is a resource of its node, of which there are 1000 thousandths; a whole one takes all of them.",
    ),
    Invariant(
        2,
        "node-ledgers-balance",
        "A node's ledger is the sum of its replicas, and never rises above its capacity.",
        "Rows are the only postings; a claim is accepted only if `fit` holds against the books and the batch so far.",
    ),
    Invariant(
        3,
        "one-binding",
        "A replica has at most one binding; a fenced one never runs twice at once.",
        "`bind` starts only from pending or reserved; an unknown replica fails only after its node's fence has passed.",
    ),
    Invariant(
        4,
        "grants-cover",
        "Granted on plus used never rises above granted, at every scope.",
        "Each draw and each issue is checked against the grant's ledger; amounts are debited before they are credited.",
    ),
    Invariant(
        5,
        "quota-covers",
        "A tenant's use never rises above its quota and emergency quota.",
        "Every bind is charged to the tenant's quota, a slice of it, or its share of a budget, in the same transaction.",
    ),
    Invariant(
        6,
        "constraints-held",
        "A replica is bound only where the policy in force allowed it and its hard constraints held at that revision.",
        "The authority runs the same rules as the proposer, on its own books, with the latest live policy.",
    ),
    Invariant(
        7,
        "owned-transitions",
        "Each transition was made by its owner, from its from-phase, at a current epoch.",
        "One lifecycle table; every leased claim passes the fence of its lease's epoch.",
    ),
    Invariant(
        8,
        "one-outcome",
        "An operation id has one outcome.",
        "Outcomes are written with the deeds; an id that is older than those kept is refused, never executed.",
    ),
    Invariant(
        9,
        "gangs-whole",
        "One transaction binds at least the minimum of a gang, or none of it.",
        "A gang is decided in a draft of its own, which is absorbed whole or thrown away.",
    ),
    Invariant(
        10,
        "overrides-end",
        "Overrides have no effect past their time.",
        "The authority gives every override a deadline; one function says what is in force, and only what surely is.",
    ),
    Invariant(
        11,
        "nothing-lost",
        "Nothing that was acknowledged is lost.",
        "Answers are given only after the transaction is durable; a lost answer is settled before anything else is decided.",
    ),
    Invariant(
        12,
        "reservations-end",
        "A reservation is committed once or released.",
        "It is a phase of its replica: one row, which is bound, given up, or reclaimed when its time is over.",
    ),
)
