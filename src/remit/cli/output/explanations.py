"""Prints explanations of replicas and workloads, and words their parts: funnels, remedies, preemption, quota.

The server or `remit.proposal.explain` computes an explanation; this module only words it. Lines are wrapped to the width of
the terminal. `remit explain`, `describe`, `capacity` and `apply` share these texts, so that one fact reads the same
everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

from rich.console import Console
from rich.text import Text

from remit.cli.output.console import BAD
from remit.law.lifecycle import PHASE_TIMEOUTS
from remit.law.refusals import REFUSALS
from remit.model.claims import Code
from remit.model.problems import escaped
from remit.model.records import DecisionCandidate, Phase
from remit.model.resources import Amount, format_duration
from remit.proposal.explain.result_types import (
    Change,
    ExplanationEvidence,
    FilterFunnel,
    HistoryEntry,
    NearestNodeExplanation,
    NodeFitExplanation,
    PendingExplanation,
    PlacementExplanation,
    PreemptionExplanation,
    QuotaExplanation,
    Remedy,
    ReplicaExplanation,
    WorkloadExplanation,
)
from remit.proposal.queue.backlog import RETRY_MS_MAX

PASSED_LABELS: Final = {
    "ready": "ready",
    "takes-work": "schedulable",
    "place": "placement matches",
    "policy": "policy allows",
    "taints": "taints tolerated",
    "labels": "labels match",
    "resources": "capacity",
    "devices": "free devices",
    "device-shares": "free device share",
    "spread": "spread kept",
    "affinity": "affinity met",
    "anti-affinity": "anti-affinity met",
    "shunned": "peers' anti-affinity met",
    "overrides": "no override",
}
"""By filter name: the label of the nodes that passed it, in the funnel line."""

RELAXED: Final = {
    "place": "placement.regions, zones or pools allow another place",
    "policy": "the policy allows another place",
    "taints": "it tolerates the taint, or the taint is removed",
    "labels": "nodeSelector or expressions are removed, or a node is labelled",
    "spread": "topologySpread is relaxed (ScheduleAnyway)",
    "affinity": "affinity is removed, or a matching replica is placed",
    "anti-affinity": "antiAffinity is removed",
    "shunned": "the replicas with antiAffinity to it drop that antiAffinity",
    "overrides": "the overrides that exclude it end",
}
"""By filter name: the change after which the filter no longer rejects the replica. It completes a sentence that begins with
"if".
"""

NOT_POSSIBLE: Final = {
    "priority": "no replica of lower priority runs on a node where it could run",
    "class": "its priority class does not preempt",
    "gang": "gangs do not preempt",
    "quota": "quota is exhausted, so freed capacity would not help",
    "place": "no node is rejected only for lack of capacity",
    "protected": "minAvailable protects the replicas that would have to be evicted",
    "little": "it would not fit even if all lower-priority replicas were evicted",
    "most": "the search stopped at its limit",
    "none": "all nodes are schedulable already, and no pool may grow",
    "soft": "it would not fit on unschedulable nodes or on nodes that pools may add either",
}
"""By code of `PreemptionExplanation.why`, and of the reclaimable and soft capacity: why preemption or more capacity is
impossible.
"""


def funnel_line(passage: FilterFunnel, quota: QuotaExplanation | None = None) -> str:
    """Formats a funnel as `nodes 120 -> ready 118 -> capacity 3`. Each number counts the nodes that passed all filters so far."""
    parts = [
        f"nodes {passage.nodes}",
        *(f"{PASSED_LABELS.get(step.filter, step.filter)} {step.left}" for step in passage.steps),
    ]
    if quota is not None and quota.covers < quota.wanted:
        parts.append(f"quota {quota.covers}" + (f" of {quota.wanted}" if quota.wanted > 1 else ""))
    return " -> ".join(parts)


def format_nearest(nearest: NearestNodeExplanation) -> str:
    refused = ", ".join(nearest.refused)
    return (
        f"{nearest.node}, short by {nearest.lacks}" + (f" ({refused})" if refused else "")
        if nearest.lacks
        else (f"{nearest.node}, refused by {refused}" if refused else nearest.node)
    )


def format_remedy(unblock: Remedy) -> str:
    """Formats all changes of a remedy in one line, with the nodes on which the replica fits afterwards."""
    said = ", and ".join(format_change(change) for change in unblock.changes)
    named = ", ".join(unblock.nodes)
    others = f" and {unblock.fits - len(unblock.nodes)} more" if unblock.fits > len(unblock.nodes) > 0 else ""
    return f"{said} (then it fits {many(unblock.fits, 'node')}{f': {named}{others}' if named else ''})"


def format_change(change: Change) -> str:
    match change.kind:
        case "quota":
            return f"quota {change.what} grows by {change.amount}"
        case "grant":
            return f"grant {change.what} is renewed"
        case "tenant":
            return f"{change.what} is declared here"
        case "policy":
            return f"the lease on policy {change.what} is renewed"
        case "override":
            return f"override {change.what} ends"
        case "members":
            return f"the gang has {many(change.count, 'more replica')}"
        case "grow":
            models = f" ({' or '.join(change.models)})" if change.models else ""
            return f"node {change.what} grows by {change.amount}{models}"
        case "shrink":
            return f"it requests {change.amount} less"
        case "nodes":
            return f"there {_are(change.count)} {many(change.count, 'more node')} like {change.what}"
        case "filter":
            return _format_relaxed(change)
        case _:
            return f"{change.kind} {change.what}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _format_relaxed(change: Change) -> str:
    nodes = ", ".join(change.nodes) or "one of them"
    if change.what == "node-health":
        return f"{nodes} {_are(len(change.nodes) or 1)} ready again"
    if change.what == "takes-work":
        return f"{nodes} {_are(len(change.nodes) or 1)} uncordoned"
    return RELAXED.get(change.what, f"plug-in {change.what} lets it pass")


def format_preemption(preemption: PreemptionExplanation) -> str:
    victims = ", ".join(f"{victim.replica} (priority {victim.priority})" for victim in preemption.victims)
    if preemption.possible:
        return f"{victims} on {preemption.node}, in the scheduler's next cycle"
    return NOT_POSSIBLE.get(preemption.why, preemption.why) + (f": {victims} on {preemption.node}" if victims else "")


def format_quota(quota: QuotaExplanation) -> str:
    if quota.dead:
        return f"nothing can be charged to {quota.ledger} ({quota.dead})"
    left = {name: count for name, count in quota.left if name in dict(quota.charge.pairs)}
    lacking = [name for name, _ in quota.charge if name not in left]
    told = str(Amount(left)) if left else ""
    none = ", ".join(f"no {name.removeprefix('devices/')}" for name in lacking)
    return f"{quota.ledger} has {', '.join(part for part in (told, none) if part) or 'nothing'} left; one replica needs {quota.charge}"


def many(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def counted(stages: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in stages.items()) or "none"


def listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def format_age(at: str, wall: str) -> str:
    """How long ago `at` was. Both times come from wall clocks of possibly different machines, so the result is for display
    only. Empty if `at` is unknown or in the future.
    """
    try:
        ms = int((datetime.fromisoformat(wall) - datetime.fromisoformat(at)).total_seconds() * 1000)
    except ValueError:
        return ""
    if ms < 0:
        return ""
    return format_duration(ms if ms < 1_000 else ms // 1_000 * 1_000 if ms < 3_600_000 else ms // 60_000 * 60_000)


def format_clock(at: str) -> str:
    """The time of day (HH:MM:SS) of an ISO 8601 timestamp."""
    return at[11:19] if len(at) > 19 else at


INDENT: Final = 14
HISTORY_SHOWN: Final = 12
STYLES: Final = {"now": "green", "not-now": "yellow", "never": "red"}


def show(console: Console, told: ReplicaExplanation | WorkloadExplanation, *, verbose: bool, wall: str) -> None:
    if isinstance(told, ReplicaExplanation):
        _replica(console, told, verbose, wall)
    else:
        _workload(console, told, verbose, wall)
    if told.there is not None:
        _node(console, told.there, told.here if isinstance(told, ReplicaExplanation) else None)
    line(console, "evidence", _evidence(told.evidence))
    if verbose:
        _history(console, told.history)


def line(console: Console, lead: str, text: str | Text, style: str = "") -> None:
    """Prints `text` behind the label `lead`, wrapped with a hanging indent."""
    first = Text(f"{lead}:" if lead else "", style="bold")
    first.pad_right(max(1, INDENT - first.cell_len))
    made = text if isinstance(text, Text) else Text(escaped(text), style=style)
    for number, part in enumerate(made.wrap(console, max(20, console.width - INDENT))):
        part.rstrip()
        console.print(Text.assemble(Text(" " * INDENT) if number else first, part), soft_wrap=True)


# -- a workload ----------------------------------------------------------------------------------------------------------------


def _workload(console: Console, told: WorkloadExplanation, verbose: bool, wall: str) -> None:
    console.print(Text.assemble(("workload ", ""), (f"{told.tenant}/{told.name}", "bold")), soft_wrap=True)
    missing = f"; {told.missing:,} not created yet" if told.missing else ""
    line(console, "progress", f"{counted(told.stages)} of {told.wanted:,} desired{missing}")
    for number, group in enumerate(told.groups):
        if number and not verbose:
            line(console, "", f"{many(group.count, 'more')} of generation {group.generation}: {group.waits.reason or 'now'}")
            continue
        alike = f" and {many(group.count - 1, 'other')} like it" if group.count > 1 else ""
        _waits(console, f"{group.first}{alike}", group.waits, told.since, told.history, verbose, wall)
    if not told.groups:
        line(console, "limited by", _format_limit(told.limit, told.detail))
    if told.unattended:
        line(console, "not running", told.unattended, BAD)


def _format_limit(limit: str, detail: str) -> str:
    if not limit:
        return f"nothing: {detail or 'it is in its desired state'}"
    if detail:
        return f"{limit}: {detail}"
    if limit == "missing":
        return "replicas that are not created yet; the workload controller creates them"
    return _format_phase(Phase(limit))


def _format_phase(phase: Phase) -> str:
    wait = PHASE_TIMEOUTS.get(phase)
    if wait is None:
        return f"{phase}"
    limit = format_duration(wait.limit_ms) if wait.limit_ms else "the workload's fence"
    return f"{phase} may last {limit}; after that the {wait.role} role performs `{wait.transition}`"


# -- a replica -----------------------------------------------------------------------------------------------------------------


def _replica(console: Console, told: ReplicaExplanation, verbose: bool, wall: str) -> None:
    console.print(
        Text.assemble(
            ("replica ", ""), (f"{told.tenant}/{told.name}", "bold"), f"  generation {told.generation}, attempt {told.attempt}"
        ),
        soft_wrap=True,
    )
    if told.waits is not None:
        _waits(console, told.name, told.waits, told.since, told.history, verbose, wall)
        return
    ago = format_age(told.since, wall)
    on = f" on {told.node}" if told.node else ""
    line(console, "state", Text.assemble((f"{told.phase}{on}", "bold green"), f" for {ago}" if ago else ""))
    if told.phase in PHASE_TIMEOUTS:
        line(console, "", _format_phase(Phase(told.phase)))
    if told.said:
        line(console, "agent report", told.said)
    if told.result or told.reason:
        line(console, "reason", " ".join(part for part in (told.result, told.reason) if part))
    if told.victims:
        gone = sum(told.victims.values())
        waits = listed([name.removeprefix("replica/") for name, left in told.victims.items() if not left])
        line(console, "reserved", f"{gone} of {len(told.victims)} victims are released; not released yet: {waits}")
    if told.grants:
        devices = f"; devices {', '.join(sorted(told.devices))}" if told.devices else ""
        line(console, "charged to", ", ".join(told.grants) + devices)
    if told.node:
        _chosen(console, told, told.chosen, verbose, wall)


def _chosen(console: Console, told: ReplicaExplanation, chosen: PlacementExplanation | None, verbose: bool, wall: str) -> None:
    if chosen is None:
        line(console, "why here", f"the decision is no longer stored; --node {told.node} shows whether it would fit there now")
        return
    others = chosen.passage.fits - 1
    first = next((candidate for candidate in chosen.candidates if candidate.node == told.node), None)
    if first is None:
        ahead = f"one of {many(chosen.passage.fits, 'node')} that fit; the best ones before the replicas of the same batch were placed:"
    else:
        ahead = f"the best of {many(chosen.passage.fits, 'node')} that fit" if others > 0 else "the only node that fits"
    line(console, "why here", ahead)
    _candidates(console, chosen.candidates, told.node)
    line(console, "", funnel_line(chosen.passage))
    if chosen.victims:
        line(console, "preempted", listed([name.removeprefix("replica/") for name in chosen.victims]))
    age = format_age(chosen.at, wall)
    policy = f"policy {chosen.policy}" if chosen.policy else "no policy"
    seen = f"revision {chosen.seen}, {chosen.age_ms} ms old at the decision; {policy}; overrides {listed(chosen.overrides)}"
    line(console, "decided on", seen)
    answer = next((entry for entry in reversed(told.history) if entry.by == "authority" and "accepted" in entry.said), None)
    if answer is not None:
        line(console, "verdict", f"{answer.said} at revision {answer.revision}" + (f", {age} ago" if age else ""))
    refused = [entry for entry in told.history if entry.by == "authority" and entry.reason]
    waited = [entry for entry in told.history if entry.by == "scheduler" and entry.said == "waiting"]
    before = f"refused {many(len(refused), 'time')}, pending {many(len(waited), 'time')} before"
    line(console, "attempts", f"attempt {chosen.attempt}; {before}{_reasons([*refused, *waited])}")
    if verbose:
        line(console, "ledger", f"{chosen.grant or 'none'} had {chosen.left} left")


def _reasons(told: Sequence[HistoryEntry]) -> str:
    names = list(dict.fromkeys(one.reason for one in told if one.reason))
    return f" ({', '.join(names)})" if names else ""


# -- pending replicas
# -----------------------------------------------------------------------------------------------------------


def _waits(
    console: Console,
    name: str,
    waits: PendingExplanation,
    since: str,
    history: Sequence[HistoryEntry],
    verbose: bool,
    wall: str,
) -> None:
    ago = format_age(since, wall)
    reason = waits.reason or "none"
    style = STYLES[waits.verdict]
    head = Text.assemble(
        ("Pending", "bold"),
        f" {ago}" if ago else "",
        "  reason=",
        (reason, f"bold {style}"),
        "  verdict=",
        (_verdict(waits), style),
    )
    line(console, "replica", Text.assemble(name, "  ", head))
    line(console, "", _why(waits))
    line(console, "nodes", funnel_line(waits.passage, waits.quota))
    if waits.gang is not None:
        gang = waits.gang
        line(
            console,
            "gang",
            f"{gang.min} must be bound at once: {gang.fits} of {gang.waiting} pending replicas fit now, {gang.standing} are placed",
        )
    if waits.nearest is not None:
        line(console, "nearest fit", format_nearest(waits.nearest))
    if waits.candidates:
        _candidates(console, waits.candidates, "")
    for number, unblock in enumerate(waits.unblocks):
        line(console, "" if number else "unblocks", f"{'if' if not number else 'or if'} {format_remedy(unblock)}")
    if waits.verdict != "now" and not waits.unblocks:
        line(console, "unblocks", "none of the small changes that were tried would be enough")
    if waits.preemption is not None:
        line(console, "preempts", format_preemption(waits.preemption))
    if waits.verdict != "now":
        line(console, "next attempt", _again(waits, history, wall))
    if verbose:
        line(console, "quota", format_quota(waits.quota))
        _funnel(console, waits.passage)


def _verdict(waits: PendingExplanation) -> str:
    return {"now": "now", "not-now": 'not-now (not "never")', "never": "never (with the cluster as declared now)"}[
        waits.verdict
    ]


def _why(waits: PendingExplanation) -> str:
    if waits.verdict == "now":
        first = waits.candidates[0].node if waits.candidates else "a node"
        return f"nothing prevents its placement: the next cycle would place it on {first}"
    return f"{waits.meaning}; {waits.detail}"


def _again(waits: PendingExplanation, history: Sequence[HistoryEntry], wall: str) -> str:
    """When the next attempt is due: at most RETRY_MS_MAX after the last one, or earlier after an unblock event. The times come
    from wall clocks.
    """
    sooner = f"earlier when this changes: {', '.join(waits.cures)} ({waits.cure})"
    last = next((entry for entry in reversed(history) if entry.by == "scheduler" and entry.at), None)
    if last is None:
        return f"at most {format_duration(RETRY_MS_MAX)} after its last attempt, which is no longer recorded; {sooner}"
    until = datetime.fromisoformat(last.at) + timedelta(milliseconds=RETRY_MS_MAX)
    if until < datetime.fromisoformat(wall):
        return f"was due by {until:%H:%M:%S} UTC, but none is recorded; check that a scheduler is running (`remit status`); {sooner}"
    return f"by {until:%H:%M:%S} UTC at the latest; {sooner}"


def _candidates(console: Console, candidates: Iterable[DecisionCandidate], chosen: str) -> None:
    for candidate in candidates:
        parts = ", ".join(f"{name} {score}" for name, score in candidate.parts.items())
        line(
            console,
            "",
            Text(f"{candidate.node}  score {candidate.score} ({parts})", style="green" if candidate.node == chosen else ""),
        )


def _funnel(console: Console, passage: FilterFunnel) -> None:
    """Prints the rejected nodes of every filter, and the sum, so that a reader can check that no node is missing."""
    for step in passage.steps:
        why = step.meaning or (REFUSALS[Code(step.reason)].meaning if step.reason else "of a plug-in")
        line(console, "", f"{step.refused:>7,} refused by {step.filter}: {why}")
    total = sum(step.refused for step in passage.steps)
    line(console, "", f"{passage.fits:>7,} fit; {total:,} + {passage.fits:,} = {passage.nodes:,} nodes")


# -- one node ------------------------------------------------------------------------------------------------------------------


def _node(console: Console, there: NodeFitExplanation, here: NodeFitExplanation | None) -> None:
    if there.fits:
        line(console, f"on {there.node}", Text("it would fit there now", style="green"))
        line(console, "", f"score {there.score} ({_parts(there.parts)})")
        if here is not None and here.fits and here.node != there.node:
            line(console, "", f"on its current node {here.node}: score {here.score} ({_parts(here.parts)})")
        return
    line(console, f"on {there.node}", Text(f"it violates {many(len(there.broken), 'rule')} there now", style="yellow"))
    for one in there.broken:
        line(console, "", f"{one.filter}: {one.meaning} (fix: {one.cure})")
    if there.lacks:
        line(console, "", f"it lacks {there.lacks}")


def _parts(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {score}" for name, score in parts.items())


def _evidence(evidence: ExplanationEvidence) -> str:
    policy = f"policy {evidence.policy}" if evidence.policy else "no policy"
    return f"revision {evidence.revision}, read {evidence.age_ms} ms ago; {policy}; overrides {listed(evidence.overrides)}"


def _history(console: Console, history: Sequence[HistoryEntry]) -> None:
    shown = history[-HISTORY_SHOWN:]
    for number, one in enumerate(shown):
        reason = f" {one.reason}" if one.reason else ""
        detail = f": {one.detail}" if one.detail else ""
        line(
            console,
            "" if number else "recorded",
            f"{format_clock(one.at) or '-'}  {one.revision}  {one.by} {one.said}{reason}{detail}",
        )
    if len(history) > len(shown):
        line(console, "", f"and {len(history) - len(shown)} earlier ones; -o json lists up to {len(history)}")
