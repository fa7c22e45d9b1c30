"""Verifies the race from store history.

Reads the store from its first revision on, and compares it with what the askers wrote down.

The process that served is gone by now, so nothing is taken from its memory. Three witnesses are heard: the history of rows,
from which owners and the writer's chain are worked out anew; the books as a new authority loads them; and the notebook.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from remit.commitment import ledger_check
from remit.commitment.authority import Authority
from remit.demo.race import Kill, Notebook, Prize, Race
from remit.law.refusals import REFUSALS
from remit.model.claims import Code, Refused
from remit.model.objects import decode
from remit.model.records import Replica
from remit.store import chain
from remit.store.protocol import Event, Head
from remit.store.sqlite.store import SqliteStore
from remit.store.watch_feed import Bounds
from remit.world.interfaces import World

WRONG_SHOWN: Final = 5
NOT_FOLDED: Final = Bounds(fold_after=1 << 30)


class Finding(NamedTuple):
    """One thing that was looked at: what was found, and what is wrong with it (nothing, if it holds)."""

    name: str
    told: str
    wrong: tuple[str, ...] = ()


class Refusals(NamedTuple):
    code: Code
    askers: dict[str, int]
    meaning: str
    cure: str
    example: str


class Account(NamedTuple):
    findings: tuple[Finding, ...]
    books: tuple[Finding, ...]
    refusals: tuple[Refusals, ...]

    @property
    def holds(self) -> bool:
        return not any(finding.wrong for finding in (*self.findings, *self.books))


class History:
    """Every revision from the first, one after another: who owned the prize, and does the chain hold?"""

    def __init__(self, prize: Prize) -> None:
        self._prize = prize
        self.head = Head("", 0, 0, "", 0, "")
        self.revisions = 0
        self.owners: dict[str, None] = {}
        self.changes = 0
        self.shared: list[str] = []
        self.broken: list[str] = []

    def add(self, event: Event) -> None:
        self.revisions += 1
        if self.head.incarnation or event.head is None:
            why = chain.gap(self.head, event)
            if why is not None:
                self.broken.append(f"revision {event.revision}: {why}")
        if event.head is not None:
            self.head = event.head
        for change in event.changes:
            if change.key.startswith("replica/"):
                self._post(change.key, None if change.value is None else decode(change.value))
        if len(self.owners) > 1:
            self.shared.append(f"revision {event.revision}: owned by {', '.join(self.owners)}")

    def _post(self, name: str, replica: object) -> None:
        owns = (
            isinstance(replica, Replica)
            and replica.status.node == self._prize.node
            and self._prize.device in replica.status.devices
        )
        if owns and name not in self.owners:
            self.owners[name] = None
            self.changes += 1
        elif not owns:
            self.owners.pop(name, None)


async def examine(data: Path, world: World, race: Race) -> Account:
    """Open the store as a third authority would, and look at everything."""
    store = await SqliteStore.open(
        data, offload=world.offload, holder="account", incarnation=world.ids.incarnation(), bounds=NOT_FOLDED
    )
    try:
        authority = await Authority.take_over(store, scope="local", holder="account", clock=world.clock, ids=world.ids)
        history = History(race.prize)
        async for event in _events(store, await store.revision()):
            history.add(event)
    finally:
        await store.close()
    findings = (
        _one_owner(race, history, authority),
        _never_two(race, history),
        _nothing_lost(race.notebook, authority),
        _one_outcome(race),
        *(_settled(kill, race.notebook) for kill in race.kills),
        *(_epoch(kill) for kill in race.kills),
        _chain(history, authority.head),
    )
    return Account(findings, tuple(_balanced(authority)), tuple(_refusals(race.notebook)))


async def _events(store: SqliteStore, last: int) -> AsyncIterator[Event]:
    watch = await store.watch("", after=0)
    try:
        async for event in watch:
            yield event
            if event.revision >= last:
                return
    finally:
        await watch.close()


def _one_owner(race: Race, history: History, authority: Authority) -> Finding:
    prize = race.prize
    owners = [
        (name, replica)
        for name, replica in ledger_check.replicas(authority.books)
        if replica.status.node == prize.node and prize.device in replica.status.devices
    ]
    names = [name for name, _ in owners]
    what = f"{prize.device} of {prize.node}"
    wrong = []
    if names != [race.owner]:
        wrong.append(f"{what} is owned by {', '.join(names) or 'nobody'}; the last that was told it has it is {race.owner}")
    if list(history.owners) != names:
        wrong.append(f"the rows say {', '.join(history.owners) or 'nobody'}, the books {', '.join(names) or 'nobody'}")
    phase = owners[0][1].status.phase if owners else "free"
    who = ", ".join(name.removeprefix("replica/") for name in names) or "nobody"
    return Finding("one owner", f"{what} belongs to {who} ({phase}), claimed by {race.owned_by}", tuple(wrong))


def _never_two(race: Race, history: History) -> Finding:
    wrong = history.shared[:WRONG_SHOWN]
    if history.changes != race.rounds:
        wrong.append(f"{history.changes} owners one after another in {race.rounds} rounds")
    told = f"{history.changes} owners one after another; in none of {history.revisions:,} revisions two"
    return Finding("never two owners", told, tuple(wrong))


def _nothing_lost(notebook: Notebook, authority: Authority) -> Finding:
    wrong = []
    for name, verdict in notebook.verdicts.items():
        stored = authority.outcomes.known(name)
        if stored != verdict:
            wrong.append(f"operation {name} was answered {verdict}; the store has {stored or 'nothing'}")
    total = len(notebook.verdicts)
    wrong += [f"operation {name} was never answered" for name in sorted(notebook.open())]
    told = f"{total:,} operations acknowledged; {total - len(wrong):,} found again with the same verdict, {len(wrong)} lost"
    return Finding("nothing lost", told, _some(wrong))


def _one_outcome(race: Race) -> Finding:
    notebook = race.notebook
    were = "was" if race.retried == 1 else "were"
    told = (
        f"{race.retried} met silence and {were} sent again under the same id; at the end all {len(notebook.operations):,} were "
        f"asked once more: {len(notebook.contradictions)} answers differ"
    )
    return Finding("one outcome each", told, _some(notebook.contradictions))


def _settled(kill: Kill, notebook: Notebook) -> Finding:
    """Of what was under way at the kill: was it written before, its answer lost, or decided by the one after?"""
    written, anew, wrong = [], [], []
    for name in sorted(kill.open):
        verdict = notebook.verdicts.get(name)
        if verdict is None:
            wrong.append(f"operation {name} was in flight at the kill and has no answer")
        elif verdict.revision < kill.after.revision:
            written.append(verdict)
        else:
            anew.append(verdict)
    if not kill.open:
        return Finding("in flight", "nothing was in flight at this kill: it struck between two answers")
    ends = ((written, "on disk, only the answer was lost"), (anew, "not written, decided after the restart"))
    parts = [f"{len(found)} {what} ({_kinds(found)})" for found, what in ends if found]
    return Finding("in flight settled", f"{len(kill.open)} at the kill: {'; '.join(parts)}", tuple(wrong))


def _kinds(verdicts: Iterable[object]) -> str:
    counts = Counter("refused" if isinstance(verdict, Refused) else "accepted" for verdict in verdicts)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


def _epoch(kill: Kill) -> Finding:
    after = kill.after.epoch
    wrong = () if after > kill.epoch else (f"the epoch was {kill.epoch} before the kill and is {after} after it",)
    return Finding("epoch raised", f"{kill.epoch} before the kill, {after} after: the dead process is fenced", wrong)


def _chain(history: History, head: Head) -> Finding:
    wrong = list(history.broken)
    if history.head != head:
        wrong.append(f"the history ends at sequence {history.head.sequence}, the head is at {head.sequence}")
    told = f"sequence 1 to {head.sequence:,}, each digest recomputed from its rows; the last is {head.digest[:12]}…"
    return Finding("chain unbroken", told, _some(wrong))


def _balanced(authority: Authority) -> Iterator[Finding]:
    for name, wrong in ledger_check.violations(authority.books).items():
        yield Finding(name, ledger_check.statement(name), _some(wrong))
    # The checks compare sums with ledgers; that no ledger stands above its amount is asked for separately.
    over = [f"{name} is over by {amount}" for name, amount in authority.books.excess()]
    yield Finding("no-excess", "No node, grant or quota is used beyond its amount.", _some(over))


def _refusals(notebook: Notebook) -> Iterator[Refusals]:
    refused = {name: verdict for name, verdict in notebook.verdicts.items() if isinstance(verdict, Refused)}
    for code in sorted({verdict.code for verdict in refused.values()}):
        names = [name for name, verdict in refused.items() if verdict.code == code]
        askers = Counter(notebook.operations[name].actor.name for name in names)
        yield Refusals(code, dict(askers), REFUSALS[code].meaning, REFUSALS[code].cure, refused[names[0]].detail)


def _some(wrong: list[str]) -> tuple[str, ...]:
    left = len(wrong) - WRONG_SHOWN
    return (*wrong[:WRONG_SHOWN], f"and {left} more") if left > 0 else tuple(wrong)
