"""Safety: no acknowledged write is lost, cited evidence was true, and no observer goes back.

Latency of answers is checked in liveness_checks.py, age of evidence in transition_checks.py.

The revision that a claim cites is in no row: a batch records who did what, but not what was seen before. It is in the
submitted payload, which is known for everything that was answered.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec

from remit.simulate.checkers.reference.history import ID_REFUSALS, History
from remit.simulate.checkers.reference.rows import RESTORE_MARKER, Json, attempt_of, phase_of
from remit.simulate.checkers.registry import UNDECIDED, Findings

KEYS_NOT_VIEWED: Final = ("head", RESTORE_MARKER)
PREFIXES_NOT_VIEWED: Final = ("batch/", "event/", "decision/")
"""Rows that no view stores: the chain itself, and records that grow with the run and that no component decides by."""


class ObserverPositions:
    """Positions of observers by name; an observer keeps its name over restarts."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str], tuple[int, int]] = {}
        """The incarnation, by its index in the scope's history, and the revision."""

    def observed_revisions_never_go_back(self, history: History, observer: str, incarnation: str, revision: int) -> Findings:
        """S10: revisions never go back within an incarnation, and no observer returns to an earlier incarnation."""
        if incarnation not in history.incarnations:
            yield observer, f"it saw incarnation {incarnation}, which does not exist"
            return
        if revision > history.revision:
            yield observer, f"it saw revision {revision}, but the latest was {history.revision}"
        # Revisions of a new incarnation are higher than all earlier ones.
        position = len(history.incarnations) - 1 - history.incarnations[::-1].index(incarnation)
        before = self.seen.get((observer, history.scope), (-1, 0))
        if (position, revision) < before:
            old_incarnation = history.incarnations[before[0]]
            yield observer, f"it saw revision {before[1]} of {old_incarnation}, and then {revision} of {incarnation}"
            return
        self.seen[observer, history.scope] = position, revision

    def views_match_store(
        self,
        history: History,
        observer: str,
        revision: int,
        rows: Mapping[str, int],
        *,
        late_ms: float | None,
        kinds: tuple[str, ...] = (),
        nodes: frozenset[str] | None = None,
    ) -> Findings:
        """S23: a view at the last revision has exactly the existing keys, each at its revision.

        A view that is behind may still catch up; `late_ms` is how far it is past its allowed delay, and None if that is
        unknown.
        """
        if revision < history.revision:
            behind = f"{observer} is at revision {revision}, and the latest is {history.revision}"
            if late_ms is None or late_ms <= 0:
                yield observer, f"{UNDECIDED} {behind}"
            else:
                yield observer, f"{behind}: {late_ms:.0f} ms later than allowed"
            return
        existing = {
            key: at
            for key, (at, row) in history.rows.items()
            if key not in KEYS_NOT_VIEWED and not key.startswith(PREFIXES_NOT_VIEWED) and (not kinds or key.startswith(kinds))
            if nodes is None or (row.get("status", {}).get("node") in nodes and phase_of(row) not in ("reserved", "released"))
        }
        for key in sorted(existing.keys() | rows.keys()):
            if key not in rows:
                yield key, f"{observer} at revision {revision} lacks it; it exists since {existing[key]}"
            elif key not in existing:
                yield key, f"{observer} at revision {revision} has it as of {rows[key]}, but it was deleted"
            elif rows[key] != existing[key]:
                yield key, f"{observer} at revision {revision} has it as of {rows[key]}, but it changed at {existing[key]}"


def behind_since_ms(history: History, revision: int) -> int:
    """Return when the first commit happened that an observer at this revision has not seen."""
    return history.commit_times[bisect_right(history.commit_times, revision, key=lambda time: time[0])][1]


def acknowledged_operations_are_in_history(history: History, operation: str, code: str, number: int, revision: int) -> Findings:
    """S2: nothing acknowledged is lost, except by a restore, which lists it."""
    if code in ID_REFUSALS or (code == "invalid" and not revision):
        return
    outcome = history.outcomes.get(operation)
    if outcome is None and operation in history.lost_outcomes:
        # Answered before a restore, or received only after it.
        outcome = history.lost_outcomes[operation]
        if operation not in history.lost:
            history.lost.append(operation)
    if outcome is None:
        yield operation, f"it was answered {code or 'accepted'}, but is in no batch"
        return
    # Abandoning an operation is answered with the outcome of that operation, which may be older.
    older = operation in history.abandons and revision < outcome.revision
    if older:
        outcome = history.outcomes.get(history.abandons[operation], outcome)
        older = outcome.revision > revision  # or that outcome is no longer retained
    if (number, code) != (outcome.number, outcome.code) and not older:
        yield operation, f"it was answered {(number, code, revision)}, but had outcome {outcome}"
    elif revision != outcome.revision and not older:
        yield operation, f"it was answered as of {revision}, but had outcome {outcome}"


