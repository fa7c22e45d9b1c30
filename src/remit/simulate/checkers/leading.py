"""Does somebody lead once the faults have ended, and is left to? Looks at the chain alone."""

from __future__ import annotations

from collections.abc import Iterator

from remit.simulate.checkers.history import History
from remit.simulate.checkers.liveness import Core, Liveness, Waiting, look


@look("L8")
def somebody_leads(live: Liveness, history: History, core: Core) -> Iterator[Waiting]:
    """An authority that is idle beats, by batches with a row of their own; one that only reads what there is leads nobody."""
    bounds, now = live.bounds, live.now_ms()
    may = 2 * bounds.leader_ttl_ms + bounds.leader_ms
    last = max(core.since_ms, history.acted_ms)
    if now - last > may * bounds.pace:
        yield Waiting(history.scope, "head", -1, f"nobody has led for {now - last} ms")


@look("L8")
def leaders_stay(live: Liveness, history: History, core: Core) -> Iterator[Waiting]:
    """Where nothing is broken any more nobody is deposed; the last to be broken may lead, and be followed by another."""
    since = core.since_ms + (2 * live.bounds.leader_ttl_ms + live.bounds.leader_ms) * live.bounds.pace
    if len(late := [at for at in history.takeovers[-9:] if at > since]) > 1:
        yield Waiting(history.scope, "head", -1, f"{len(late)} takeovers or more since all is well, the last at {late[-1]} ms")
