"""Reason and message of the event of each lifecycle transition and of each claim type.

Texts only. history.py reads the audit entries of accepted and refused operations and makes events of them.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class EventText(NamedTuple):
    """`reason` and `message` of an accepted operation; `request` completes the sentence "request to ..." of a refused one. The
    cause that an audit entry states replaces the message, or completes it if `with_cause` is set.
    """

    reason: str
    message: str
    request: str
    with_cause: bool = False


TRANSITION_EVENTS: Final = {
    "create": EventText("Created", "created", "create the replica"),
    "reserve": EventText("CapacityReserved", "capacity reserved", "reserve capacity for the replica", with_cause=True),
    "bind": EventText("Bound", "bound", "bind the replica", with_cause=True),
    "confirm": EventText("Bound", "bound", "bind the replica", with_cause=True),
    "unreserve": EventText("ReservationReleased", "the reservation was released", "release the reservation"),
    "reclaim": EventText("ReservationTimedOut", "the reservation timed out", "end a reservation that timed out"),
    "cancel": EventText("Cancelled", "released before it was placed", "cancel the replica"),
    "start": EventText("Starting", "the agent starts it", "start the replica"),
    "run": EventText("Running", "the process runs", "report the replica as running"),
    "ready": EventText("Ready", "ready", "report the replica as ready"),
    "unready": EventText("NotReady", "no longer ready", "report the replica as not ready"),
    "serve": EventText("AddedToEndpoints", "added to the endpoints", "add the replica to the endpoints"),
    "unserve": EventText("RemovedFromEndpoints", "removed from the endpoints", "remove the replica from the endpoints"),
    "finish": EventText("Finished", "finished", "report the replica as finished"),
    "crash": EventText("Failed", "failed", "report the replica as failed"),
    "preempt": EventText("Preempted", "preempted by a replica of higher priority", "preempt the replica"),
    "evict": EventText("Evicted", "evicted from its node", "evict the replica"),
    "retire": EventText("Retired", "replaced by the rollout", "retire the replica"),
    "remove": EventText("Removed", "no longer desired", "remove the replica"),
    "abort": EventText("AttemptAborted", "the attempt was aborted", "abort the attempt"),
    "stop": EventText("Stopping", "the agent stops it", "stop the replica"),
    "stopped": EventText("Stopped", "stopped, its capacity is free", "report the replica as stopped"),
    "doubt": EventText("NodeUnreachable", "its node sends no heartbeats", "mark the replica unknown"),
    "distrust": EventText("StateUnknown", "its state is unknown since the restore", "mark the replica unknown after a restore"),
    "resume": EventText("Resumed", "its node reports it again", "resume the replica"),
    "lose": EventText("DeclaredLost", "declared lost", "declare the replica lost"),
    "release": EventText("Released", "released, its capacity is free", "release the replica"),
    "settle": EventText("Released", "released after it finished", "release the finished replica"),
    "requeue": EventText("Requeued", "queued for another attempt", "queue the replica again"),
    "forget": EventText("Deleted", "its record was deleted", "delete the record of the replica"),
}
"""By transition of law/lifecycle.py. The claims of the same names use the same texts."""

CLAIM_EVENTS: Final = {
    "apply": EventText("Applied", "created, or its spec was changed", "create or replace the object"),
    "delete": EventText("Deleted", "deleted, or marked for deletion", "delete the object"),
    "rollback": EventText("PolicyRolledBack", "earlier policies were published again", "roll back the policies"),
    "adopt": EventText("PolicyAdopted", "a policy revision of the parent scope was adopted", "adopt a policy revision"),
    "spawn": EventText("ReplicasCreated", "replicas were created", "create replicas"),
    "gang": EventText("GangBound", "the members of a gang were bound together", "bind a gang"),
    "move": EventText("Moved", "the replica changed its phase", "change the phase of the replica"),
    "mark": EventText("HealthChanged", "the health of the node changed", "change the health of the node"),
    "issue": EventText("GrantIssued", "grant issued", "issue the grant"),
    "accept": EventText("GrantAccepted", "grant accepted from its issuer", "accept the grant"),
    "renew": EventText("GrantRenewed", "grant renewed", "renew the grant"),
    "yield": EventText("CapacityReturned", "capacity of the grant was returned to its issuer", "return capacity of the grant"),
    "close": EventText("GrantClosed", "grant closed", "close the grant"),
    "credit": EventText("CapacityCredited", "capacity returned by the holder was credited", "credit returned capacity"),
    "vouch": EventText("HoldingsConfirmed", "the peer confirmed the grants that it holds", "confirm the grants of the peer"),
    "recognise": EventText(
        "IncarnationAccepted", "a new incarnation of the peer was accepted", "accept an incarnation of the peer"
    ),
    "declare-lost": EventText("HolderDeclaredLost", "the holder of grants was declared lost", "declare the holder lost"),
    "acquire": EventText("LeaseAcquired", "lease acquired", "acquire the lease"),
    "vacate": EventText("LeaseReleased", "lease released by its holder", "release the lease"),
    "note": EventText("EventRecorded", "event recorded", "record an event"),
    "explain": EventText("DecisionRecorded", "scheduling decision recorded", "record a scheduling decision"),
    "report": EventText("UsageReported", "usage reported", "report usage"),
    "observe": EventText("ConditionSet", "condition set", "set a condition"),
    "abandon": EventText("OperationAbandoned", "the operation will not be executed", "abandon an operation"),
}
"""By tag: claim types that are not named after a transition."""

_EVENTS: Final = TRANSITION_EVENTS | CLAIM_EVENTS


def event_text(verb: str) -> EventText:
    """Return the texts of a transition or claim type. Entries of other versions may name an unknown one."""
    known = _EVENTS.get(verb)
    if known is not None:
        return known
    reason = "".join(part.capitalize() for part in verb.replace("-", " ").split())
    return EventText(reason, f"{verb} accepted", f"perform {verb}")


def accepted_message(text: EventText, cause: str) -> str:
    """Return the message of an accepted operation, with the cause that its audit entry states."""
    return " ".join(part for part in (text.message, cause) if part) if text.with_cause else cause or text.message


def refused_message(text: EventText, detail: str) -> str:
    return f"request to {text.request} refused" + (f": {detail}" if detail else "")