def one_answer_per_operation(history: History, operation: str, code: str, number: int, revision: int) -> Findings:
    """S2: the same id gets the same answer."""
    if code in ID_REFUSALS or (code == "invalid" and not revision) or operation in history.lost_outcomes:
        return
    before = history.acknowledged.setdefault(operation, (code, number))
    if before != (code, number):
        yield operation, f"it was answered {before}, and then {(code, number)}"


def seen_revisions_are_recorded(history: History, operation: str, code: str, seen: int | None) -> Findings:
    """S22: each outcome records the revision that its author had decided on."""
    outcome = history.outcomes.get(operation)
    if seen is None or outcome is None or code in (*ID_REFUSALS, "abandoned", "invalid"):
        return
    if outcome.seen != seen:
        yield operation, f"it was decided on revision {seen}, but {outcome.seen} is recorded"


def operation_id_has_one_payload(history: History, operation: str, code: str, digest: str) -> Findings:
    """S2: an outcome is returned only for the payload it belongs to, and never for another payload under the same id."""
    outcome = history.outcomes.get(operation)
    if not digest or outcome is None or not outcome.digest or code in (*ID_REFUSALS, "abandoned", "invalid"):
        return
    if outcome.digest != digest:
        yield (
            operation,
            f"its payload has the digest {digest}, but it was answered {code or 'accepted'}, the outcome of {outcome}",
        )


TENANTED: Final = ("Workload", "Secret", "Config", "Allotment")
"""Kinds that belong to a tenant."""

CitedRevisions = Iterator[tuple[str, int]]
"""Keys with the revision each was seen at; 0 means that it did not exist."""

_decode: Callable[[bytes], Json] = msgspec.json.Decoder().decode


def cited_evidence_was_true(history: History, operation: str, code: str, number: int, payload: bytes) -> Findings:
    """S16: an accepted operation cites the last change of each object it decides on, as of just before its commit; and an agent
    cites the attempt it reports on.
    """
    _, role, claim = _decode(payload) if payload and not code else ("", "", {})
    cited = list(cited_by(claim))
    if not cited:
        return
    outcome = history.outcomes.get(operation) or history.lost_outcomes.get(operation)
    revisions = history.revisions_in(operation.partition(".")[0])
    if outcome is None or revisions is None:
        yield operation, f"{UNDECIDED} {'no batch contains the operation' if outcome is None else 'its incarnation is unknown'}"
        return
    wrong = []
    for key, at in cited:
        last = revisions.last_before(key, outcome.revision)
        if last != at:
            wrong.append((key, f"{claim['do']} {operation}, at {outcome.revision}, saw it at {at}; it last changed at {last}"))
    if role == "agent" and claim["do"] == "move":
        content = history.content_at(claim["replica"], claim["at"])
        if content is not None and attempt_of(content) != claim.get("attempt", 0):
            wrong.append(
                (claim["replica"], f"{operation} is about attempt {claim.get('attempt', 0)}, not {attempt_of(content)}")
            )
    # Gang members that have changed since they were seen are left out; the answer is the number of bound members.
    if claim["do"] != "gang" or number > len(cited) - len(wrong):
        yield from wrong


def cited_by(claim: Json) -> CitedRevisions:
    match claim.get("do"):
        case "bind" | "move" | "forget":
            yield claim["replica"], claim["at"]
        case "reserve":
            yield claim["replica"], claim["at"]
            yield from claim.get("victims", {}).items()
        case "gang":
            for member in claim["members"]:
                yield member["replica"], member["at"]
        case "mark":
            yield f"node/{claim['node']}", claim["at"]
        case "apply" if "expect" in claim:
            obj = claim["thing"]
            yield _key(obj["kind"], obj["metadata"]), claim["expect"]
        case "delete" if "expect" in claim:
            yield _key(claim["kind"], claim), claim["expect"]


def _key(kind: str, metadata: Json) -> str:
    return (
        f"{kind.lower()}/{metadata['tenant']}/{metadata['name']}" if kind in TENANTED else f"{kind.lower()}/{metadata['name']}"
    )
