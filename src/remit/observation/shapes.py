"""Groups generations with equal requirements into shapes (equivalence classes).

Generations are stored by id in a table, with one compiled `Requirements` object per shape. Replicas are not stored here.

Ten thousand jobs with one spec are ten thousand generations and one shape, which the scheduler filters and scores once. Two
generations differ in what their replicas need of a node (the *placement spec*), and in how they relate to other replicas:

- an affinity or spread term separates generations that match its selector from those that do not, and a term that selects its
  own workload keeps the workload's name (law/shared_requirements.py);
- a policy rule in force that matches labels separates the generations it applies to from the others;
- an anti-affinity of any generation of the tenant separates those that it excludes from those that it does not.

Labels therefore matter only where something selects by them. Requirements are compiled again when the policy in force
changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from remit.law.fit import PeerIndex, Requirements, owned_anti_affinity
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


class _WorkloadSpecFields(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    type: str
    template: _Template
    replace: str = ""
    placement: msgspec.Raw = msgspec.Raw(b"")
    gang: _Gang = _Gang()
    disruption: _Disruption = _Disruption()
    deadline: Duration = Duration(0)
    priority_class: str = ""


class _GenerationSpecFields(msgspec.Struct, frozen=True, gc=False):
    labels: dict[str, str]
    spec: _WorkloadSpecFields


class _GenerationFields(msgspec.Struct, frozen=True, gc=False):
    spec: _GenerationSpecFields


class _MetadataFields(msgspec.Struct, frozen=True, gc=False):
    deleting: bool = False


class _WorkloadFields(msgspec.Struct, frozen=True, gc=False):
    metadata: _MetadataFields


_decode_fields = msgspec.json.Decoder(_GenerationFields, dec_hook=dec_hook).decode
_decode_workload = msgspec.json.Decoder(_WorkloadFields).decode
_decode_generation = msgspec.json.Decoder(Generation, dec_hook=dec_hook).decode

PlacementKey = tuple[str, str, str, int, bytes, bytes, bytes]
PRESENT: Final = 1
DELETING: Final = 2


class PlacementSpec:
    """The part of a spec that node fit depends on, apart from the owner. Shared by all generations with the same bytes."""

    __slots__ = ("charge", "count", "has_peer_terms", "key", "resources", "spec")

    def __init__(self, key: PlacementKey, spec: WorkloadSpec) -> None:
        requirements = compile_requirements(key[0], "", {}, spec, ())
        placement = spec.placement
        self.key = key
        self.spec = spec
        self.resources: Pairs = requirements.resources
        self.charge: Pairs = requirements.charge.pairs
        self.has_peer_terms = bool(requirements.anti_affinity or placement.topology_spread or placement.affinity)
        self.count = 0


class Shape:
    """Generations whose replicas fit the same nodes. `workload`, `labels` and `number` are those of one of them."""

    __slots__ = ("anti_affinity", "count", "id", "key", "labels", "number", "placement", "requirements", "workload")

    def __init__(self, id_: int, key: object, placement: PlacementSpec, workload: str, labels: Labels, number: int) -> None:
        self.id, self.key, self.placement = id_, key, placement
        self.workload, self.labels, self.number = workload, labels, number
        self.count = 0
        self.requirements: Requirements | None = None
        requirements = (
            compile_requirements(placement.key[0], workload, dict(labels), placement.spec, ())
            if placement.has_peer_terms
            else None
        )
        self.anti_affinity: tuple[PeerIndex, ...] = owned_anti_affinity(requirements) if requirements is not None else ()


class GenerationInfo(NamedTuple):
    """One generation. `open` is false if its workload is gone or being deleted, so that no more replicas of it are placed."""

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


class WorkloadTable(Table):
    """Workloads by id; one whose row does not exist has `state` `NONE`."""

    columns: ClassVar[Mapping[str, Any]] = {"state": np.int8, "revision": np.int64, "tenant": np.int32, "users": np.int32}
    state: npt.NDArray[np.int8]
    revision: npt.NDArray[np.int64]
    tenant: npt.NDArray[np.int32]
    users: npt.NDArray[np.int32]

    def __init__(self) -> None:
        super().__init__()
        self.ids: dict[str, int] = {}
        """Ids by `tenant/name`."""
        self.names: list[str] = []


class ShapeTable(Table):
    """Generations by id, with their workloads and their shapes."""

    columns: ClassVar[Mapping[str, Any]] = {
        "number": np.int32, "workload": np.int32, "tenant": np.int32, "labels": np.int32, "placement": np.int32,
        "shape": np.int32, "gang": np.int32, "min_available": np.int32, "deadline": np.int64,
        "priority_class": np.int32, "revision": np.int64,
    }  # fmt: skip
    number: npt.NDArray[np.int32]
    workload: npt.NDArray[np.int32]
    tenant: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]
    placement: npt.NDArray[np.int32]
    shape: npt.NDArray[np.int32]
    gang: npt.NDArray[np.int32]
    min_available: npt.NDArray[np.int32]
    deadline: npt.NDArray[np.int64]
    priority_class: npt.NDArray[np.int32]
    """Priority class, as an id of `priority_classes`."""
    revision: npt.NDArray[np.int64]

    def __init__(self) -> None:
        super().__init__()
        self.ids: dict[int, int] = {}
        self.workloads = WorkloadTable()
        self.tenants: list[str] = []
        self.label_sets: Pool[Labels] = Pool()
        self.priority_classes: Pool[str] = Pool()
        self.placements: list[PlacementSpec | None] = []
        self.shapes: dict[int, Shape] = {}
        self.policy: PolicyRevision | None = None
        self.reshaped: list[int] = []
        """Generations whose shape has changed since the list was last taken."""
        self._tenant_ids: dict[str, int] = {}
        self._placement_ids: dict[PlacementKey, int] = {}
        self._free_placements: list[int] = []
        self._by_key: dict[object, Shape] = {}
        self._last_shape = 0
        self._rules: list[tuple[int, PolicyRule]] = []
        """The rules of the policy in force that match labels, with their numbers."""
        self.anti_affinity_epoch = 0
        """Changes whenever the set of anti-affinity terms changes; cached results that depend on them are then invalid."""
        self._anti_affinity: dict[str, dict[PeerIndex, int]] = {}
        """Anti-affinity terms of a tenant's generations, with the number of shapes that carry each."""
        self._selectors: dict[tuple[str, tuple[str, str]], dict[Selector, None]] = {}
        """Selectors of these terms, by tenant and first label pair."""

    # -- reading ---------------------------------------------------------------------------------------------------------

    def find(self, tenant: str, workload: str, number: int) -> int | None:
        owner = self.workloads.ids.get(f"{tenant}/{workload}")
        return None if owner is None else self.ids.get(owner << 32 | number)

    def info(self, generation: int) -> GenerationInfo:
        at = self.at
        return GenerationInfo(
            tenant=self.tenants[at.tenant[generation]],
            workload=self.workload_of(generation),
            number=at.number[generation],
            labels=self.label_sets[at.labels[generation]],
            shape=at.shape[generation],
            gang=at.gang[generation],
            min_available=at.min_available[generation],
            deadline_ms=at.deadline[generation],
            priority_class=self.priority_classes[at.priority_class[generation]],
            open=self.is_open(generation),
        )

    def workload_of(self, generation: int) -> str:
        """Return the workload's name."""
        return self.workloads.names[self.at.workload[generation]].partition("/")[2]

    def tenant_of(self, generation: int) -> str:
        return self.tenants[self.at.tenant[generation]]

    def is_open(self, generation: int) -> bool:
        return self.workloads.at.state[self.at.workload[generation]] == PRESENT

    def open_mask(self) -> npt.NDArray[np.bool_]:
        """Return the `open` flag of all generations as one mask."""
        mask: npt.NDArray[np.bool_] = self.workloads.column("state")[self.column("workload")] == PRESENT
        return mask

    def placement_of(self, generation: int) -> PlacementSpec:
        placement = self.placements[self.at.placement[generation]]
        if placement is None:
            raise LookupError(f"generation {generation} has no row")
        return placement

    def has_shape(self, shape: int) -> bool:
        """Whether any generation still has this shape."""
        return shape in self.shapes

    def requirements_of(self, shape: int) -> Requirements:
        """Return what each replica of this shape needs under the policy in force. Whether its workload is open depends on the
        generation and is not included.
        """
        entry = self.shapes[shape]
        if entry.requirements is None:
            policy, tenant = self.policy, entry.placement.key[0]
            policies = () if policy is None else tuple(policy.spec.policies.values())
            in_force = (0, None) if policy is None else (policy.spec.number, policy.spec.deadline)
            labels = dict(entry.labels)
            entry.requirements = compile_requirements(
                tenant, entry.workload, labels, entry.placement.spec, policies, entry.number, in_force
            )
        return entry.requirements

    def anti_affinity_of(self, tenant: str) -> Sequence[PeerIndex]:
        """Return the anti-affinity terms of this tenant's generations. Terms without any bound replica are included; their
        counts are zero.
        """
        return tuple(self._anti_affinity.get(tenant, ()))

    def generations_in(self, index: PeerIndex) -> npt.NDArray[np.intp]:
        """Return the generations whose replicas this index counts."""
        tenant = self._tenant_ids.get(index.tenant)
        if tenant is None:
            return np.zeros(0, dtype=np.intp)
        if index.owners:
            carrying = [shape.id for shape in self.shapes.values() if index in shape.anti_affinity]
            return np.flatnonzero((self.column("tenant") == tenant) & np.isin(self.column("shape"), carrying))
        return self._matching(tenant, index.tenant, index.selector)

    def counts_in(self, generation: int, index: PeerIndex) -> bool:
        if self.tenant_of(generation) != index.tenant:
            return False
        if index.owners:
            return index in self.shapes[self.at.shape[generation]].anti_affinity
        return selects(index.selector, self._labels_of(generation))

    def _matching(self, tenant: int, name: str, selector: Selector) -> npt.NDArray[np.intp]:
        rest = tuple(pair for pair in selector if pair[0] != WORKLOAD_LABEL)
        selected = self.column("tenant") == tenant
        for _, workload in (pair for pair in selector if pair[0] == WORKLOAD_LABEL):
            selected &= self.column("workload") == self.workloads.ids.get(f"{name}/{workload}", NONE - 1)
        if rest:
            labels = self.column("labels")
            matching = [
                number for number in np.unique(labels[selected]).tolist() if selects(rest, dict(self.label_sets[number]))
            ]
            selected &= np.isin(labels, matching)
        return np.flatnonzero(selected)

    def _labels_of(self, generation: int) -> dict[str, str]:
        return {**dict(self.label_sets[self.at.labels[generation]]), WORKLOAD_LABEL: self.workload_of(generation)}

    # -- workloads ---------------------------------------------------------------------------------------------------------

    def put_workload(self, path: str, value: bytes, revision: int) -> int:
        """Insert or update a workload; `path` is `tenant/name`. Returns its id."""
        try:
            deleting = _decode_workload(value).metadata.deleting
        except msgspec.MsgspecError as error:
            raise Corrupt(f"row workload/{path} does not decode ({error}); restore a backup") from None
        owner = self.workload_id(path)
        at = self.workloads.at
        at.state[owner] = DELETING if deleting else PRESENT
        at.revision[owner] = revision
        return owner

    def drop_workload(self, path: str) -> None:
        owner = self.workloads.ids.get(path)
        if owner is not None:
            self.workloads.at.state[owner] = NONE
            self.workloads.at.revision[owner] = NONE
            self._release_workload(owner)

    def workload_id(self, path: str) -> int:
        table = self.workloads
        owner = table.ids.get(path)
        if owner is None:
            owner = table.ids[path] = table.allocate()
            if owner == len(table.names):
                table.names.append(path)
            else:
                table.names[owner] = path
            table.at.tenant[owner] = self._tenant_id(path.partition("/")[0])
            table.at.users[owner] = 0
        return owner

    def _release_workload(self, owner: int) -> None:
        table = self.workloads
        if table.at.state[owner] == NONE and not table.at.users[owner]:
            del table.ids[table.names[owner]]
            table.names[owner] = ""
            table.release(owner)

    def _tenant_id(self, name: str) -> int:
        number = self._tenant_ids.get(name)
        if number is None:
            number = self._tenant_ids[name] = len(self.tenants)
            self.tenants.append(name)
        return number

    # -- generations -------------------------------------------------------------------------------------------------------

    def put_generation(self, path: str, value: bytes, revision: int) -> int:
        """Insert or update a generation; `path` is `tenant/workload/number`. Returns its id."""
        try:
            fields = _decode_fields(value).spec
        except (msgspec.MsgspecError, ValueError) as error:
            raise Corrupt(f"row generation/{path} does not decode ({error}); restore a backup") from None
        name, _, number = path.rpartition("/")
        owner = self.workload_id(name)
        tenant = self.workloads.at.tenant[owner]
        key = owner << 32 | int(number)
        generation = self.ids.get(key)
        work, at = fields.spec, self.at
        placement = self._placement_id(self.tenants[tenant], work, value)
        labels = self.label_sets.acquire(tuple(sorted(fields.labels.items())) if fields.labels else ())
        rank = self.priority_classes.acquire(work.priority_class)
        if generation is None:
            generation = self.ids[key] = self.allocate()
            self.workloads.at.users[owner] += 1
        else:
            self._release_shared(generation)
            at.shape[generation] = NONE
        at.number[generation] = int(number)
        at.workload[generation] = owner
        at.tenant[generation] = tenant
        at.labels[generation] = labels
        at.placement[generation] = placement
        at.gang[generation] = work.gang.min
        at.min_available[generation] = work.disruption.min_available
        at.deadline[generation] = work.deadline
        at.priority_class[generation] = rank
        at.revision[generation] = revision
        self._join_shape(generation)
        return generation

    def drop_generation(self, path: str) -> None:
        """Remove a generation. The caller ensures that no replica refers to it."""
        name, _, number = path.rpartition("/")
        owner = self.workloads.ids.get(name)
        generation = None if owner is None else self.ids.pop(owner << 32 | int(number), None)
        if owner is not None and generation is not None:
            self._release_shared(generation)
            self.release(generation)
            self.workloads.at.users[owner] -= 1
            self._release_workload(owner)

    def put_policy(self, policy: PolicyRevision) -> None:
        """Set the policy in force."""
        old, self.policy = self.policy, policy
        if old is None or old.spec.policies != policy.spec.policies:
            before = bool(self._rules)
            rules = [rule for policy_spec in policy.spec.policies.values() for rule in policy_spec.rules]
            self._rules = [(number, rule) for number, rule in enumerate(rules) if rule.match.labels]
            if before or self._rules:
                self._rekey(self.ids.values())
        for shape in self.shapes.values():
            shape.requirements = None

    def _placement_id(self, tenant: str, work: _WorkloadSpecFields, value: bytes) -> int:
        template = work.template
        key = (
            tenant, work.type, work.replace, work.gang.min,
            bytes(template.resources), bytes(template.devices), bytes(work.placement),
        )  # fmt: skip
        number = self._placement_ids.get(key)
        if number is None:
            placement = PlacementSpec(key, _decode_generation(value).spec.spec)
            number = self._placement_ids[key] = self._free_placements.pop() if self._free_placements else len(self.placements)
            if number == len(self.placements):
                self.placements.append(placement)
            else:
                self.placements[number] = placement
        else:
            existing = self.placements[number]
            if existing is None:
                raise LookupError(f"placement spec {number} was released")
            placement = existing
        placement.count += 1
        return number

    def _release_shared(self, generation: int) -> None:
        """Release the label set, priority class, shape and placement that the generation's row refers to."""
        at = self.at
        self.label_sets.release(at.labels[generation])
        self.priority_classes.release(at.priority_class[generation])
        self._leave_shape(generation)
        placement = self.placement_of(generation)
        placement.count -= 1
        if not placement.count:
            number = self._placement_ids.pop(placement.key)
            self.placements[number] = None
            self._free_placements.append(number)

    # -- shapes ------------------------------------------------------------------------------------------------------------

    def _join_shape(self, generation: int) -> None:
        """Assign the generation to its shape, creating the shape if needed. A new shape may carry anti-affinity that splits
        other shapes.
        """
        at, placement, tenant = self.at, self.placement_of(generation), self.tenant_of(generation)
        peer_key = (
            peer_identity(placement.spec, self.workload_of(generation), self._labels_of(generation))
            if placement.has_peer_terms
            else None
        )
        key = (at.placement[generation], peer_key, *self._label_key(generation, tenant))
        shape = self._by_key.get(key)
        if shape is None:
            self._last_shape += 1
            labels = self.label_sets[at.labels[generation]]
            shape = Shape(self._last_shape, key, placement, self.workload_of(generation), labels, at.number[generation])
            self._by_key[key] = self.shapes[shape.id] = shape
        shape.count += 1
        at.shape[generation] = shape.id
        if shape.anti_affinity and shape.count == 1:
            self._add_anti_affinity(tenant, shape.anti_affinity)

    def _leave_shape(self, generation: int) -> None:
        shape = self.shapes[self.at.shape[generation]]
        shape.count -= 1
        if shape.count:
            return
        del self.shapes[shape.id], self._by_key[shape.key]
        tenant = shape.placement.key[0]
        known = self._anti_affinity.get(tenant, {})
        for index in shape.anti_affinity:
            known[index] -= 1
            if not known[index]:
                del known[index]
                self.anti_affinity_epoch += 1
                if not any(other.selector == index.selector for other in known):
                    self._selectors[tenant, index.selector[0]].pop(index.selector)

    def _label_key(self, generation: int, tenant: str) -> tuple[tuple[int, ...], tuple[Selector, ...]]:
        """Return which label-matching rules apply to a generation, and which anti-affinity selectors exclude it."""
        has_anti_affinity = bool(self._anti_affinity.get(tenant))
        if not self._rules and not has_anti_affinity:
            return (), ()
        labels = self._labels_of(generation)
        rules = tuple(number for number, rule in self._rules if rule_matches(rule.match, tenant, labels))
        candidates = (
            [selector for pair in sorted(labels.items()) for selector in self._selectors.get((tenant, pair), ())]
            if has_anti_affinity
            else []
        )
        return rules, tuple(sorted(selector for selector in candidates if selects(selector, labels)))

    def _add_anti_affinity(self, tenant: str, indexes: Iterable[PeerIndex]) -> None:
        known = self._anti_affinity.setdefault(tenant, {})
        for index in indexes:
            new = index not in known
            known[index] = known.get(index, 0) + 1
            self.anti_affinity_epoch += new
            if new:
                selectors = self._selectors.setdefault((tenant, index.selector[0]), {})
                if index.selector not in selectors:
                    selectors[index.selector] = None
                    self._rekey(self._matching(self._tenant_ids[tenant], tenant, index.selector).tolist())

    def _rekey(self, generations: Iterable[int]) -> None:
        for generation in list(generations):
            before = self.at.shape[generation]
            if before == NONE:
                continue  # it gets its shape later in this call
            # Join the new shape before leaving the old one: a shape that carries anti-affinity must not be released in between.
            self._join_shape(generation)
            after, self.at.shape[generation] = self.at.shape[generation], before
            self._leave_shape(generation)
            self.at.shape[generation] = after
            if after != before:
                self.reshaped.append(generation)
