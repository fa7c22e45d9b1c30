"""Results of a reconcile (actions and requeues), the permissions of a controller, and condition updates.

The authority refuses claims that a role may not make. A controller's permissions are narrower and are declared beside its
code: a controller that requests more than it declared has a bug, and its loop reports that instead of submitting the claim.

Conditions are written as claims, and only where they differ from the current ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final, Literal, NamedTuple

from remit.law.lifecycle import OWNERS
from remit.law.workload_rules import condition_of
from remit.model.claims import AnyClaim, Apply, Claim, Delete, Forget, Move, RecordEvent, SetCondition, Spawn
from remit.model.kinds import Node, Workload
from remit.model.metadata import Condition
from remit.model.objects import key_of
from remit.model.roles import Role

_SEPARATE_CLAIMS = {Spawn: "create", Forget: "forget"}
"""Transitions that have claim types of their own."""


class Action(NamedTuple):
    """One claim to submit.

    `undo_key` identifies the effect of the action for the undo detector: if an action with an identifier that was already
    applied is requested again, its effect was undone. It contains everything that would make it a different action (uid,
    attempt, generation). Empty: the action may be requested any number of times.
    """

    claim: AnyClaim
    undo_key: str = ""


class RequeueAfter(NamedTuple):
    """Reconcile the key again after this time, even without a change."""

    in_ms: int


class RequeueCoalesced(NamedTuple):
    """Reconcile the key once, after `in_ms`. Further changes of the key until then need no reconcile of their own."""

    key: str
    in_ms: int


ReconcileResult = Action | RequeueAfter
KeyTrigger = str | RequeueCoalesced
"""A key to reconcile: at once, or coalesced later."""


class ControllerPermissions:
    """Everything that one controller may request: claim types, transitions, and kinds that it applies or deletes. Every
    controller may also record events and set conditions.
    """

    def __init__(
        self,
        role: Role,
        *,
        claims: Iterable[type[Claim]] = (),
        transitions: Iterable[str] = (),
        declares: Iterable[str] = (),
    ) -> None:
        self.role = role
        self.claims: frozenset[type[Claim]] = frozenset({*claims, RecordEvent, SetCondition})
        self.transitions = frozenset(transitions)
        self.declares = frozenset(declares)
        foreign = sorted(name for name in self.transitions if OWNERS.get(name) is not role)
        if foreign:
            raise ValueError(f"transitions {', '.join(foreign)} are not owned by role {role}; see law/lifecycle.py")

    def violation_of(self, claim: AnyClaim) -> str:
        """Return why a claim is not permitted; empty if it is."""
        match claim:
            case Move(transition=name):
                return (
                    ""
                    if name in self.transitions
                    else f"role {self.role} requested transition {name}, which it did not declare; this is a bug in the "
                    "controller"
                )
            case Spawn() | Forget() if _SEPARATE_CLAIMS[type(claim)] in self.transitions:
                return ""
            case Apply(thing=obj):
                kind = type(obj).__name__
                return (
                    ""
                    if Apply in self.claims and kind in self.declares
                    else f"role {self.role} tried to apply a {kind}, which it did not declare; this is a bug in the controller"
                )
            case Delete(kind=kind):
                return (
                    ""
                    if Delete in self.claims and kind in self.declares
                    else f"role {self.role} tried to delete a {kind}, which it did not declare; this is a bug in the controller"
                )
            case _ if type(claim) in self.claims:
                return ""
            case _:
                return (
                    f"role {self.role} submitted a {type(claim).__name__} claim, which it did not declare; this is a bug in "
                    "the controller"
                )


MESSAGE_MAX: Final = 1_000

ConditionStatus = Literal["True", "False", "Unknown"]


def update_condition(
    obj: Workload | Node, type_: str, status: ConditionStatus, reason: str, message: str, wall: str
) -> list[Action]:
    """Return the action that sets a condition, or nothing if the condition is already set so."""
    meta, message = obj.metadata, message[:MESSAGE_MAX]
    known = condition_of(obj.status.conditions, type_)
    if known is not None and (known.status, known.reason, known.message, known.observed_generation) == (
        status,
        reason,
        message,
        meta.generation,
    ):
        return []
    condition = Condition(
        type=type_,
        status=status,
        reason=reason,
        message=message,
        observed_generation=meta.generation,
        last_transition=wall if known is None else later_timestamp(wall, known.last_transition),
    )
    return [Action(SetCondition(type(obj).__name__, meta.name, condition, meta.tenant))]


def later_timestamp(wall: str, known: str) -> str:
    """Return a timestamp that is later than `known`, normally `wall`.

    Of two conditions of one generation the later wins. The previous writer's clock may have been ahead of this one; then the
    result is one millisecond after `known`.
    """
    if wall > known:
        return wall
    try:
        last = datetime.fromisoformat(known)
    except ValueError:
        return wall
    return (last + timedelta(milliseconds=1)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def describe_claim(claim: AnyClaim) -> str:
    """Return the operation and the object of a claim, for people."""
    match claim:
        case Move(transition=transition, replica=replica):
            return f"transition {transition} of {replica}"
        case Spawn(tenant=tenant, workload=workload, first=first, count=count):
            last = first + count - 1
            return f"creation of {workload}-{first}" + (f" to {workload}-{last}" if count > 1 else "") + f" of tenant {tenant}"
        case Delete(kind=kind, name=name, tenant=tenant):
            return f"deletion of {key_of(kind, name, tenant)}"
        case _:
            return f"a {type(claim).__name__} claim"
