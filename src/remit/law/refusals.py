"""Meaning and remedy of each refusal code.

Texts only. The codes are defined in model/claims.py and the checks are in commitment/.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from remit.model.claims import Code


class Refusal(NamedTuple):
    """`cure` is the event that ends the wait, or what the claimant should do. `never`: the same claim can never be accepted
    later.
    """

    meaning: str
    cure: str
    never: bool = False


REFUSALS: Final[dict[Code, Refusal]] = {
    Code.INVALID: Refusal("the claim contradicts itself or the object it names", "correct the claim", never=True),
    Code.RESERVED: Refusal(
        "the claim uses a name or value that is reserved for Remit itself", "leave it out, or use another name", never=True
    ),
    Code.ROLE: Refusal("this role does not own that transition or kind", "make the claim under the owning role", never=True),
    Code.TENANT: Refusal("the claimant belongs to another tenant", "use your own tenant, or ask an admin", never=True),
    Code.NOT_OWNER: Refusal(
        "the claimant's role is right, but this object belongs to another claimant", "claim only your own objects", never=True
    ),
    Code.STALE_EPOCH: Refusal("the epoch is not the current one of the lease", "stop; acquire the lease again", never=True),
    Code.LEASE_EXPIRED: Refusal("the claimant's lease has expired", "renew or acquire the lease, then read again"),
    Code.LEASE_HELD: Refusal("another holder has the lease", "wait until it expires or is vacated"),
    Code.STALE_EVIDENCE: Refusal("the evidence is older than this transition allows", "read again, then decide again"),
    Code.OPERATION_EXPIRED: Refusal(
        "the operation id is older than the retained outcomes", "read the current state, then use a new id", never=True
    ),
    Code.OPERATION_MISMATCH: Refusal("the operation id was used for another payload", "use one id for one intent", never=True),
    Code.ABANDONED: Refusal("the operation was abandoned before it was executed", "use a new id", never=True),
    Code.NOT_FOUND: Refusal("there is no such object", "create it, or correct the name"),
    Code.EXISTS: Refusal("the object exists already", "read it; replace it at its revision", never=True),
    Code.REVISION: Refusal("the object has changed since it was read", "read again, then decide again"),
    Code.PHASE: Refusal("the transition is not possible from the present phase", "read again, then decide again"),
    Code.ATTEMPT: Refusal("the claim names another attempt than the current one", "stop that attempt; read again", never=True),
    Code.IN_USE: Refusal("other objects still depend on it", "drain or delete what depends on it"),
    Code.DELETING: Refusal("the object is being deleted", "wait until it is deleted"),
    Code.WAIT: Refusal("the phase has not reached its timeout", "wait until the timeout"),
    Code.FENCE: Refusal("the old attempt may still run", "wait until the fence has passed"),
    Code.NODE_UNREADY: Refusal("the node is not ready for new work", "node ready"),
    Code.DRAINING: Refusal("the node is cordoned or draining", "node uncordoned"),
    Code.NO_ROOM: Refusal("the node has too little free capacity", "capacity freed or added"),
    Code.DEVICE_TAKEN: Refusal(
        "the requested devices do not exist on the node or are in use", "device freed, or a node with such devices added"
    ),
    Code.DEVICE_MISMATCH: Refusal(
        "the named devices are not of the requested kind or model", "name devices of the requested kind and model"
    ),
    Code.SELECTOR: Refusal("the node's labels do not match", "node labelled, or selector changed"),
    Code.TAINT: Refusal("the node has a taint that is not tolerated", "taint removed, or toleration added"),
    Code.PLACE: Refusal("the workload's placement excludes this region, zone or pool", "placement changed"),
    Code.POLICY: Refusal("the policy in force forbids this place or this priority", "policy published"),
    Code.POLICY_LAPSED: Refusal("the policy from the parent scope was not renewed in time", "policy renewed"),
    Code.SPREAD: Refusal("the topology spread would be violated", "replica bound or released elsewhere"),
    Code.AFFINITY: Refusal("affinity: no matching replica in this topology domain", "matching replica bound there"),
    Code.ANTI_AFFINITY: Refusal(
        "anti-affinity between it and a replica in this topology domain", "matching replica released there"
    ),
    Code.OVER_QUOTA: Refusal("the tenant's quota does not cover the charge", "quota freed or raised"),
    Code.GRANT_SHORT: Refusal("the grant does not cover the charge", "grant freed, or a larger one issued"),
    Code.GRANT_EXPIRED: Refusal("the grant, or one of its parents, has expired", "grant renewed"),
    Code.GRANT_VOID: Refusal(
        "the grant is closed, or the grant or the peer's message dates from before a restore", "peer recognised, grant reissued"
    ),
    Code.AWAITING_REPORTS: Refusal(
        "nodes or peer scopes have not reported since a restore, or since their grant expired",
        "they report, or are declared lost",
    ),
    Code.GANG_SHORT: Refusal(
        "fewer replicas than the gang's minimum could be bound, so none were", "capacity for the whole gang"
    ),
    Code.VICTIMS: Refusal("preemption victims have not been released yet, or may not be preempted", "victims released"),
    Code.OVERRIDE: Refusal("an override forbids this placement", "override ended"),
    Code.LIMIT: Refusal("a limit of the scope or of the tenant is reached", "delete objects that count toward it, or wait"),
    Code.INTERNAL_ERROR: Refusal("an internal check failed, which is a bug; nothing changed", "report it", never=True),
}
