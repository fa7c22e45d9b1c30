"""Garbage collection: deletes objects whose owners are gone, and objects marked for deletion that nothing holds any more.

An object names its owners by kind, name and uid. When the last owner is gone, the object is deleted at the revision at which
it was observed, and the authority checks in its own books that every owner is gone. An owner created again under the same
name has another uid and does not keep the object. An owner that only this watch cache has not seen yet does no harm, because
the authority refuses the deletion.

An object that was marked for deletion while a finalizer or a dependent held it is deleted once nothing holds it. The resync
at the start of a term finds objects that became deletable while no process acted. Marked workloads are handled by
workloads.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from remit.correction.framework.actions import Action, ControllerPermissions, ReconcileResult
from remit.correction.framework.loop import Controller, ReconcileTime
from remit.model.claims import Delete
from remit.model.kinds.registry import DEFINITIONS
from remit.model.metadata import Metadata, Owner
from remit.model.objects import DECLARED, key_of
from remit.model.roles import Role
from remit.observation.watch_cache import WatchCache

_DECLARED_KINDS: Final = {definition.prefix: definition.kind for definition in DEFINITIONS if definition.is_declared}


class GarbageCollector(Controller):
    """The garbage collector. Keys: objects that have owners or are marked for deletion."""

    permissions = ControllerPermissions(Role.WORKLOADS, claims=(Delete,), declares=DECLARED)
    lease = f"{Role.WORKLOADS}/cascade"

    def __init__(self, cache: WatchCache) -> None:
        super().__init__(cache)
        self._tracked: dict[str, None] = {}
        self._dependents: dict[str, dict[str, None]] = {}
        """Keys of owned objects, by the key of their owner."""

    def keys_for(self, key: str, old: Any, new: Any) -> Iterable[str]:
        if key.partition("/")[0] not in _DECLARED_KINDS:
            # Nodes and tenants are held by replicas or grants, whose changes are ignored here. The resync finds objects that
            # they release.
            return ()
        for obj, present in ((old, False), (new, True)):
            if obj is not None:
                self._index(key, obj.metadata, present=present)
        dependents = tuple(self._dependents.get(key, ())) if new is None or _uid(old) != _uid(new) else ()
        return (*dependents, key) if key in self._tracked else dependents

    def _index(self, key: str, meta: Metadata, *, present: bool) -> None:
        for owner in meta.owners:
            owner_key = key_of(owner.kind, owner.name, meta.tenant)
            dependents = self._dependents.setdefault(owner_key, {})
            if present:
                dependents[key] = None
            else:
                dependents.pop(key, None)
                if not dependents:
                    del self._dependents[owner_key]
        if present and (meta.owners or meta.deleting):
            self._tracked[key] = None
        else:
            self._tracked.pop(key, None)

    def all_keys(self) -> Iterable[str]:
        return tuple(self._tracked)

    def reconcile(self, key: str, time: ReconcileTime) -> Iterator[ReconcileResult]:
        row = self.cache.rows.get(key)
        if row is None:
            return
        meta: Metadata = row.obj.metadata
        kind = _DECLARED_KINDS[key.partition("/")[0]]
        is_released = meta.deleting and not meta.finalizers and kind != "Workload"
        is_orphan = not meta.deleting and bool(meta.owners) and all(self._is_gone(owner, meta.tenant) for owner in meta.owners)
        if is_released or is_orphan:
            yield Action(Delete(kind, meta.name, meta.tenant, expect=row.revision))

    def _is_gone(self, owner: Owner, tenant: str) -> bool:
        """Return whether the owner is gone. An object of its name with another uid is not the owner. Owners of kinds that are
        not declared count as present, because their existence is not known here.
        """
        if owner.kind not in DECLARED:
            return False
        current = self.cache.get(key_of(owner.kind, owner.name, tenant))
        return current is None or bool(owner.uid and current.metadata.uid != owner.uid)


def _uid(obj: Any) -> str:
    return "" if obj is None else str(obj.metadata.uid)
