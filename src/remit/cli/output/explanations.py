"""Prints explanations: wording of reasons, changes, funnels.

Words only; what is printed where is in explain_shown.py and capacity.py.

Lines for a terminal, never wider than it; what they say is found elsewhere.
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


def funnel_line(passage: FilterFunnel, quota: QuotaExplanation | None = None) -> str:
    """`nodes 120 -> ready 118 -> room 3`; each number is what is left of the one before it."""
    parts = [f"nodes {passage.nodes}", *(f"{PASSED.get(step.filter, step.filter)} {step.left}" for step in passage.steps)]
    if quota is not None and quota.covers < quota.wanted:
        parts.append(f"quota {quota.covers}" + (f" of {quota.wanted}" if quota.wanted > 1 else ""))
    return " -> ".join(parts)


def nearest_words(nearest: NearestNodeExplanation) -> str:
    refused = ", ".join(nearest.refused)
    return (
        f"{nearest.node}, short by {nearest.lacks}" + (f" ({refused})" if refused else "")
        if nearest.lacks
        else (f"{nearest.node}, refused by {refused}" if refused else nearest.node)
    )


def unblock_words(unblock: Remedy) -> str:
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


def preemption_words(preemption: PreemptionExplanation) -> str:
    victims = ", ".join(f"{one.replica} (priority {one.priority})" for one in preemption.victims)
    if preemption.possible:
        return f"{victims} on {preemption.node}, at the scheduler's next turn"
    return STANDS_IN.get(preemption.why, preemption.why) + (f": {victims} on {preemption.node}" if victims else "")


def quota_words(quota: QuotaExplanation) -> str:
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
    """`text`, wrapped and hung behind `lead`."""
    first = Text(f"{lead}:" if lead else "", style="bold")
    first.pad_right(max(1, INDENT - first.cell_len))
    made = text if isinstance(text, Text) else Text(escaped(text), style=style)
    for number, part in enumerate(made.wrap(console, max(20, console.width - INDENT))):
        part.rstrip()
        console.print(Text.assemble(Text(" " * INDENT) if number else first, part), soft_wrap=True)


# -- a workload ----------------------------------------------------------------------------------------------------------------


def _workload(console: Console, told: WorkloadExplanation, verbose: bool, wall: str) -> None:
    console.print(Text.assemble(("workload ", ""), (f"{told.tenant}/{told.name}", "bold")), soft_wrap=True)
    missing = f"; {told.missing:,} not made yet" if told.missing else ""
    line(console, "progress", f"{counted(told.stages)} of {told.wanted:,} wanted{missing}")
    for number, group in enumerate(told.groups):
        if number and not verbose:
            line(console, "", f"{many(group.count, 'more')} of generation {group.generation}: {group.waits.reason or 'now'}")
            continue
        alike = f" and {many(group.count - 1, 'other')} like it" if group.count > 1 else ""
        _waits(console, f"{group.first}{alike}", group.waits, told.since, told.history, verbose, wall)
    if not told.groups:
        line(console, "limited by", _limit_words(told.limit, told.detail))
    if told.unattended:
        line(console, "nobody acts", told.unattended, BAD)


def _limit_words(limit: str, detail: str) -> str:
    if not limit:
        return f"nothing: {detail or 'it is where it should be'}"
    if detail:
        return f"{limit}: {detail}"
    if limit == "missing":
        return "replicas that are not made yet; who looks after workloads makes them"
    return _phase_words(Phase(limit))


def _phase_words(phase: Phase) -> str:
    wait = PHASE_TIMEOUTS.get(phase)
    if wait is None:
        return f"{phase}"
    limit = format_duration(wait.limit_ms) if wait.limit_ms else "the workload's fence"
    return f"{phase} may last {limit}; then {wait.role} takes it on by `{wait.transition}`"


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
    ago = age_words(told.since, wall)
    on = f" on {told.node}" if told.node else ""
    line(console, "stands", Text.assemble((f"{told.phase}{on}", "bold green"), f" for {ago}" if ago else ""))
    if told.phase in PHASE_TIMEOUTS:
        line(console, "", _phase_words(Phase(told.phase)))
    if told.said:
        line(console, "meanwhile", told.said)
    if told.result or told.reason:
        line(console, "because", " ".join(part for part in (told.result, told.reason) if part))
    if told.victims:
        gone = sum(told.victims.values())
        waits = listed([name.removeprefix("replica/") for name, left in told.victims.items() if not left])
        line(console, "reserved", f"{gone} of {len(told.victims)} victims have gone; still there: {waits}")
    if told.grants:
        devices = f"; devices {', '.join(sorted(told.devices))}" if told.devices else ""
        line(console, "charged to", ", ".join(told.grants) + devices)
    if told.node:
        _chosen(console, told, told.chosen, verbose, wall)


def _chosen(console: Console, told: ReplicaExplanation, chosen: PlacementExplanation | None, verbose: bool, wall: str) -> None:
    if chosen is None:
        line(console, "why here", f"the decision is no longer kept; --node {told.node} says whether it would fit there now")
        return
    others = chosen.passage.fits - 1
    first = next((one for one in chosen.candidates if one.node == told.node), None)
    if first is None:
        ahead = f"of {many(chosen.passage.fits, 'node')} that fit; those ahead before its like were placed were:"
    else:
        ahead = f"the best of {many(chosen.passage.fits, 'node')} that fit" if others > 0 else "the only node that fits"
    line(console, "why here", ahead)
    _candidates(console, chosen.candidates, told.node)
    line(console, "", funnel_line(chosen.passage))
    if chosen.victims:
        line(console, "pushed aside", listed([name.removeprefix("replica/") for name in chosen.victims]))
    age = age_words(chosen.at, wall)
    policy = f"policy {chosen.policy}" if chosen.policy else "no policy"
    seen = f"revision {chosen.seen}, {chosen.age_ms} ms old then; {policy}; overrides {listed(chosen.overrides)}"
    line(console, "was seen", seen)
    answer = next((one for one in reversed(told.history) if one.by == "authority" and "accepted" in one.said), None)
    if answer is not None:
        line(console, "answer", f"{answer.said} at revision {answer.revision}" + (f", {age} ago" if age else ""))
    refused = [one for one in told.history if one.by == "authority" and one.reason]
    waited = [one for one in told.history if one.by == "scheduler" and one.said == "waiting"]
    before = f"refused {many(len(refused), 'time')}, waited {many(len(waited), 'time')} before"
    line(console, "attempts", f"attempt {chosen.attempt}; {before}{_reasons([*refused, *waited])}")
    if verbose:
        line(console, "ledger", f"{chosen.grant or 'none'} had {chosen.left} left")


def _reasons(told: Sequence[HistoryEntry]) -> str:
    names = list(dict.fromkeys(one.reason for one in told if one.reason))
    return f" ({', '.join(names)})" if names else ""


# -- what waits ----------------------------------------------------------------------------------------------------------------


def _waits(
    console: Console,
    name: str,
    waits: PendingExplanation,
    since: str,
    history: Sequence[HistoryEntry],
    verbose: bool,
    wall: str,
) -> None:
    ago = age_words(since, wall)
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
    line(console, "waits", Text.assemble(name, "  ", head))
    line(console, "", _why(waits))
    line(console, "nodes", funnel_line(waits.passage, waits.quota))
    if waits.gang is not None:
        gang = waits.gang
        line(
            console,
            "gang",
            f"{gang.min} must be bound at once: {gang.fits} of {gang.waiting} that wait would fit now, {gang.standing} stand",
        )
    if waits.nearest is not None:
        line(console, "nearest fit", nearest_words(waits.nearest))
    if waits.candidates:
        _candidates(console, waits.candidates, "")
    for number, unblock in enumerate(waits.unblocks):
        line(console, "" if number else "unblocks", f"{'if' if not number else 'or if'} {unblock_words(unblock)}")
    if waits.verdict != "now" and not waits.unblocks:
        line(console, "unblocks", "no small change that was tried would do")
    if waits.preemption is not None:
        line(console, "preempts", preemption_words(waits.preemption))
    if waits.verdict != "now":
        line(console, "tried again", _again(waits, history, wall))
    if verbose:
        line(console, "quota", quota_words(waits.quota))
        _funnel(console, waits.passage)


def _verdict(waits: PendingExplanation) -> str:
    return {"now": "now", "not-now": 'not-now (not "never")', "never": "never (as declared now)"}[waits.verdict]


def _why(waits: PendingExplanation) -> str:
    if waits.verdict == "now":
        first = waits.candidates[0].node if waits.candidates else "a node"
        return f"nothing stands in its way: it would go to {first} at its turn"
    return f"{waits.meaning}; {waits.detail}"


def _again(waits: PendingExplanation, history: Sequence[HistoryEntry], wall: str) -> str:
    """At the latest so long after its last attempt, or when what it waits for happens. The times are of wall clocks."""
    sooner = f"sooner when this changes: {', '.join(waits.cures)} ({waits.cure})"
    last = next((one for one in reversed(history) if one.by == "scheduler" and one.at), None)
    if last is None:
        return f"by {format_duration(RETRY_MS_MAX)} after its last attempt, of which nothing is kept; {sooner}"
    until = datetime.fromisoformat(last.at) + timedelta(milliseconds=RETRY_MS_MAX)
    if until < datetime.fromisoformat(wall):
        return f"it was to be by {until:%H:%M:%S} UTC, and nothing is recorded of it: is a scheduler running? {sooner}"
    return f"by {until:%H:%M:%S} UTC at the latest; {sooner}"


def _candidates(console: Console, candidates: Iterable[DecisionCandidate], chosen: str) -> None:
    for one in candidates:
        parts = ", ".join(f"{name} {score}" for name, score in one.parts.items())
        line(console, "", Text(f"{one.node}  score {one.score} ({parts})", style="green" if one.node == chosen else ""))


def _funnel(console: Console, passage: FilterFunnel) -> None:
    """Every step, and that it adds up."""
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
            line(console, "", f"where it is, on {here.node}: score {here.score} ({_parts(here.parts)})")
        return
    line(console, f"on {there.node}", Text(f"it breaks {many(len(there.broken), 'rule')} there now", style="yellow"))
    for one in there.broken:
        line(console, "", f"{one.filter}: {one.meaning} (cure: {one.cure})")
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
            f"{clock_words(one.at) or '-'}  {one.revision}  {one.by} {one.said}{reason}{detail}",
        )
    if len(history) > len(shown):
        line(console, "", f"and {len(history) - len(shown)} before; -o json has up to {len(history)}")
