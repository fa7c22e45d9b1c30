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
from remit.law.workload_rules import PHASE_DETAILS
from remit.model.claims import Code
from remit.model.problems import escaped
from remit.model.records import DecisionCandidate, Phase, result_text
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
    "node-health": "ready",
    "schedulable": "schedulable",
    "placement": "in the requested regions, zones and pools",
    "policy": "allowed by the policy",
    "taints": "with only tolerated taints",
    "labels": "with matching labels",
    "resources": "with enough free capacity",
    "devices": "with enough free devices",
    "device-shares": "with a large enough free device share",
    "spread": "within the topology spread",
    "affinity": "with affinity met",
    "anti-affinity": "with anti-affinity met",
    "others-anti-affinity": "with others' anti-affinity met",
    "overrides": "not excluded by an override",
}
"""By filter name: what the nodes that passed it are, in the funnel line."""

RELAXED: Final = {
    "placement": "placement.regions, zones or pools allow another place",
    "policy": "the policy allows another place",
    "taints": "it tolerates the taint, or the taint is removed",
    "labels": "nodeSelector or expressions are removed, or a node is labelled",
    "spread": "topologySpread is relaxed (ScheduleAnyway)",
    "affinity": "affinity is removed, or a matching replica is placed",
    "anti-affinity": "antiAffinity is removed",
    "others-anti-affinity": "the antiAffinity of the other replicas no longer matches it",
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
    "place": "no schedulable node both matches its constraints and is large enough",
    "protected": "minAvailable protects the replicas that would have to be evicted",
    "little": "it would not fit even if all lower-priority replicas were evicted",
    "most": "the search stopped at its limit",
    "none": "all nodes are schedulable already, and no pool may grow",
    "soft": "it would not fit on unschedulable nodes or on nodes that pools may add either",
}
"""By code of `PreemptionExplanation.why`, and of the reclaimable and soft capacity: why preemption or more capacity is
impossible.
"""


def funnel_line(funnel: FilterFunnel, quota: QuotaExplanation | None = None) -> str:
    """Formats a funnel as `120 nodes -> 118 ready -> 3 with enough free capacity`: the nodes left after each filter."""
    parts = [
        many(funnel.nodes, "node"),
        *(f"{step.left:,} {PASSED_LABELS.get(step.filter, f'accepted by {step.filter}')}" for step in funnel.steps),
    ]
    if quota is not None and quota.covers < quota.wanted:
        of = f"{quota.covers} of {quota.wanted}" if quota.wanted > 1 else f"{quota.covers}"
        parts.append(f"quota for {of} replicas")
    return " -> ".join(parts)


def format_nearest(nearest: NearestNodeExplanation) -> str:
    refused = ", ".join(nearest.refused)
    return (
        f"{nearest.node}, short by {nearest.lacks}" + (f" ({refused})" if refused else "")
        if nearest.lacks
        else (f"{nearest.node}, refused by {refused}" if refused else nearest.node)
    )


def format_remedy(remedy: Remedy) -> str:
    """Formats all changes of a remedy in one line, with the nodes on which the replica fits afterwards."""
    changes_text = ", and ".join(format_change(change) for change in remedy.changes)
    named = ", ".join(remedy.nodes)
    others_text = f" and {remedy.fits - len(remedy.nodes)} more" if remedy.fits > len(remedy.nodes) > 0 else ""
    return f"{changes_text} (then it fits {many(remedy.fits, 'node')}{f': {named}{others_text}' if named else ''})"


def format_change(change: Change) -> str:
    match change.kind:
        case "quota":
            return f"quota {change.what} grows by {change.amount}"
        case "grant":
            return f"grant {change.what} is renewed"
        case "tenant":
            return f"{change.what.replace('/', ' ', 1)} is declared in this scope"
        case "policy":
            return f"the parent scope renews policy revision {change.what}"
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
        return f"{nodes} {'becomes' if len(change.nodes) < 2 else 'become'} ready"
    if change.what == "schedulable":
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
    remaining = {name: count for name, count in quota.left if name in dict(quota.charge.pairs)}
    lacking = [name for name, _ in quota.charge if name not in remaining]
    explanation = str(Amount(remaining)) if remaining else ""
    none = ", ".join(f"no {name.removeprefix('devices/')}" for name in lacking)
    free = ", ".join(part for part in (explanation, none) if part) or "nothing"
    return f"{quota.ledger} has {free} left; one replica needs {quota.charge}"


