"""Safety: answers against history, cited evidence, monotonic observers.

What observers have seen, against the scope's history.

Acknowledgements against outcomes; how long each took: liveness.py.

Revisions of objects, against when each had last changed; ages: conduct.py.

Which revision a claim names stands in no row: a batch tells who did what, and not what was seen before. It is in what was
asked, and that is known of everything that was answered.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec

from remit.simulate.checkers.reference.history import NOT_OUTCOMES, History
from remit.simulate.checkers.reference.rows import MARKER, Json, attempt_of, phase_of
from remit.simulate.checkers.registry import UNDECIDED, Found

UNVIEWED: Final = ("head", MARKER)
UNVIEWED_KINDS: Final = ("batch/", "event/", "decision/")
"""What no view keeps: the chain itself, and notes that grow with the run and that nobody decides by."""


class Observers:
    """By name; an observer keeps its name over restarts."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str], tuple[int, int]] = {}
        """The incarnation, by its place in the scope's history, and the revision."""

    def observers_never_go_back(self, history: History, observer: str, incarnation: str, revision: int) -> Found:
        """S10: revisions never go back within an incarnation, nor does anybody return to one that is over."""
        if incarnation not in history.incarnations:
            yield observer, f"it saw incarnation {incarnation}, and there was none"
            return
        if revision > history.revision:
            yield observer, f"it saw revision {revision}, and the last was {history.revision}"
        # A new incarnation's revisions are past all that were ever used.
        which = len(history.incarnations) - 1 - history.incarnations[::-1].index(incarnation)
        before = self.seen.get((observer, history.scope), (-1, 0))
        if (which, revision) < before:
            was = history.incarnations[before[0]]
            yield observer, f"it saw revision {before[1]} of {was}, and then {revision} of {incarnation}"
            return
        self.seen[observer, history.scope] = which, revision

    def views_show_what_stands(
        self,
        history: History,
        observer: str,
        revision: int,
        rows: Mapping[str, int],
        *,
        late_ms: float | None,
        kinds: tuple[str, ...] = (),
        nodes: frozenset[str] | None = None,
    ) -> Found:
        """S23: a view at the last revision has exactly the keys that stand, each at its revision. One that is behind may still
        catch up; `late_ms` is for how long it could have and has not, beyond what is allowed, and None if nobody can say.
        """
        if revision < history.revision:
            behind = f"{observer} is at revision {revision}, and the last is {history.revision}"
            if late_ms is None or late_ms <= 0:
                yield observer, f"{UNDECIDED} {behind}"
            else:
                yield observer, f"{behind}: {late_ms:.0f} ms later than it may be"
            return
        stands = {
            key: at
            for key, (at, row) in history.rows.items()
            if key not in UNVIEWED and not key.startswith(UNVIEWED_KINDS) and (not kinds or key.startswith(kinds))
            if nodes is None or (row.get("status", {}).get("node") in nodes and phase_of(row) not in ("reserved", "released"))
        }
        for key in sorted(stands.keys() | rows.keys()):
            if key not in rows:
                yield key, f"{observer} at revision {revision} does not have it, and it stands since {stands[key]}"
            elif key not in stands:
                yield key, f"{observer} at revision {revision} has it as of {rows[key]}, and it is gone"
            elif rows[key] != stands[key]:
                yield key, f"{observer} at revision {revision} has it as of {rows[key]}, and it stands since {stands[key]}"


def behind_since_ms(history: History, revision: int) -> int:
    """When the first commit came that somebody at this revision has not seen."""
    return history.times[bisect_right(history.times, revision, key=lambda time: time[0])][1]


