"""Meaning and remedy of each refusal code.

Words only; the codes are in model/claims.py, the checks elsewhere.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from remit.model.claims import Code


class Refusal(NamedTuple):
    """`cure` is the event that ends the wait, or what the asker should do; `never`: asking again unchanged is futile."""

    meaning: str
    cure: str
    never: bool = False


REFUSALS: Final[dict[Code, Refusal]] = {
    Code.INVALID: Refusal("the claim contradicts itself or the object it names", "correct the claim", never=True),
    Code.RESERVED: Refusal("it says what only Remit itself may say", "leave it out, or use a name of your own", never=True),
    Code.ROLE: Refusal("this role does not own that transition or kind", "let the owning role ask", never=True),
    Code.TENANT: Refusal("the asker belongs to another tenant", "ask in your own tenant, or let an admin ask", never=True),
    Code.NOT_OWNER: Refusal("the asker owns such things, but not this one", "ask only for what is yours", never=True),
    Code.STALE_EPOCH: Refusal("the epoch is not the current one of the lease", "stop; acquire the lease anew", never=True),
    Code.LEASE_EXPIRED: Refusal("the asker's lease ran out", "renew or acquire the lease, then look again"),
    Code.LEASE_HELD: Refusal("somebody else holds the lease", "wait until it lapses or is vacated"),
    Code.STALE_EVIDENCE: Refusal("the evidence is older than this transition allows", "look again, then decide anew"),
    Code.OPERATION_EXPIRED: Refusal("the id is older than the outcomes kept", "read what is there; then ask anew", never=True),
    Code.OPERATION_MISMATCH: Refusal("the operation id was used for another payload", "use one id for one intent", never=True),
    Code.ABANDONED: Refusal("the operation was abandoned before it happened", "ask under a new id", never=True),
    Code.NOT_FOUND: Refusal("there is no such object", "create it, or correct the name"),
    Code.EXISTS: Refusal("there is one already", "read it; replace it at its revision", never=True),
    Code.REVISION: Refusal("the object has changed since it was seen", "look again, then decide anew"),
    Code.PHASE: Refusal("the transition does not start where the object stands", "look again, then decide anew"),
    Code.ATTEMPT: Refusal("the claim speaks of another attempt", "stop that attempt; look again", never=True),
    Code.IN_USE: Refusal("something still depends on it", "drain or delete what depends on it"),
    Code.DELETING: Refusal("the object is being deleted", "wait until it is gone"),
    Code.WAIT: Refusal("the phase has not lasted long enough for this", "wait until its limit"),
    Code.FENCE: Refusal("the old copy may still run", "wait until the fence has passed"),
    Code.NODE_UNREADY: Refusal("the node is not ready for new work", "node ready"),
    Code.DRAINING: Refusal("the node is cordoned or draining", "node uncordoned"),
    Code.NO_ROOM: Refusal("the node has too little left", "capacity freed or added"),
    Code.DEVICE_TAKEN: Refusal("the devices asked for are not there, or are held by others", "device freed"),
    Code.DEVICE_MISMATCH: Refusal("these are not the devices asked for", "name devices of the kind and model asked for"),
    Code.SELECTOR: Refusal("the node's labels do not match", "node labelled, or selector changed"),
    Code.TAINT: Refusal("the node has a taint that is not tolerated", "taint lifted, or toleration added"),
    Code.PLACE: Refusal("the workload does not want this region, zone or pool", "placement changed"),
    Code.POLICY: Refusal("the policy in force forbids this place, or this priority", "policy published"),
    Code.POLICY_LAPSED: Refusal("the policy here is past its lease, so nothing can be checked against it", "policy renewed"),
    Code.SPREAD: Refusal("the topology spread would be broken", "replica bound or released elsewhere"),
    Code.AFFINITY: Refusal("nothing that it must be near is there", "matching replica bound there"),
    Code.ANTI_AFFINITY: Refusal("something that it must stay away from is there", "matching replica released there"),
    Code.OVER_QUOTA: Refusal("the tenant's quota does not cover it", "quota freed or raised"),
    Code.GRANT_SHORT: Refusal("the grant does not cover it", "grant freed, or a larger one issued"),
    Code.GRANT_EXPIRED: Refusal("the grant, or one above it, ran out", "grant renewed"),
    Code.GRANT_VOID: Refusal("the grant is closed; or it, or a letter, is of before a restore", "peer recognised, reissued"),
    Code.AWAITING_REPORTS: Refusal("holders have not reported since a restore", "holders report, or are declared lost"),
    Code.GANG_SHORT: Refusal("fewer than the gang needs could be bound, so none were", "room for the whole gang"),
    Code.VICTIMS: Refusal("what must make room has not gone yet, or may not be made to go", "victims released"),
    Code.OVERRIDE: Refusal("a person's override keeps it from being placed there", "override ended"),
    Code.LIMIT: Refusal("a bound of the scope, or of the tenant, is reached", "delete or wait for what fills it"),
    Code.FAULT: Refusal("deciding this tripped one of our own checks: a bug; nothing changed", "report it", never=True),
}  # fmt: skip
