"""How are reasons, changes and funnels said? Words only; what is printed where is in explain_shown.py and capacity.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

from remit.model.quantity import format_duration
from remit.model.resources import Amount
from remit.proposal.explained import Change, Nearest, Passage, Preemption, QuotaTold, Unblock

PASSED: Final = {
    "node-health": "ready",
    "takes-work": "open",
    "place": "in place",
    "policy": "allowed",
    "taints": "tolerated",
    "labels": "labels match",
    "resources": "room",
    "devices": "free devices",
    "device-shares": "free share",
    "spread": "even",
    "affinity": "beside",
    "anti-affinity": "apart",
    "shunned": "not shunned",
    "overrides": "not overridden",
}
"""By filter, what the nodes are that it lets pass."""

EASED: Final = {
    "place": "placement.regions, zones or pools allow another place",
    "policy": "the policy allows another place",
    "taints": "it tolerates the taint, or the taint is lifted",
    "labels": "nodeSelector or expressions are dropped, or a node is labelled",
    "spread": "topologySpread is loosened (ScheduleAnyway)",
    "affinity": "affinity is dropped, or what it must be near is placed",
    "anti-affinity": "antiAffinity is dropped",
    "shunned": "those that keep away from it drop their antiAffinity",
    "overrides": "the overrides that keep it away end",
}
"""By filter, what would have to be done for it to be no longer in the way."""

STANDS_IN: Final = {
    "priority": "nobody of lower priority runs where it could stand",
    "class": "its priority class preempts nobody",
    "gang": "a gang pushes nobody aside",
    "quota": "its quota comes first",
    "place": "room is not what it lacks",
    "protected": "minAvailable protects those who would have to go",
    "little": "even without all lower work it would not fit",
    "most": "no more were looked for",
    "none": "every node takes work already, and no pool may grow",
    "soft": "nodes that take no work now, or that pools may bring, would not fit it either",
}
"""By word of `Preemption.why` and of capacity, why not."""


def funnel_line(passage: Passage, quota: QuotaTold | None = None) -> str:
    """`nodes 120 -> ready 118 -> room 3`; each number is what is left of the one before it."""
    parts = [f"nodes {passage.nodes}", *(f"{PASSED.get(step.filter, step.filter)} {step.left}" for step in passage.steps)]
    if quota is not None and quota.covers < quota.wanted:
        parts.append(f"quota {quota.covers}" + (f" of {quota.wanted}" if quota.wanted > 1 else ""))
    return " -> ".join(parts)


def nearest_words(nearest: Nearest) -> str:
    refused = ", ".join(nearest.refused)
    return (
        f"{nearest.node}, short by {nearest.lacks}" + (f" ({refused})" if refused else "")
        if nearest.lacks
        else (f"{nearest.node}, refused by {refused}" if refused else nearest.node)
    )


def unblock_words(unblock: Unblock) -> str:
    """All of its changes in one line, and where it would fit then."""
    said = ", and ".join(change_words(change) for change in unblock.changes)
    named = ", ".join(unblock.nodes)
    others = f" and {unblock.fits - len(unblock.nodes)} more" if unblock.fits > len(unblock.nodes) > 0 else ""
    return f"{said} (then it fits {many(unblock.fits, 'node')}{f': {named}{others}' if named else ''})"


def change_words(change: Change) -> str:
    match change.kind:
        case "quota":
            return f"the quota {change.what} grows by {change.amount}"
        case "grant":
            return f"grant {change.what} is renewed"
        case "tenant":
            return f"{change.what} is declared here"
        case "policy":
            return f"the lease on policy {change.what} is renewed"
        case "override":
            return f"override {change.what} ends"
        case "members":
            return f"there {_are(change.count)} {many(change.count, 'more replica')} of the gang"
        case "grow":
            models = f" ({' or '.join(change.models)})" if change.models else ""
            return f"node {change.what} grows by {change.amount}{models}"
        case "shrink":
            return f"it asks for {change.amount} less"
        case "nodes":
            return f"there {_are(change.count)} {many(change.count, 'more node')} like {change.what}"
        case "filter":
            return _eased_words(change)
        case _:
            return f"{change.kind} {change.what}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _eased_words(change: Change) -> str:
    nodes = ", ".join(change.nodes) or "one of them"
    if change.what == "node-health":
        return f"{nodes} {_are(len(change.nodes) or 1)} ready again"
    if change.what == "takes-work":
        return f"{nodes} {_are(len(change.nodes) or 1)} uncordoned"
    return EASED.get(change.what, f"plug-in {change.what} lets it pass")


def preemption_words(preemption: Preemption) -> str:
    victims = ", ".join(f"{one.replica} (priority {one.priority})" for one in preemption.victims)
    if preemption.possible:
        return f"{victims} on {preemption.node}, at the scheduler's next turn"
    return STANDS_IN.get(preemption.why, preemption.why) + (f": {victims} on {preemption.node}" if victims else "")


def quota_words(quota: QuotaTold) -> str:
    if quota.dead:
        return f"{quota.ledger} is dead ({quota.dead})"
    left = {name: count for name, count in quota.left if name in dict(quota.charge.pairs)}
    lacking = [name for name, _ in quota.charge if name not in left]
    told = str(Amount(left)) if left else ""
    none = ", ".join(f"no {name.removeprefix('devices/')}" for name in lacking)
    return f"{quota.ledger} has {', '.join(part for part in (told, none) if part) or 'nothing'} left; one takes {quota.charge}"


def many(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def counted(stages: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in stages.items()) or "none"


def listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def age_words(at: str, wall: str) -> str:
    """How long ago, by the wall clocks of two processes: for people only. Nothing, if it is not known or lies ahead."""
    try:
        ms = int((datetime.fromisoformat(wall) - datetime.fromisoformat(at)).total_seconds() * 1000)
    except ValueError:
        return ""
    if ms < 0:
        return ""
    return format_duration(ms if ms < 1_000 else ms // 1_000 * 1_000 if ms < 3_600_000 else ms // 60_000 * 60_000)


def clock_words(at: str) -> str:
    """The time of day of a wall clock's instant."""
    return at[11:19] if len(at) > 19 else at
