"""Owner references: resolution on apply, and whether all owners of an object are gone. Pure."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from remit.commitment.draft import Draft
from remit.commitment.rulings.registry import refuse
from remit.model.claims import Code, Refused
from remit.model.kinds.registry import AnyObject
from remit.model.metadata import Metadata, Owner
from remit.model.objects import DECLARED, TENANTED, key_of


def resolve_owners(draft: Draft, obj: AnyObject, before: Any) -> tuple[Owner, ...] | Refused:
    """Return the owner references with the uid of each owner, so that a later object of the same name is not taken for the
    owner. References that existed before are kept.
    """
    meta, known = obj.metadata, {}
    if not isinstance(meta, Metadata):
        return ()
    if before is not None:
        known = {(owner.kind, owner.name): owner for owner in before.metadata.owners}
    owners: list[Owner] = []
    for owner in meta.owners:
        existing = known.get((owner.kind, owner.name))
        if existing is not None and owner.uid in ("", existing.uid):
            owners.append(existing)
            continue
        if meta.tenant and owner.kind not in TENANTED and (owner.kind, owner.name) != ("Tenant", meta.tenant):
            # Otherwise deleting a cluster-wide object or another tenant would delete this tenant's objects, and its uid would
            # be disclosed.
            which = f"{owner.kind} {owner.name} does not belong to tenant {meta.tenant}"
            return refuse(Code.INVALID, f"metadata.owners: {which}; reference an object of the same tenant, or none")
        uid = _uid_of(draft, owner, meta.tenant)
        if uid is None or owner.uid not in ("", uid):
            which = f" with uid {owner.uid}" if owner.uid else ""
            return refuse(Code.INVALID, f"metadata.owners: {owner.kind} {owner.name}{which} does not exist")
        owners.append(replace(owner, uid=uid))
    return tuple(owners)


def is_orphaned(draft: Draft, obj: AnyObject) -> bool:
    """Return whether the object had owners and all of them are gone. An object of the same name with another uid is not the
    owner.
    """
    meta = obj.metadata
    if not isinstance(meta, Metadata) or not meta.owners:
        return False
    return all(owner.kind in DECLARED and _is_gone(_uid_of(draft, owner, meta.tenant), owner.uid) for owner in meta.owners)


def _is_gone(current_uid: str | None, uid: str) -> bool:
    return current_uid is None or (bool(uid) and current_uid != uid)


def _uid_of(draft: Draft, owner: Owner, tenant: str) -> str | None:
    """Return the uid of the object with an owner's name, in the tenant of the owned object; None if there is none."""
    entry = draft.lookup(key_of(owner.kind, owner.name, tenant)) if owner.kind in DECLARED else None
    return None if entry is None else str(entry[0].metadata.uid)
