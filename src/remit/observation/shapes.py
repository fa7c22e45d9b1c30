"""Groups generations with equal requirements into shapes (equivalence classes).

Generations by id in a table, and one `Requirements` for all that are alike. No replicas here.

Ten thousand jobs of one spec are ten thousand generations, and one shape: a proposer filters and scores them once. What makes
two generations differ is what their replicas need of a node (a *cut* of the spec), and whom they meet there:

- a term towards other replicas parts those that it picks itself from those it does not, and one that means its own kind
  keeps its name (law/shared_requirements.py);
- a rule of the policy in force that looks at labels parts those that it speaks of from those it does not;
- so does an anti-affinity that somebody of the tenant carries, which shuns some and not others.

Thus nobody's labels matter but where something asks for them. An ask is made again when the policy in force has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from remit.law.fit import Requirements, PeerIndex, owned_anti_affinity
from remit.law.requirements import WORKLOAD_LABEL, compile_requirements, rule_matches
from remit.law.selectors import selects
from remit.law.shared_requirements import peer_identity
from remit.model.kinds import WorkloadSpec
from remit.model.objects import dec_hook
from remit.model.policies import PolicyRule
from remit.model.records import Generation, PolicyRevision
from remit.model.resources import Duration
from remit.observation.column_table import NONE, Pool, Table
from remit.store.protocol import Corrupt

Pairs = tuple[tuple[str, int], ...]
Labels = tuple[tuple[str, str], ...]
Selector = tuple[tuple[str, str], ...]


class _Template(msgspec.Struct, frozen=True, gc=False):
    resources: msgspec.Raw = msgspec.Raw(b"")
    devices: msgspec.Raw = msgspec.Raw(b"")


class _Disruption(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    min_available: int = 0


class _Gang(msgspec.Struct, frozen=True, gc=False):
    min: int = 0


class _Work(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    type: str
    template: _Template
    replace: str = ""
    placement: msgspec.Raw = msgspec.Raw(b"")
    gang: _Gang = _Gang()
    disruption: _Disruption = _Disruption()
    deadline: Duration = Duration(0)
    priority_class: str = ""


class _Spec(msgspec.Struct, frozen=True, gc=False):
    labels: dict[str, str]
    spec: _Work


class _Lean(msgspec.Struct, frozen=True, gc=False):
    spec: _Spec


class _Meta(msgspec.Struct, frozen=True, gc=False):
    deleting: bool = False


class _Owner(msgspec.Struct, frozen=True, gc=False):
    metadata: _Meta


_decode = msgspec.json.Decoder(_Lean, dec_hook=dec_hook).decode
_decode_owner = msgspec.json.Decoder(_Owner).decode
_decode_whole = msgspec.json.Decoder(Generation, dec_hook=dec_hook).decode

CutKey = tuple[str, str, str, int, bytes, bytes, bytes]
THERE: Final = 1
DELETING: Final = 2


class Cut:
    """What of a spec a node is asked for, whoever asks: shared by all generations with the same bytes in it."""

    __slots__ = ("charge", "count", "key", "resources", "social", "spec")

    def __init__(self, key: CutKey, spec: WorkloadSpec) -> None:
        ask = compile_requirements(key[0], "", {}, spec, ())
        where = spec.placement
        self.key = key
        self.spec = spec
        self.resources: Pairs = ask.resources
        self.charge: Pairs = ask.charge.pairs
        self.social = bool(ask.anti_affinity or where.topology_spread or where.affinity)
        self.count = 0


class Shape:
    """Generations whose replicas fit the same nodes. `workload`, `labels` and `number` are those of one of them."""

    __slots__ = ("ask", "carries", "count", "cut", "id", "key", "labels", "number", "workload")

    def __init__(self, id_: int, key: object, cut: Cut, workload: str, labels: Labels, number: int) -> None:
        self.id, self.key, self.cut = id_, key, cut
        self.workload, self.labels, self.number = workload, labels, number
        self.count = 0
        self.ask: Requirements | None = None
        made = compile_requirements(cut.key[0], workload, dict(labels), cut.spec, ()) if cut.social else None
        self.carries: tuple[PeerIndex, ...] = owned_anti_affinity(made) if made is not None else ()


class Seen(NamedTuple):
    """One generation. `open` is false if its workload is gone or going, so that nothing more of it is placed."""

    tenant: str
    workload: str
    number: int
    labels: Labels
    shape: int
    gang: int
    min_available: int
    deadline_ms: int
    priority_class: str
    open: bool


class Workloads(Table):
    """Workloads by id; one whose row is not there (any more) has `state` `NONE`."""

    columns: ClassVar[Mapping[str, Any]] = {"state": np.int8, "revision": np.int64, "tenant": np.int32, "users": np.int32}
    state: npt.NDArray[np.int8]
    revision: npt.NDArray[np.int64]
    tenant: npt.NDArray[np.int32]
    users: npt.NDArray[np.int32]

    def __init__(self) -> None:
        super().__init__()
        self.ids: dict[str, int] = {}
        """By `tenant/name`."""
        self.names: list[str] = []


class Shapes(Table):
    """Generations by id, with the workloads that they are of and the shapes that they come to."""

    columns: ClassVar[Mapping[str, Any]] = {
        "number": np.int32, "workload": np.int32, "tenant": np.int32, "labels": np.int32, "cut": np.int32, "shape": np.int32,
        "gang": np.int32, "min_available": np.int32, "deadline": np.int64, "rank": np.int32, "revision": np.int64,
    }  # fmt: skip
    number: npt.NDArray[np.int32]
    workload: npt.NDArray[np.int32]
    tenant: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]
    cut: npt.NDArray[np.int32]
    shape: npt.NDArray[np.int32]
    gang: npt.NDArray[np.int32]
    min_available: npt.NDArray[np.int32]
    deadline: npt.NDArray[np.int64]
    rank: npt.NDArray[np.int32]
    """An id of `ranks`: the priority class."""
    revision: npt.NDArray[np.int64]

    def __init__(self) -> None:
        super().__init__()
        self.ids: dict[int, int] = {}
        self.workloads = Workloads()
        self.tenants: list[str] = []
        self.labelled: Pool[Labels] = Pool()
        self.ranks: Pool[str] = Pool()
        self.cuts: list[Cut | None] = []
        self.shapes: dict[int, Shape] = {}
        self.policy: PolicyRevision | None = None
        self.rekeyed: list[int] = []
        """Generations that came to another shape since somebody last took notice."""
        self._tenants: dict[str, int] = {}
        self._cuts: dict[CutKey, int] = {}
        self._cut_holes: list[int] = []
        self._keys: dict[object, Shape] = {}
        self._born = 0
        self._rules: list[tuple[int, PolicyRule]] = []
        """Those of the policy in force that look at labels."""
        self.carried_epoch = 0
        """Another number whenever other anti-affinity is carried: then who shuns whom may be another."""
        self._carried: dict[str, dict[PeerIndex, int]] = {}
        """By tenant, the anti-affinity of its generations, and how many shapes carry each."""
        self._shuns: dict[tuple[str, tuple[str, str]], dict[Selector, None]] = {}
        """By tenant and the first pair of a selector of those."""

    # -- reading ---------------------------------------------------------------------------------------------------------

    def find(self, tenant: str, workload: str, number: int) -> int | None:
        owner = self.workloads.ids.get(f"{tenant}/{workload}")
        return None if owner is None else self.ids.get(owner << 32 | number)

    def seen(self, generation: int) -> Seen:
        at = self.at
        return Seen(
            tenant=self.tenants[at.tenant[generation]],
            workload=self.name(generation),
            number=at.number[generation],
            labels=self.labelled[at.labels[generation]],
            shape=at.shape[generation],
            gang=at.gang[generation],
            min_available=at.min_available[generation],
            deadline_ms=at.deadline[generation],
            priority_class=self.ranks[at.rank[generation]],
            open=self.open(generation),
        )

    def name(self, generation: int) -> str:
        """Of its workload."""
        return self.workloads.names[self.at.workload[generation]].partition("/")[2]

    def tenant_of(self, generation: int) -> str:
        return self.tenants[self.at.tenant[generation]]

    def open(self, generation: int) -> bool:
        return self.workloads.at.state[self.at.workload[generation]] == THERE

    def opened(self) -> npt.NDArray[np.bool_]:
        """The same for all generations at once."""
        found: npt.NDArray[np.bool_] = self.workloads.column("state")[self.column("workload")] == THERE
        return found

    def cut_of(self, generation: int) -> Cut:
        cut = self.cuts[self.at.cut[generation]]
        if cut is None:
            raise LookupError(f"generation {generation} has no row")
        return cut

    def has(self, shape: int) -> bool:
        """Is anything of this shape any more?"""
        return shape in self.shapes

    def ask(self, shape: int) -> Requirements:
        """What each replica of this shape needs, under the policy in force. It is open: whether its workload is, is asked of
        the generation.
        """
        found = self.shapes[shape]
        if found.ask is None:
            policy, tenant = self.policy, found.cut.key[0]
            policies = () if policy is None else tuple(policy.spec.policies.values())
            in_force = (0, None) if policy is None else (policy.spec.number, policy.spec.deadline)
            labels = dict(found.labels)
            found.ask = compile_requirements(tenant, found.workload, labels, found.cut.spec, policies, found.number, in_force)
        return found.ask

    def carriers(self, tenant: str) -> Sequence[PeerIndex]:
        """Anti-affinity of this tenant's generations. Those that nobody carries just now are among them, and count nobody."""
        return tuple(self._carried.get(tenant, ()))

    def picked(self, index: PeerIndex) -> npt.NDArray[np.intp]:
        """Generations whose replicas count in an index."""
        tenant = self._tenants.get(index.tenant)
        if tenant is None:
            return np.zeros(0, dtype=np.intp)
        if index.owners:
            carrying = [shape.id for shape in self.shapes.values() if index in shape.carries]
            return np.flatnonzero((self.column("tenant") == tenant) & np.isin(self.column("shape"), carrying))
        return self._matching(tenant, index.tenant, index.selector)

    def counts_in(self, generation: int, index: PeerIndex) -> bool:
        if self.tenant_of(generation) != index.tenant:
            return False
        if index.owners:
            return index in self.shapes[self.at.shape[generation]].carries
        return selects(index.selector, self._marked(generation))

    def _matching(self, tenant: int, name: str, selector: Selector) -> npt.NDArray[np.intp]:
        rest = tuple(pair for pair in selector if pair[0] != WORKLOAD_LABEL)
        there = self.column("tenant") == tenant
        for _, wanted in (pair for pair in selector if pair[0] == WORKLOAD_LABEL):
            there &= self.column("workload") == self.workloads.ids.get(f"{name}/{wanted}", NONE - 1)
        if rest:
            labels = self.column("labels")
            good = [number for number in np.unique(labels[there]).tolist() if selects(rest, dict(self.labelled[number]))]
            there &= np.isin(labels, good)
        return np.flatnonzero(there)

    def _marked(self, generation: int) -> dict[str, str]:
        return {**dict(self.labelled[self.at.labels[generation]]), WORKLOAD_LABEL: self.name(generation)}

    # -- workloads ---------------------------------------------------------------------------------------------------------

    def put_workload(self, path: str, value: bytes, revision: int) -> int:
        """`path` is `tenant/name`. Answers its id."""
        try:
            deleting = _decode_owner(value).metadata.deleting
        except msgspec.MsgspecError as error:
            raise Corrupt(f"row workload/{path} does not decode ({error}); restore a backup") from None
        owner = self.owner(path)
        at = self.workloads.at
        at.state[owner] = DELETING if deleting else THERE
        at.revision[owner] = revision
        return owner

    def drop_workload(self, path: str) -> None:
        owner = self.workloads.ids.get(path)
        if owner is not None:
            self.workloads.at.state[owner] = NONE
            self.workloads.at.revision[owner] = NONE
            self._release_owner(owner)

    def owner(self, path: str) -> int:
        kept = self.workloads
        owner = kept.ids.get(path)
        if owner is None:
            owner = kept.ids[path] = kept.slot()
            if owner == len(kept.names):
                kept.names.append(path)
            else:
                kept.names[owner] = path
            kept.at.tenant[owner] = self._tenant(path.partition("/")[0])
            kept.at.users[owner] = 0
        return owner

    def _release_owner(self, owner: int) -> None:
        kept = self.workloads
        if kept.at.state[owner] == NONE and not kept.at.users[owner]:
            del kept.ids[kept.names[owner]]
            kept.names[owner] = ""
            kept.give_up(owner)

    def _tenant(self, name: str) -> int:
        found = self._tenants.get(name)
        if found is None:
            found = self._tenants[name] = len(self.tenants)
            self.tenants.append(name)
        return found

    # -- generations -------------------------------------------------------------------------------------------------------

    def put(self, path: str, value: bytes, revision: int) -> int:
        """`path` is `tenant/workload/number`. Answers its id."""
        try:
            lean = _decode(value).spec
        except (msgspec.MsgspecError, ValueError) as error:
            raise Corrupt(f"row generation/{path} does not decode ({error}); restore a backup") from None
        name, _, number = path.rpartition("/")
        owner = self.owner(name)
        tenant = self.workloads.at.tenant[owner]
        key = owner << 32 | int(number)
        generation = self.ids.get(key)
        work, at = lean.spec, self.at
        cut = self._cut(self.tenants[tenant], work, value)
        labels = self.labelled.take(tuple(sorted(lean.labels.items())) if lean.labels else ())
        rank = self.ranks.take(work.priority_class)
        if generation is None:
            generation = self.ids[key] = self.slot()
            self.workloads.at.users[owner] += 1
        else:
            self._let_go(generation)
            at.shape[generation] = NONE
        at.number[generation] = int(number)
        at.workload[generation] = owner
        at.tenant[generation] = tenant
        at.labels[generation] = labels
        at.cut[generation] = cut
        at.gang[generation] = work.gang.min
        at.min_available[generation] = work.disruption.min_available
        at.deadline[generation] = work.deadline
        at.rank[generation] = rank
        at.revision[generation] = revision
        self._shape(generation)
        return generation

    def drop(self, path: str) -> None:
        """The caller has made sure that no replica is of it."""
        name, _, number = path.rpartition("/")
        owner = self.workloads.ids.get(name)
        generation = None if owner is None else self.ids.pop(owner << 32 | int(number), None)
        if owner is not None and generation is not None:
            self._let_go(generation)
            self.give_up(generation)
            self.workloads.at.users[owner] -= 1
            self._release_owner(owner)

    def put_policy(self, policy: PolicyRevision) -> None:
        """The one in force from now on."""
        old, self.policy = self.policy, policy
        if old is None or old.spec.policies != policy.spec.policies:
            before = bool(self._rules)
            rules = [rule for one in policy.spec.policies.values() for rule in one.rules]
            self._rules = [(number, rule) for number, rule in enumerate(rules) if rule.match.labels]
            if before or self._rules:
                self._rekey(self.ids.values())
        for shape in self.shapes.values():
            shape.ask = None

    def _cut(self, tenant: str, work: _Work, value: bytes) -> int:
        template = work.template
        key = (
            tenant, work.type, work.replace, work.gang.min,
            bytes(template.resources), bytes(template.devices), bytes(work.placement),
        )  # fmt: skip
        number = self._cuts.get(key)
        if number is None:
            cut = Cut(key, _decode_whole(value).spec.spec)
            number = self._cuts[key] = self._cut_holes.pop() if self._cut_holes else len(self.cuts)
            if number == len(self.cuts):
                self.cuts.append(cut)
            else:
                self.cuts[number] = cut
        else:
            found = self.cuts[number]
            if found is None:
                raise LookupError(f"cut {number} is gone")
            cut = found
        cut.count += 1
        return number

    def _let_go(self, generation: int) -> None:
        """Of all that its row shares with others."""
        at = self.at
        self.labelled.drop(at.labels[generation])
        self.ranks.drop(at.rank[generation])
        self._leave(generation)
        cut = self.cut_of(generation)
        cut.count -= 1
        if not cut.count:
            number = self._cuts.pop(cut.key)
            self.cuts[number] = None
            self._cut_holes.append(number)

    # -- shapes ------------------------------------------------------------------------------------------------------------

    def _shape(self, generation: int) -> None:
        """The shape that it comes to, which may be a new one; that one may shun others, who then differ from their like."""
        at, cut, tenant = self.at, self.cut_of(generation), self.tenant_of(generation)
        own = peer_identity(cut.spec, self.name(generation), self._marked(generation)) if cut.social else None
        key = (at.cut[generation], own, *self._told_apart(generation, tenant))
        shape = self._keys.get(key)
        if shape is None:
            self._born += 1
            labels = self.labelled[at.labels[generation]]
            shape = Shape(self._born, key, cut, self.name(generation), labels, at.number[generation])
            self._keys[key] = self.shapes[shape.id] = shape
        shape.count += 1
        at.shape[generation] = shape.id
        if shape.carries and shape.count == 1:
            self._carry(tenant, shape.carries)

    def _leave(self, generation: int) -> None:
        shape = self.shapes[self.at.shape[generation]]
        shape.count -= 1
        if shape.count:
            return
        del self.shapes[shape.id], self._keys[shape.key]
        tenant = shape.cut.key[0]
        known = self._carried.get(tenant, {})
        for index in shape.carries:
            known[index] -= 1
            if not known[index]:
                del known[index]
                self.carried_epoch += 1
                if not any(other.selector == index.selector for other in known):
                    self._shuns[tenant, index.selector[0]].pop(index.selector)

    def _told_apart(self, generation: int, tenant: str) -> tuple[tuple[int, ...], tuple[Selector, ...]]:
        """Which rules speak of it, and whose anti-affinity shuns it; of those that look at labels at all."""
        shunned = bool(self._carried.get(tenant))
        if not self._rules and not shunned:
            return (), ()
        marked = self._marked(generation)
        rules = tuple(number for number, rule in self._rules if rule_matches(rule.match, tenant, marked))
        shuns = [one for pair in sorted(marked.items()) for one in self._shuns.get((tenant, pair), ())] if shunned else []
        return rules, tuple(sorted(one for one in shuns if selects(one, marked)))

    def _carry(self, tenant: str, indexes: Iterable[PeerIndex]) -> None:
        known = self._carried.setdefault(tenant, {})
        for index in indexes:
            new = index not in known
            known[index] = known.get(index, 0) + 1
            self.carried_epoch += new
            if new:
                of = self._shuns.setdefault((tenant, index.selector[0]), {})
                if index.selector not in of:
                    of[index.selector] = None
                    self._rekey(self._matching(self._tenants[tenant], tenant, index.selector).tolist())

    def _rekey(self, generations: Iterable[int]) -> None:
        for generation in list(generations):
            before = self.at.shape[generation]
            if before == NONE:
                continue  # its turn comes
            # Joins before it leaves: a shape that carries something must not be let go of in between.
            self._shape(generation)
            after, self.at.shape[generation] = self.at.shape[generation], before
            self._leave(generation)
            self.at.shape[generation] = after
            if after != before:
                self.rekeyed.append(generation)