def many(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


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


UNBLOCKED_BY: Final = {
    "node": "a change of nodes",
    "room": "freed capacity",
    "peers": "another replica of the tenant placed or removed",
    "member": "another replica of the gang",
    "policy": "a policy change",
    "override": "the end of an override",
    "quota": "freed or raised quota",
    "workload": "a change of the workload",
    "time": "a retry",
}
"""By unblock event: text for the line `next attempt`."""
PHASE_ENDS: Final = {
    Phase.RESERVED: "the repair controller returns it to pending",
    Phase.BOUND: "the repair controller aborts this attempt",
    Phase.STARTING: "the repair controller aborts this attempt",
    Phase.DRAINING: "the agent of the node stops it; if the node sends no heartbeats, the node controller marks it unknown",
    Phase.STOPPING: "the agent of the node stops it; if the node sends no heartbeats, the node controller marks it unknown",
    Phase.FINISHED: "the workload controller releases it",
    Phase.UNKNOWN: (
        "if the node sends no heartbeats, the node controller declares it lost; with `replace: fenced`, the default of jobs, "
        "only after spec.fence"
    ),
    Phase.FAILED: "the repair controller releases it",
}
"""How each phase ends that another role than the agent must end."""

TIMED_PHASES: Final = frozenset({Phase.RESERVED, Phase.BOUND, Phase.STARTING})
"""The phases that end by a timeout; the others end as soon as the named role acts."""

REFUSAL_MEANINGS: Final = frozenset(refusal.meaning for refusal in REFUSALS.values())
STATED_BY_DETAIL: Final = frozenset(REFUSALS[code].meaning for code in (Code.OVER_QUOTA, Code.GANG_SHORT))
INDENT: Final = 14
HISTORY_SHOWN: Final = 12
STYLES: Final = {"now": "green", "not-now": "yellow", "never": "red"}


def show(console: Console, explanation: ReplicaExplanation | WorkloadExplanation, *, verbose: bool, wall: str) -> None:
    if isinstance(explanation, ReplicaExplanation):
        _replica(console, explanation, verbose, wall)
    else:
        _workload(console, explanation, verbose, wall)
    if explanation.there is not None:
        _node(console, explanation.there, explanation.here if isinstance(explanation, ReplicaExplanation) else None)
    line(console, "evidence", _evidence(explanation.evidence))
    if verbose:
        _history(console, explanation.history)


def line(console: Console, lead: str, text: str | Text, style: str = "") -> None:
    """Prints `text` behind the label `lead`, wrapped with a hanging indent."""
    first = Text(f"{lead}:" if lead else "", style="bold")
    first.pad_right(max(1, INDENT - first.cell_len))
    content = text if isinstance(text, Text) else Text(escaped(text), style=style)
    for number, part in enumerate(content.wrap(console, max(20, console.width - INDENT))):
        part.rstrip()
        console.print(Text.assemble(Text(" " * INDENT) if number else first, part), soft_wrap=True)


# -- a workload ----------------------------------------------------------------------------------------------------------------


def _workload(console: Console, explanation: WorkloadExplanation, verbose: bool, wall: str) -> None:
    console.print(Text.assemble(("workload ", ""), (f"{explanation.tenant}/{explanation.name}", "bold")), soft_wrap=True)
    missing = f"; {explanation.missing:,} not created yet" if explanation.missing else ""
    line(console, "progress", f"{counted(explanation.stages)} of {explanation.wanted:,} desired{missing}")
    for number, group in enumerate(explanation.groups):
        if number and not verbose:
            line(
                console,
                "",
                f"{group.count:,} more of generation {group.generation}: {group.waits.reason or 'can be placed now'}",
            )
            continue
        similar = f" and {many(group.count - 1, 'other')} like it" if group.count > 1 else ""
        _pending(console, f"{group.first}{similar}", group.waits, explanation.since, explanation.history, verbose, wall)
    if not explanation.groups:
        detail = explanation.detail
        if not explanation.limit and not detail and (released := explanation.stages.get(Phase.RELEASED, 0)):
            detail = f"{many(released, 'released replica')} completed, or will be retried or removed by the controllers"
        line(console, "limited by", _format_limit(explanation.limit, detail))
    if explanation.unattended:
        line(console, "warning", explanation.unattended, BAD)


def _format_limit(limit: str, detail: str) -> str:
    if not limit:
        return f"nothing: {detail or 'it is in its desired state'}"
    if detail:
        return f"{limit}: {detail}"
    if limit == "missing":
        return "missing: replicas have not been created yet; the workload controller creates them"
    phase = Phase(limit)
    text = f"{limit}: {PHASE_DETAILS.get(limit, 'not ready yet')}"
    return f"{text} (times out after {_timeout(phase)})" if phase in TIMED_PHASES else text


def _timeout(phase: Phase) -> str:
    return format_duration(PHASE_TIMEOUTS[phase].limit_ms)


def _format_phase(phase: Phase) -> str:
    """Return how the phase ends if the replica stays in it."""
    end = PHASE_ENDS[phase]
    return f"times out after {_timeout(phase)} in phase {phase}; then {end}" if phase in TIMED_PHASES else end


# -- a replica -----------------------------------------------------------------------------------------------------------------


def _replica(console: Console, explanation: ReplicaExplanation, verbose: bool, wall: str) -> None:
    console.print(
        Text.assemble(
            ("replica ", ""),
            (f"{explanation.tenant}/{explanation.name}", "bold"),
            f"  generation {explanation.generation}, attempt {explanation.attempt}",
        ),
        soft_wrap=True,
    )
    if explanation.waits is not None:
        _pending(console, explanation.name, explanation.waits, explanation.since, explanation.history, verbose, wall)
        return
    ago = format_age(explanation.since, wall)
    on = f" on {explanation.node}" if explanation.node else ""
    line(console, "state", Text.assemble((f"{explanation.phase}{on}", "bold green"), f" for {ago}" if ago else ""))
    if explanation.phase in PHASE_TIMEOUTS:
        line(console, "", _format_phase(Phase(explanation.phase)))
    if explanation.said:
        line(console, "agent report", explanation.said)
    if explanation.result or explanation.reason:
        line(console, "reason", result_text(explanation.result, explanation.reason))
    if explanation.victims:
        line(console, "reserved", _format_victims(explanation.victims))
    if explanation.grants:
        devices = f"; devices {', '.join(sorted(explanation.devices))}" if explanation.devices else ""
        line(console, "charged to", ", ".join(explanation.grants) + devices)
    if explanation.node:
        _chosen(console, explanation, explanation.chosen, verbose, wall)


def _format_victims(gone: Mapping[str, bool]) -> str:
    """The preempted replicas that must stop before a reservation is bound. `gone`: by victim, whether it has stopped."""
    remaining = [name.removeprefix("replica/") for name, has_stopped in gone.items() if not has_stopped]
    if not remaining:
        return f"{many(len(gone), 'preempted replica')} stopped; the scheduler binds the reservation next"
    return f"waiting for {len(remaining)} of {many(len(gone), 'preempted replica')} to stop: {listed(remaining)}"


def _chosen(
    console: Console, explanation: ReplicaExplanation, chosen: PlacementExplanation | None, verbose: bool, wall: str
) -> None:
    """Print why the replica was placed on its node, from the stored decision."""
    if chosen is None:
        line(
            console,
            "why here",
            f"the decision is no longer stored; --node {explanation.node} shows whether it would fit there now",
        )
        return
    line(console, "why here", _format_rank(explanation, chosen))
    _candidates(console, chosen.candidates, explanation.node)
    if chosen.passage.steps:
        line(console, "", funnel_line(chosen.passage))
    if chosen.victims:
        line(console, "preempted", listed([name.removeprefix("replica/") for name in chosen.victims]))
    policy = f"policy {chosen.policy}" if chosen.policy else "no policy"
    line(
        console,
        "decided on",
        f"revision {chosen.seen}, {chosen.age_ms} ms old at the decision; {policy}; overrides {listed(chosen.overrides)}",
    )
    _verdicts(console, explanation.history, chosen, wall)
    if verbose:
        line(console, "ledger", f"{chosen.grant or 'none'} had {chosen.left} left")


def _format_rank(explanation: ReplicaExplanation, chosen: PlacementExplanation) -> str:
    fitting = many(chosen.passage.fits, "node")
    own = next((candidate.score for candidate in chosen.candidates if candidate.node == explanation.node), None)
    if chosen.victims or not chosen.passage.fits:
        return "replicas of lower priority were preempted to make room on it"
    if chosen.passage.fits == 1 and own is not None:
        return "the only node that fits"
    if own is not None and all(candidate.score < own for candidate in chosen.candidates if candidate.node != explanation.node):
        return f"the best of {fitting} that fit"
    scores = "; scores when its batch began, before other replicas of the batch were placed:" if chosen.candidates else ""
    return f"one of {fitting} that fit{scores}"


def _verdicts(console: Console, history: Sequence[HistoryEntry], chosen: PlacementExplanation, wall: str) -> None:
    """Print the verdict on the placement, and how often it was tried before.

    The tries are those of the scheduler's queue, which replicas with equal requirements share; they are not the attempts of
    the replica.
    """
    verdicts = [entry for entry in history if entry.by == "authority"]
    accepted = next((entry for entry in reversed(verdicts) if "bind" in entry.said and "accepted" in entry.said), None)
    if accepted is not None:
        age = format_age(chosen.at, wall)
        line(console, "verdict", f"{accepted.said} at revision {accepted.revision}" + (f", {age} ago" if age else ""))
    refused = [entry for entry in verdicts if entry.reason]
    pending = [entry for entry in history if entry.by == "scheduler" and entry.said == "waiting"]
    first = "on the first try" if chosen.attempt == 1 else f"on try {chosen.attempt} of its queue"
    earlier = (
        f"; earlier refused {many(len(refused), 'time')}, pending {many(len(pending), 'time')}" if refused or pending else ""
    )
    line(console, "placement", f"{first}{earlier}{_reasons([*refused, *pending])}")


def _reasons(explanation: Sequence[HistoryEntry]) -> str:
    names = list(dict.fromkeys(item.reason for item in explanation if item.reason))
    return f" ({', '.join(names)})" if names else ""


# -- pending replicas ----------------------------------------------------------------------------------------------------------


def _pending(
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
    line(console, "", _format_reason(waits))
    if waits.passage.steps:
        line(console, "nodes", funnel_line(waits.passage, waits.quota))
    if waits.gang is not None:
        gang = waits.gang
        line(
            console,
            "gang",
            f"{gang.min} must be bound at once: {gang.fits} of {gang.waiting} pending ones fit now, {gang.standing} are placed",
        )
    if waits.nearest is not None:
        line(console, "nearest fit", format_nearest(waits.nearest))
    if waits.candidates:
        _candidates(console, waits.candidates, "")
    for number, remedy in enumerate(waits.unblocks):
        line(console, "" if number else "unblocks", f"{'if' if not number else 'or if'} {format_remedy(remedy)}")
    if waits.verdict != "now" and not waits.unblocks:
        line(console, "unblocks", "no small change was found that would make it fit")
    if waits.preemption is not None:
        line(console, "preemption", format_preemption(waits.preemption))
    if waits.verdict != "now":
        line(console, "next attempt", _next_attempt(waits, history, wall))
    is_stated = waits.detail.startswith(f"{waits.quota.ledger} has too little quota left: ")
    if verbose or (waits.quota.covers < waits.quota.wanted and not is_stated):
        line(console, "quota", format_quota(waits.quota))
    if verbose:
        _funnel(console, waits.passage)


def _verdict(waits: PendingExplanation) -> str:
    return {
        "now": "now",
        "not-now": "not-now (a single replica would fit an empty node)",
        "never": "never (not without a change of the workload, the nodes or the policy)",
    }[waits.verdict]


def _format_reason(waits: PendingExplanation) -> str:
    if waits.verdict == "now":
        first = waits.candidates[0].node if waits.candidates else "a node"
        return f"nothing prevents its placement: the next cycle would place it on {first}"
    return format_reason(waits.meaning, waits.detail, waits.passage)


def format_reason(meaning: str, detail: str, funnel: FilterFunnel | None) -> str:
    """Joins the meaning of a reason and its detail. The meaning is left out if the detail says the same in numbers: the meaning
    of most refusal codes is about one node, and the detail counts the nodes by their reasons.
    """
    if detail and meaning in STATED_BY_DETAIL:
        return detail
    counts = ("the cluster has no nodes", f"{funnel.fits} of {funnel.nodes} nodes fit") if funnel is not None else ()
    if meaning in REFUSAL_MEANINGS and counts and detail.startswith(counts):
        return detail
    return "; ".join(part for part in (meaning, detail) if part)


def _next_attempt(waits: PendingExplanation, history: Sequence[HistoryEntry], wall: str) -> str:
    """When the next attempt is due: at most RETRY_MS_MAX after the last one, or earlier after an unblock event. The times come
    from wall clocks.
    """
    earlier = f"earlier after: {', '.join(UNBLOCKED_BY.get(event, event) for event in waits.cures)}"
    last = next((entry for entry in reversed(history) if entry.by == "scheduler" and entry.at), None)
    if last is None:
        return f"at most {format_duration(RETRY_MS_MAX)} after its last attempt, which is no longer recorded; {earlier}"
    due = datetime.fromisoformat(last.at) + timedelta(milliseconds=RETRY_MS_MAX)
    if due < datetime.fromisoformat(wall):
        return f"overdue since {due:%H:%M:%S} UTC; check that a scheduler is running (`remit status`); {earlier}"
    return f"by {due:%H:%M:%S} UTC at the latest; {earlier}"


def _candidates(console: Console, candidates: Iterable[DecisionCandidate], chosen: str) -> None:
    for candidate in candidates:
        parts = ", ".join(f"{name} {score}" for name, score in candidate.parts.items())
        line(
            console,
            "",
            Text(f"{candidate.node}  score {candidate.score} ({parts})", style="green" if candidate.node == chosen else ""),
        )


def _funnel(console: Console, funnel: FilterFunnel) -> None:
    """Prints the rejected nodes of every filter, and the sum, so that a reader can check that no node is missing."""
    for step in funnel.steps:
        meaning = step.meaning or (REFUSALS[Code(step.reason)].meaning if step.reason else "of a plug-in")
        line(console, "", f"{step.refused:>7,} refused by {step.filter}: {meaning}")
    total = sum(step.refused for step in funnel.steps)
    line(console, "", f"{funnel.fits:>7,} fit; {total:,} + {funnel.fits:,} = {funnel.nodes:,} nodes")


# -- one node ------------------------------------------------------------------------------------------------------------------


def _node(console: Console, other_node: NodeFitExplanation, own_node: NodeFitExplanation | None) -> None:
    if other_node.fits:
        line(console, f"on {other_node.node}", Text("it would fit there now", style="green"))
        line(console, "", f"score {other_node.score} ({_parts(other_node.parts)})")
        if own_node is not None and own_node.fits and own_node.node != other_node.node:
            line(console, "", f"on its current node {own_node.node}: score {own_node.score} ({_parts(own_node.parts)})")
        return
    line(
        console, f"on {other_node.node}", Text(f"it violates {many(len(other_node.broken), 'rule')} there now", style="yellow")
    )
    for item in other_node.broken:
        line(console, "", f"{item.filter}: {item.meaning} (passes after: {item.cure})")
    if other_node.lacks:
        line(console, "", f"it lacks {other_node.lacks}")


def _parts(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {score}" for name, score in parts.items())


def _evidence(evidence: ExplanationEvidence) -> str:
    policy = f"policy {evidence.policy}" if evidence.policy else "no policy"
    return f"revision {evidence.revision}, read {evidence.age_ms} ms ago; {policy}; overrides {listed(evidence.overrides)}"


def _history(console: Console, history: Sequence[HistoryEntry]) -> None:
    entries = history[-HISTORY_SHOWN:]
    for number, item in enumerate(entries):
        reason = f" {item.reason}" if item.reason else ""
        detail = f": {item.detail}" if item.detail else ""
        line(
            console,
            "" if number else "recorded",
            f"{format_clock(item.at) or '-'}  {item.revision}  {item.by} {item.said}{reason}{detail}",
        )
    if len(history) > len(entries):
        line(console, "", f"and {len(history) - len(entries)} earlier ones; -o json lists up to {len(history)}")
