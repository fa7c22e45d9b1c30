"""Committed in-memory state of a scope: rows, ledgers, topology counts.

The authority's memory; it decides nothing, and does no I/O.

`Books` are what is committed. A `Draft` lies over them (or over another draft) while a batch is decided: it reads through to
what is below, keeps copies of what it changes, and is either absorbed whole or thrown away. So nothing uncommitted is ever
visible, and taking over is the same code as working: every row of the store is put into a draft over empty books.

Ledgers are sums of postings, and the rows are the postings: no ledger is stored. What each row posts is in draft.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from remit.commitment.selector_index import Indexes, picks
from remit.law.admission import Admission
from remit.law.charges import Use
from remit.law.fit import Ask, Index, carried, static_answer
from remit.law.ledgers import GrantLedger, NodeLedger
from remit.law.lifecycle import WAITS
from remit.law.selectors import domain_of
from remit.law.shared_requirements import Asks
from remit.law.timing import Tempo
from remit.model.objects import dec_hook, key_of
from remit.model.records import Peer, PolicyRevision, Replica, Standing

if TYPE_CHECKING:
    from remit.commitment.draft import Draft

GenerationKey = tuple[str, str, int]
"""Tenant, workload, generation: replicas of one are all alike."""

decode_replica = msgspec.json.Decoder(Replica, dec_hook=dec_hook).decode

AWAITED_NODE = "awaited/node/"
"""After a restore, one such record stands for each node that has not yet reported."""

_AWAITED = key_of("Summary", AWAITED_NODE)
_PEER = key_of("Peer", "")
_WORKLOAD = "workload/"
_GENERATION = "generation/"
_GENERATION_DEPTH = 3
"""Slashes before its number."""

ELIGIBLE_MAX = 1_024
"""How many answers about domains are kept; when there are more, all go and are found again as they are asked for."""

TIMES_EVERY_MS = 250
LIMIT_MS_MAX = max(wait.limit_ms for wait in WAITS.values())

NOTES_MAX = 20_000
"""How many events and decisions are kept; older ones go as new ones come."""


class Moment(NamedTuple):
    """When a decision is made, on the authority's own clock, and when it last heard from each lease's holder."""

    now_ms: int
    boot: str
    heard: Mapping[str, int]
    since_ms: int
    sequence: int
    incarnation: str
    tempo: Tempo = Tempo()
    wall: str = ""
    """Written down for people; nothing is decided by it."""

    def silent_ms(self, lease: str) -> int:
        """For how long nothing was heard; a new authority counts from its takeover."""
        return self.now_ms - self.heard.get(lease, self.since_ms)


class Tally(dict[str, int]):
    """Counts by topology domain; a domain that is not there counts nothing."""

    def __missing__(self, domain: str) -> int:
        return 0


class Overlay:
    """Counts by domain as a draft sees them."""

    __slots__ = ("base", "moved")

    def __init__(self, base: Mapping[str, int], moved: Mapping[str, int]) -> None:
        self.base, self.moved = base, moved

    def __getitem__(self, domain: str) -> int:
        return self.base.get(domain, 0) + self.moved.get(domain, 0)


class Books:
    """What is committed. Replicas are kept as the bytes that were written; the rest, far fewer, as objects."""

    def __init__(self) -> None:
        self.replicas: dict[str, tuple[int, bytes]] = {}
        self.things: dict[str, tuple[Any, int]] = {}
        self.by_kind: dict[str, dict[str, None]] = {}
        self.by_workload: dict[str, dict[str, None]] = {}
        """Keys of generations by all that stands before their number: every declaration asks for those of its workload."""
        self.awaited: set[str] = set()
        self.peers_awaited: set[str] = set()
        self.nodes: dict[str, NodeLedger] = {}
        self.grants: dict[str, GrantLedger] = {}
        self.spots: dict[GenerationKey, dict[str, int]] = {}
        self.population: dict[GenerationKey, int] = {}
        self.reserved: dict[GenerationKey, int] = {}
        self.active: dict[tuple[str, str], int] = {}
        self.used: Use = {}
        """By tenant and limit: what is declared."""
        self.patrons: dict[str, str] = {}
        self.times: list[tuple[int, int]] = []
        """Which revision was committed when, on the authority's clock: a sample now and then. A replica's row changes with its
        phase alone, so this says how long a phase has lasted."""
        self.notes: dict[str, None] = {}
        self.loaded = 0
        self.policy: PolicyRevision | None = None
        self.asks: dict[GenerationKey, Ask] = {}
        self.asked = Asks()
        self._tallies: Indexes[Tally] = Indexes()
        self._eligible: dict[tuple[Hashable, str], tuple[str, ...]] = {}
        self.carriers: Indexes[int] = Indexes()
        """Anti-affinity that replicas carry, which newcomers must respect, and of how many generations each is."""
        self._carrying: dict[GenerationKey, tuple[Index, ...]] = {}
        """Generations with spots that carry an anti-affinity."""

    # -- reading ---------------------------------------------------------------------------------------------------------

    def replica(self, name: str) -> tuple[Replica, int] | None:
        kept = self.replicas.get(name)
        return None if kept is None else (decode_replica(kept[1]), kept[0])

    def thing(self, name: str) -> tuple[Any, int] | None:
        return self.things.get(name)

    def held(self, generation: GenerationKey) -> int:
        """How many replicas of a generation hold room that they are bound to; a reservation is not bound yet."""
        return sum(self.spots.get(generation, {}).values()) - self.reserved.get(generation, 0)

    def places(self) -> Iterator[tuple[GenerationKey, str, int]]:
        """How many of each generation hold room on each node."""
        for generation, spots in self.spots.items():
            for name, count in spots.items():
                yield generation, name, count

    def in_force(self) -> PolicyRevision | None:
        return self.policy

    def keys(self, prefix: str) -> list[str]:
        """Keys of kept things, in order; replicas are not among them."""
        if prefix.startswith(_GENERATION) and prefix.endswith("/") and prefix.count("/") == _GENERATION_DEPTH:
            return sorted(self.by_workload.get(prefix, ()))
        return sorted(name for name in self.by_kind.get(prefix.split("/", 1)[0], ()) if name.startswith(prefix))

    def ask(self, generation: GenerationKey) -> Ask | None:
        ask = self.asks.get(generation)
        if ask is None:
            ask = compile_ask(self, generation, self.asked)
            if ask is not None:
                self.asks[generation] = ask
        return ask

    def counts(self, index: Index) -> Tally:
        """Committed counts by domain, made from the spots when first asked for, and kept up since."""
        tally = self._tallies.get(index)
        if tally is None:
            tally = Tally()
            for generation, spots in self.spots.items():
                if self.counts_in(generation, index):
                    for name, count in spots.items():
                        tally[domain_of(self.nodes[name].node, index.key)] += count
            self._tallies.put(index, tally)
        return tally

    def total(self, index: Index) -> int:
        return sum(self.counts(index).values())

    def counts_in(self, generation: GenerationKey, index: Index) -> bool:
        ask = self.ask(generation) if generation[0] == index.tenant else None
        return ask is not None and picks(index, ask)

    def eligible(self, ask: Ask, topology_key: str) -> tuple[str, ...]:
        """Domains in which a replica could be placed at all, whatever is left of their nodes."""
        found = self._eligible.get((ask.demands, topology_key))
        if found is None:
            if len(self._eligible) >= ELIGIBLE_MAX:
                self._eligible.clear()
            found = self._eligible[ask.demands, topology_key] = domains(ask, self.nodes.values(), topology_key)
        return found

    def excess(self) -> Iterator[tuple[str, str]]:
        """Ledgers that stand above their amount since a lawful reduction, and by how much: to be drained."""
        for name, node in sorted(self.nodes.items()):
            if over := node.over():
                yield f"node/{name}", str(over)
        for name, grant in sorted(self.grants.items()):
            if over := grant.over():
                yield name, str(over)

    # -- absorbing -------------------------------------------------------------------------------------------------------

    def absorb(self, draft: Draft, revision: int, encoded: Mapping[str, bytes]) -> None:
        """Make a draft's changes official: they were committed at `revision` as the bytes given."""
        self._note_time(revision, draft.moment.now_ms)
        replicas = self.replicas
        for name, replica in draft.replicas.items():
            if replica is None:
                replicas.pop(name, None)
            else:
                replicas[name] = (revision, encoded[name])
        for name, thing in draft.things.items():
            kind = self.by_kind.setdefault(name.split("/", 1)[0], {})
            if thing is None:
                self.things.pop(name, None)
                kind.pop(name, None)
            else:
                self.things[name] = (thing, revision)
                kind[name] = None
            if name.startswith(_GENERATION):
                self._note_generation(name, there=thing is not None)
            elif name.startswith(_AWAITED):
                (self.awaited.discard if thing is None else self.awaited.add)(name)
            elif name.startswith(_PEER):
                awaited = isinstance(thing, Peer) and thing.spec.standing is Standing.AWAITED
                (self.peers_awaited.add if awaited else self.peers_awaited.discard)(name)
        for name, note in draft.notes.items():
            self.notes.pop(name, None)
            if note is not None:
                self.notes[name] = None
        merge(self.grants, draft.grants)
        merge(self.patrons, draft.patrons)
        add(self.population, draft.population)
        add(self.reserved, draft.reserved)
        add(self.active, draft.active)
        add(self.used, draft.used)
        if draft.policy is not None:
            self.policy = draft.policy
            self.asked = asks_under(draft.policy)
        if draft.policy is not None:
            self.asks.clear()
        elif draft.reshaped:
            self._ask_anew(draft.things)
        if draft.relabelled:
            # Before the spots: they may lie on nodes that are gone by now, and are counted anew when next asked for.
            self._tallies.clear()
        merge(self.nodes, draft.nodes)
        self._absorb_spots(draft.spots)
        if draft.reshaped:
            self._carry_anew(draft.things)
        if draft.relabelled or draft.policy is not None:
            self._eligible.clear()

    def _note_generation(self, name: str, *, there: bool) -> None:
        family = name[: name.rindex("/") + 1]
        names = self.by_workload.setdefault(family, {})
        if there:
            names[name] = None
        else:
            names.pop(name, None)
            if not names:
                del self.by_workload[family]

    def _note_time(self, revision: int, now_ms: int) -> None:
        """A sample now and then is enough: a phase is then taken for a little younger than it is."""
        if not self.times or now_ms - self.times[-1][1] >= TIMES_EVERY_MS:
            self.times.append((revision, now_ms))
            while len(self.times) > 1 and now_ms - self.times[0][1] > 2 * LIMIT_MS_MAX:
                del self.times[0]

    def waiting_ms(self, revision: int, moment: Moment) -> int:
        """For how long a replica that stands at `revision` has been in its phase, as far as this authority knows."""
        if revision <= self.loaded:
            return moment.now_ms - moment.since_ms
        at = bisect_left(self.times, (revision, 0))
        if at < len(self.times) and (at == 0 or self.times[at][0] == revision):
            return moment.now_ms - self.times[at][1]
        # Within one interval of the sample before it: else it would have made one itself.
        return max(0, moment.now_ms - self.times[at - 1][1] - TIMES_EVERY_MS)

    def _absorb_spots(self, moves: Mapping[GenerationKey, Mapping[str, int]]) -> None:
        for generation, moved in moves.items():
            spots = self.spots.get(generation)
            if spots is None:
                spots = self.spots[generation] = {}
                self._carry(generation)
            add(spots, moved)
            ask = self.ask(generation) if self._tallies else None
            if ask is None:
                self._tallies.clear()  # it went with its last spot, and nobody knows any more where it counted
            for index in self._tallies.counting(ask) if ask is not None else ():
                tally = self._tallies.values[index]
                for name, count in moved.items():
                    tally[domain_of(self.nodes[name].node, index.key)] += count
            if not spots:
                del self.spots[generation]
                self._carry_no_more(generation)

    def _carry(self, generation: GenerationKey) -> None:
        ask = self.ask(generation)
        if ask is not None and ask.anti:
            mine = self._carrying[generation] = tuple(dict.fromkeys(carried(ask)))
            for index in mine:
                self.carriers.put(index, (self.carriers.get(index) or 0) + 1)

    def _carry_no_more(self, generation: GenerationKey) -> None:
        for index in self._carrying.pop(generation, ()):
            count = self.carriers.values[index] - 1
            if count:
                self.carriers.put(index, count)
            else:
                self.carriers.drop(index)

    def _ask_anew(self, things: Iterable[str]) -> None:
        """Of the generations and workloads among these: what was made of their rows no longer holds. Of a generation that was
        written it is made at once, while the row is at hand: most are asked about before long.
        """
        for name in things:
            if name.startswith(_WORKLOAD):
                for one in self.by_workload.get(_GENERATION + name.removeprefix(_WORKLOAD) + "/", ()):
                    self.asks.pop(named_generation(one), None)
        for name in things:
            if name.startswith(_GENERATION):
                generation = named_generation(name)
                self.asks.pop(generation, None)
                with suppress(ValueError):  # it cannot be met, which whoever asks for it is told then
                    self.ask(generation)

    def _carry_anew(self, things: Iterable[str]) -> None:
        """Of the generations among these, those that have spots: another row may carry something else."""
        for name in things:
            if name.startswith(_GENERATION):
                generation = named_generation(name)
                if generation in self.spots:
                    self._carry_no_more(generation)
                    self._carry(generation)


