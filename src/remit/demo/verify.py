"""Verifies the race from the history of the store.

Reads all revisions and compares them with what the clients recorded. The process that served is gone, so nothing comes from
its memory. There are three independent sources: the history of rows, from which owners and the hash chain are recomputed;
the books as a new authority loads them; and the clients' records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from remit.commitment import ledger_check
from remit.commitment.authority import Authority
from remit.demo.race import Kill, OperationRecorder, Race, RaceTarget
from remit.law.refusals import REFUSALS
from remit.model.claims import Code, Refused
from remit.model.objects import decode
from remit.model.records import Replica
from remit.store import chain
from remit.store.protocol import Head, WatchEvent
from remit.store.sqlite.store import SqliteStore
from remit.store.watch_feed import FeedLimits
from remit.world.interfaces import World

VIOLATIONS_SHOWN_MAX: Final = 5
UNFOLDED_WATCH: Final = FeedLimits(fold_after=1 << 30)


class Finding(NamedTuple):
    """One check: its result, and the violations found (empty if it holds)."""

    name: str
    result: str
    violations: tuple[str, ...] = ()


class RefusalSummary(NamedTuple):
    code: Code
    clients: dict[str, int]
    meaning: str
    cure: str
    example: str


class VerificationReport(NamedTuple):
    findings: tuple[Finding, ...]
    books: tuple[Finding, ...]
    refusals: tuple[RefusalSummary, ...]

    @property
    def holds(self) -> bool:
        return not any(finding.violations for finding in (*self.findings, *self.books))


class OwnershipHistory:
    """Replays every revision from the first: who owned the device, and whether the hash chain is intact."""

    def __init__(self, target: RaceTarget) -> None:
        self._target = target
        self.head = Head("", 0, 0, "", 0, "")
        self.revisions = 0
        self.owners: dict[str, None] = {}
        self.changes = 0
        self.shared_revisions: list[str] = []
        self.chain_breaks: list[str] = []

    def add(self, event: WatchEvent) -> None:
        self.revisions += 1
        if self.head.incarnation or event.head is None:
            gap = chain.gap(self.head, event)
            if gap is not None:
                self.chain_breaks.append(f"revision {event.revision}: {gap}")
        if event.head is not None:
            self.head = event.head
        for change in event.changes:
            if change.key.startswith("replica/"):
                self._update_owner(change.key, None if change.value is None else decode(change.value))
        if len(self.owners) > 1:
            self.shared_revisions.append(f"revision {event.revision}: owned by {', '.join(self.owners)}")

    def _update_owner(self, name: str, replica: object) -> None:
        owns = (
            isinstance(replica, Replica)
            and replica.status.node == self._target.node
            and self._target.device in replica.status.devices
        )
        if owns and name not in self.owners:
            self.owners[name] = None
            self.changes += 1
        elif not owns:
            self.owners.pop(name, None)


async def verify_race(data: Path, world: World, race: Race) -> VerificationReport:
    """Opens the store as a new authority would, and runs all checks."""
    store = await SqliteStore.open(
        data, offload=world.offload, holder="account", incarnation=world.ids.incarnation(), limits=UNFOLDED_WATCH
    )
    try:
        authority = await Authority.take_over(store, scope="local", holder="account", clock=world.clock, ids=world.ids)
        history = OwnershipHistory(race.target)
        async for event in _events(store, await store.revision()):
            history.add(event)
    finally:
        await store.close()
    findings = (
        _one_owner(race, history, authority),
        _never_two(race, history),
        _nothing_lost(race.recorder, authority),
        _one_outcome(race),
        *(_in_flight_at_kill(kill, race.recorder) for kill in race.kills),
        *(_epoch(kill) for kill in race.kills),
        _chain(history, authority.head),
    )
    return VerificationReport(findings, tuple(_balanced(authority)), tuple(_refusals(race.recorder)))


async def _events(store: SqliteStore, last: int) -> AsyncIterator[WatchEvent]:
    watch = await store.watch("", after=0)
    try:
        async for event in watch:
            yield event
            if event.revision >= last:
                return
    finally:
        await watch.close()


def _one_owner(race: Race, history: OwnershipHistory, authority: Authority) -> Finding:
    target = race.target
    owners = [
        (name, replica)
        for name, replica in ledger_check.replicas(authority.books)
        if replica.status.node == target.node and target.device in replica.status.devices
    ]
    names = [name for name, _ in owners]
    device = f"{target.device} of {target.node}"
    violations = []
    if names != [race.owner]:
        violations.append(
            f"{device} is owned by {', '.join(names) or 'no replica'}, but the last accepted claim was for {race.owner}"
        )
    if list(history.owners) != names:
        violations.append(f"owner by rows: {', '.join(history.owners) or 'none'}; by books: {', '.join(names) or 'none'}")
    phase = owners[0][1].status.phase if owners else "free"
    owner = ", ".join(name.removeprefix("replica/") for name in names) or "no replica"
    return Finding("one owner", f"{device} belongs to {owner} ({phase}), claimed by {race.owned_by}", tuple(violations))


def _never_two(race: Race, history: OwnershipHistory) -> Finding:
    violations = history.shared_revisions[:VIOLATIONS_SHOWN_MAX]
    if history.changes != race.rounds:
        violations.append(f"{history.changes} successive owners in {race.rounds} rounds")
    result = f"{history.changes} successive owners; no revision of {history.revisions:,} has two"
    return Finding("never two owners", result, tuple(violations))


def _nothing_lost(recorder: OperationRecorder, authority: Authority) -> Finding:
    violations = []
    for name, verdict in recorder.verdicts.items():
        stored = authority.outcomes.get(name)
        if stored != verdict:
            violations.append(f"operation {name} was answered {verdict}, but the store has {stored or 'no outcome'}")
    total = len(recorder.verdicts)
    violations += [f"operation {name} was never answered" for name in sorted(recorder.unanswered())]
    same = total - len(violations)
    result = f"{total:,} operations acknowledged: {same:,} have the same verdict in the store, {len(violations)} lost"
    return Finding("nothing lost", result, _first_violations(violations))


def _one_outcome(race: Race) -> Finding:
    recorder = race.recorder
    were = "was" if race.retried == 1 else "were"
    result = (
        f"{race.retried} had no answer and {were} retried with the same id; at the end all {len(recorder.operations):,} were "
        f"submitted again: {len(recorder.contradictions)} verdicts differ"
    )
    return Finding("one outcome each", result, _first_violations(recorder.contradictions))


def _in_flight_at_kill(kill: Kill, recorder: OperationRecorder) -> Finding:
    """For operations in flight at the kill: whether each was committed before it (only the answer was lost) or decided after
    the restart.
    """
    written, decided_later, violations = [], [], []
    for name in sorted(kill.in_flight):
        verdict = recorder.verdicts.get(name)
        if verdict is None:
            violations.append(f"operation {name} was in flight at the kill and has no answer")
        elif verdict.revision < kill.after.revision:
            written.append(verdict)
        else:
            decided_later.append(verdict)
    if not kill.in_flight:
        return Finding("in flight", "no operation was in flight at this kill")
    ends = ((written, "committed, only the answer was lost"), (decided_later, "not committed, decided after the restart"))
    parts = [f"{len(verdicts)} {outcome} ({_kinds(verdicts)})" for verdicts, outcome in ends if verdicts]
    return Finding("in flight settled", f"{len(kill.in_flight)} at the kill: {'; '.join(parts)}", tuple(violations))


def _kinds(verdicts: Iterable[object]) -> str:
    counts = Counter("refused" if isinstance(verdict, Refused) else "accepted" for verdict in verdicts)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


def _epoch(kill: Kill) -> Finding:
    after = kill.after.epoch
    violations = () if after > kill.epoch else (f"the epoch was {kill.epoch} before the kill and is {after} after it",)
    return Finding("epoch raised", f"{kill.epoch} before the kill, {after} after: the dead process is fenced", violations)


def _chain(history: OwnershipHistory, head: Head) -> Finding:
    violations = list(history.chain_breaks)
    if history.head != head:
        violations.append(f"the history ends at sequence {history.head.sequence}, the head is at {head.sequence}")
    result = f"sequence 1 to {head.sequence:,}, each digest recomputed from its rows; the last is {head.digest[:12]}…"
    return Finding("chain unbroken", result, _first_violations(violations))


def _balanced(authority: Authority) -> Iterator[Finding]:
    for name, violations in ledger_check.violations(authority.books).items():
        yield Finding(name, ledger_check.statement(name), _first_violations(violations))
    # The checks above compare sums with ledgers; whether a ledger exceeds its amount is checked separately.
    over = [f"{name} is over by {amount}" for name, amount in authority.books.excess()]
    yield Finding("no-excess", "No node, grant or quota is used beyond its amount.", _first_violations(over))


def _refusals(recorder: OperationRecorder) -> Iterator[RefusalSummary]:
    refused = {name: verdict for name, verdict in recorder.verdicts.items() if isinstance(verdict, Refused)}
    for code in sorted({verdict.code for verdict in refused.values()}):
        names = [name for name, verdict in refused.items() if verdict.code == code]
        clients = Counter(recorder.operations[name].actor.name for name in names)
        yield RefusalSummary(code, dict(clients), REFUSALS[code].meaning, REFUSALS[code].cure, refused[names[0]].detail)


def _first_violations(violations: list[str]) -> tuple[str, ...]:
    hidden = len(violations) - VIOLATIONS_SHOWN_MAX
    return (*violations[:VIOLATIONS_SHOWN_MAX], f"and {hidden} more") if hidden > 0 else tuple(violations)
