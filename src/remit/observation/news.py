"""What must a scheduler hear of a change? Gathered until it is taken; what is done about it is decided in proposal/."""

from __future__ import annotations

Cure = tuple[str | int, ...]
"""What may end a wait: `("room", row)`, `("node", row)`, `("quota", ledger)`, `("grant", ledger)`, `("policy",)`,
`("priority",)`, `("peers", tenant)`, `("workload", tenant, name)`, or `("domains",)`: a node went or is another, so that there
may be fewer domains to spread over."""


class News:
    """What happened since somebody last took it, each thing once, in the order in which it first happened.

    `anew`: everything was listed from nothing, and slots from before mean nothing. `settled` are slots that stopped waiting for
    a node, or are no longer the same; they are to be read before `pending`, which wait now: one may be in both. `ready` are
    reservations whose victims have gone.
    """

    __slots__ = ("anew", "cures", "pending", "ready", "settled")

    def __init__(self, *, anew: bool = False) -> None:
        self.anew = anew
        self.pending: dict[int, None] = {}
        self.settled: dict[int, None] = {}
        self.ready: dict[int, None] = {}
        self.cures: dict[Cure, None] = {}

    def __bool__(self) -> bool:
        return bool(self.anew or self.pending or self.settled or self.ready or self.cures)

    def waits(self, slot: int) -> None:
        self.pending[slot] = None

    def no_longer_waits(self, slot: int) -> None:
        self.pending.pop(slot, None)
        self.settled[slot] = None