def generation_of(replica: Replica) -> GenerationKey:
    return replica.metadata.tenant, replica.spec.workload, replica.spec.generation


def generation_key(generation: GenerationKey) -> str:
    return key_of("Generation", f"{generation[1]}/{generation[2]:08d}", generation[0])


def named_generation(name: str) -> GenerationKey:
    """Whose key this is: the other way round."""
    _, tenant, rest = name.split("/", 2)
    workload, _, number = rest.rpartition("/")
    return tenant, workload, int(number)


def asks_under(policy: PolicyRevision | None) -> Asks:
    if policy is None:
        return Asks()
    spec = policy.spec
    return Asks(tuple(spec.policies.values()), (spec.number, spec.deadline), Admission(spec.policies, spec.number))


def compile_ask(books: Books | Draft, generation: GenerationKey, asks: Asks) -> Ask | None:
    """What replicas of a generation need, as these books have it."""
    found = books.thing(generation_key(generation))
    if found is None:
        return None
    spec = found[0].spec
    owner = books.thing(key_of("Workload", generation[1], generation[0]))
    going = owner is None or owner[0].metadata.deleting
    return asks.make(generation[0], generation[1], spec.labels, spec.spec, generation[2], not going)


def domains(ask: Ask, nodes: Iterable[NodeLedger | None], topology_key: str) -> tuple[str, ...]:
    found = {}
    for ledger in nodes:
        if ledger is not None and static_answer(ask, ledger) is None:
            known, domain = ledger.domain(topology_key)
            if known:
                found[domain] = True
    return tuple(sorted(found))


def merge(into: dict[Any, Any], changes: Mapping[Any, Any]) -> None:
    for name, value in changes.items():
        if value is None:
            into.pop(name, None)
        else:
            into[name] = value


def add(into: dict[Any, int], changes: Mapping[Any, int]) -> None:
    for name, count in changes.items():
        total = into.get(name, 0) + count
        if total:
            into[name] = total
        else:
            into.pop(name, None)