def acknowledged_is_in_history(history: History, operation: str, code: str, number: int, revision: int) -> Found:
    """S2: nothing acknowledged is lost, but by a restore, which lists it."""
    if code in NOT_OUTCOMES or (code == "invalid" and not revision):
        return
    said = history.outcomes.get(operation)
    if said is None and operation in history.former:
        # Answered before a restore, or heard only after it.
        said = history.former[operation]
        if operation not in history.lost:
            history.lost.append(operation)
    if said is None:
        yield operation, f"it was answered {code or 'accepted'}, and no batch tells of it"
        return
    # To abandon something is answered with that thing's own outcome, which may be older.
    older = operation in history.abandons and revision < said.revision
    if older:
        said = history.outcomes.get(history.abandons[operation], said)
        older = said.revision > revision  # or that is forgotten
    if (number, code) != (said.number, said.code) and not older:
        yield operation, f"it was answered {(number, code, revision)}, and came to {said}"
    elif revision != said.revision and not older:
        yield operation, f"it was answered as of {revision}, and came to {said}"


def one_answer_per_operation(history: History, operation: str, code: str, number: int, revision: int) -> Found:
    """S2: the same id, the same answer."""
    if code in NOT_OUTCOMES or (code == "invalid" and not revision) or operation in history.former:
        return
    before = history.acknowledged.setdefault(operation, (code, number))
    if before != (code, number):
        yield operation, f"it was answered {before}, and then {(code, number)}"


def what_was_seen_is_on_record(history: History, operation: str, code: str, seen: int | None) -> Found:
    """S22: beside each outcome stands the revision that its asker had decided on."""
    said = history.outcomes.get(operation)
    if seen is None or said is None or code in (*NOT_OUTCOMES, "abandoned", "invalid"):
        return
    if said.seen != seen:
        yield operation, f"it was asked on revision {seen}, and {said.seen} is on record"


def an_id_stands_for_one_payload(history: History, operation: str, code: str, taken: str) -> Found:
    """S2: an outcome answers whoever asked for that, and nobody who asks for something else under its id."""
    said = history.outcomes.get(operation)
    if not taken or said is None or not said.digest or code in (*NOT_OUTCOMES, "abandoned", "invalid"):
        return
    if said.digest != taken:
        yield operation, f"what was asked has the digest {taken}, and was answered {code or 'accepted'}, which is for {said}"


TENANTED: Final = ("Workload", "Secret", "Config", "Allotment")
"""What is declared under the name of its tenant."""

Cited = Iterator[tuple[str, int]]
"""Keys, and the revision that each was seen at; 0: it was not there."""

_decode: Callable[[bytes], Json] = msgspec.json.Decoder().decode


def cited_evidence_was_true(history: History, operation: str, code: str, number: int, payload: bytes) -> Found:
    """S16: what is accepted names the last change of each object that it decides on, as of just before its commit; and an
    agent the attempt that it speaks of.
    """
    _, role, claim = _decode(payload) if payload and not code else ("", "", {})
    cited = list(cited_by(claim))
    if not cited:
        return
    said = history.outcomes.get(operation) or history.former.get(operation)
    revisions = history.revisions_in(operation.partition(".")[0])
    if said is None or revisions is None:
        yield operation, f"{UNDECIDED} {'no batch tells' if said is None else 'no incarnation is known'} of what was answered"
        return
    wrong = []
    for key, at in cited:
        last = revisions.last_before(key, said.revision)
        if last != at:
            wrong.append((key, f"{claim['do']} {operation}, of {said.revision}, saw it at {at}; it last changed at {last}"))
    if role == "agent" and claim["do"] == "move":
        seen = history.version(claim["replica"], claim["at"])
        if seen is not None and attempt_of(seen) != claim.get("attempt", 0):
            wrong.append((claim["replica"], f"{operation} is about attempt {claim.get('attempt', 0)}, not {attempt_of(seen)}"))
    # Of a gang those are left out that have changed since they were seen; the answer is how many were bound.
    if claim["do"] != "gang" or number > len(cited) - len(wrong):
        yield from wrong


def cited_by(claim: Json) -> Cited:
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
            thing = claim["thing"]
            yield _key(thing["kind"], thing["metadata"]), claim["expect"]
        case "delete" if "expect" in claim:
            yield _key(claim["kind"], claim), claim["expect"]


def _key(kind: str, named: Json) -> str:
    return f"{kind.lower()}/{named['tenant']}/{named['name']}" if kind in TENANTED else f"{kind.lower()}/{named['name']}"
