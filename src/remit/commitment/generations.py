"""Requirements of the replicas of each generation, compiled once from its row. Pure.

`CommittedRequirements` belong to the books; `DraftRequirements` recompile what a draft has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

from remit.commitment.changes import Changes, GenerationKey
from remit.law.admission import Admission
from remit.law.fit import Requirements
from remit.law.shared_requirements import RequirementsInterner
from remit.model.objects import key_of
from remit.model.records import Generation, PolicyRevision, Replica

WORKLOAD_PREFIX: Final = "workload/"
GENERATION_PREFIX: Final = "generation/"

ObjectRows = Mapping[str, tuple[Any, int]]
"""Objects by key, with their revisions."""

Lookup = Callable[[str], tuple[Any, int] | None]
"""Returns the object with a key, and its revision."""


def find_object(committed: ObjectRows, changes: Changes, name: str) -> tuple[Any, int] | None:
    """Return an object and its revision, which is -1 if it is among the changes."""
    if name in changes.objects:
        obj = changes.objects[name]
        return None if obj is None else (obj, -1)
    return committed.get(name)


def generation_of(replica: Replica) -> GenerationKey:
    return replica.metadata.tenant, replica.spec.workload, replica.spec.generation


def generation_key(generation: GenerationKey) -> str:
    return key_of("Generation", f"{generation[1]}/{generation[2]:08d}", generation[0])


def parse_generation_key(name: str) -> GenerationKey:
    """Parse a generation's key (the inverse of `generation_key`)."""
    _, tenant, rest = name.split("/", 2)
    workload, _, number = rest.rpartition("/")
    return tenant, workload, int(number)


def interner_for_policy(policy: PolicyRevision | None) -> RequirementsInterner:
    if policy is None:
        return RequirementsInterner()
    spec = policy.spec
    return RequirementsInterner(
        tuple(spec.policies.values()), (spec.number, spec.deadline), Admission(spec.policies, spec.number)
    )


def _compile(lookup: Lookup, generation: GenerationKey, interner: RequirementsInterner) -> Requirements | None:
    row = lookup(generation_key(generation))
    if row is None:
        return None
    spec = row[0].spec
    owner = lookup(key_of("Workload", generation[1], generation[0]))
    is_deleting = owner is None or owner[0].metadata.deleting
    return interner.compile(generation[0], generation[1], spec.labels, spec.spec, generation[2], not is_deleting)


class CommittedRequirements:
    """Requirements by generation under the committed policy."""

    def __init__(self, objects: ObjectRows) -> None:
        self.interner = RequirementsInterner()
        self._objects = objects
        self.compiled: dict[GenerationKey, Requirements] = {}

    def of(self, generation: GenerationKey) -> Requirements | None:
        requirements = self.compiled.get(generation)
        if requirements is None:
            requirements = _compile(self._objects.get, generation, self.interner)
            if requirements is not None:
                self.compiled[generation] = requirements
        return requirements

    def set_policy(self, policy: PolicyRevision) -> None:
        self.interner = interner_for_policy(policy)
        self.compiled.clear()

    def recompile(self, keys: Iterable[str], by_workload: Mapping[str, Iterable[str]]) -> None:
        """Discard the compiled requirements of the workloads and generations among these keys.

        A generation that was written is compiled again at once while its row is at hand, because most are scheduled soon.
        """
        for name in keys:
            if name.startswith(WORKLOAD_PREFIX):
                for row_key in by_workload.get(GENERATION_PREFIX + name.removeprefix(WORKLOAD_PREFIX) + "/", ()):
                    self.compiled.pop(parse_generation_key(row_key), None)
        for name in keys:
            if name.startswith(GENERATION_PREFIX):
                generation = parse_generation_key(name)
                self.compiled.pop(generation, None)
                with suppress(ValueError):  # unsatisfiable requirements are reported when the replica is placed
                    self.of(generation)


class DraftRequirements:
    """Requirements by generation as a draft would make them."""

    __slots__ = ("_changes", "_committed", "_compiled", "_interner", "_objects")

    def __init__(self, committed: CommittedRequirements, changes: Changes, objects: ObjectRows) -> None:
        self._committed, self._changes, self._objects = committed, changes, objects
        self._compiled: dict[GenerationKey, Requirements | None] = {}
        self._interner: tuple[PolicyRevision, RequirementsInterner] | None = None

    def of(self, generation: GenerationKey) -> Requirements | None:
        changes = self._changes
        if changes.policy is None and (not changes.changed_workloads or generation[:2] not in changes.changed_workloads):
            return self._committed.compiled.get(generation) or self._committed.of(generation)
        if generation not in self._compiled:
            self._compiled[generation] = _compile(partial(find_object, self._objects, changes), generation, self.interner())
        return self._compiled[generation]

    def interner(self) -> RequirementsInterner:
        """Return the interner for the policy in force."""
        policy = self._changes.policy
        if policy is None:
            return self._committed.interner
        if self._interner is None or self._interner[0] is not policy:
            self._interner = policy, interner_for_policy(policy)
        return self._interner[1]

    def set_policy(self, policy: PolicyRevision) -> None:
        self._changes.policy = policy
        self._compiled.clear()

    def mark_changed(self, obj: Any) -> None:
        """Note that a workload or one of its generations was written or deleted."""
        name = obj.spec.workload if isinstance(obj, Generation) else obj.metadata.name
        self._changes.changed_workloads[obj.metadata.tenant, name] = None
        self._compiled.clear()

    def take_interner(self, other: DraftRequirements) -> None:
        self._interner = other._interner

    def replace_with(self, fork: DraftRequirements) -> None:
        self._compiled, self._interner = fork._compiled, fork._interner
