"""Deletes objects whose owners are gone and releases finalizers.

Whatever had owners, and has none left, goes; and what was only held, and is free.

An object names its owners by kind, name and uid. When the last of them is gone it is deleted: at the revision at which it was
seen, and the authority looks once more, in its own books, whether every owner is gone. So an owner that was made anew under the
same name saves nobody, and one that is only late on this board costs nobody anything.

What was marked for deletion while a finalizer held it, or something depended on it, is deleted when nothing holds it any more.
A sweep at the beginning finds what was orphaned, or set free, while nobody looked. Workloads that are marked are cleared by
workloads.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from remit.correction.framework.actions import Deed, Remit, Wish
from remit.correction.framework.loop import Controller, Times
from remit.model.claims import Delete, Role
from remit.model.metadata import Metadata, Owner
from remit.model.objects import DECLARED, key_of
from remit.observation.watch_cache import Board

_DECLARED: Final = {kind.lower(): kind for kind in DECLARED}


class Cascade(Controller):
    """Its keys are those of objects that have owners, or are marked for deletion."""

    remit = Remit(Role.WORKLOADS, claims=(Delete,), declares=DECLARED)
    lease = f"{Role.WORKLOADS}/cascade"

    def __init__(self, board: Board) -> None:
        super().__init__(board)
        self._mine: dict[str, None] = {}
        self._owned: dict[str, dict[str, None]] = {}
        """By the key of an owner: whom it owns."""

    def concerns(self, key: str, old: Any, new: Any) -> Iterable[str]:
        if key.partition("/")[0] not in _DECLARED:
            # What holds a node or a tenant is a replica, or a grant. The sweep finds it, and so does whoever is next.
            return ()
        for thing, belongs in ((old, False), (new, True)):
            if thing is not None:
                self._note(key, thing.metadata, belongs=belongs)
        owned = tuple(self._owned.get(key, ())) if new is None or _uid(old) != _uid(new) else ()
        return (*owned, key) if key in self._mine else owned

    def _note(self, key: str, meta: Metadata, *, belongs: bool) -> None:
        for owner in meta.owners:
            at = key_of(owner.kind, owner.name, meta.tenant)
            owned = self._owned.setdefault(at, {})
            if belongs:
                owned[key] = None
            else:
                owned.pop(key, None)
                if not owned:
                    del self._owned[at]
        if belongs and (meta.owners or meta.deleting):
            self._mine[key] = None
        else:
            self._mine.pop(key, None)

    def everything(self) -> Iterable[str]:
        return tuple(self._mine)

    def reconcile(self, key: str, times: Times) -> Iterator[Wish]:
        kept = self.board.rows.get(key)
        if kept is None:
            return
        meta: Metadata = kept.thing.metadata
        kind = _DECLARED[key.partition("/")[0]]
        free = meta.deleting and not meta.finalizers and kind != "Workload"
        orphan = not meta.deleting and bool(meta.owners) and all(self._is_gone(one, meta.tenant) for one in meta.owners)
        if free or orphan:
            yield Deed(Delete(kind, meta.name, meta.tenant, expect=kept.revision))

    def _is_gone(self, owner: Owner, tenant: str) -> bool:
        """What stands under its name now, with another uid, is another. Of kinds that nobody declares nothing is known here."""
        if owner.kind not in DECLARED:
            return False
        stands = self.board.get(key_of(owner.kind, owner.name, tenant))
        return stands is None or bool(owner.uid and stands.metadata.uid != owner.uid)


def _uid(thing: Any) -> str:
    return "" if thing is None else str(thing.metadata.uid)
