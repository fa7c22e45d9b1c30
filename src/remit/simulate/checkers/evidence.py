"""Was it true, what a claim names as its reason? Revisions of objects, against when each had last changed; ages: conduct.py.

Which revision a claim names stands in no row: a batch tells who did what, and not what was seen before. It is in what was
asked, and that is known of everything that was answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from remit.simulate.checkers.history import History
from remit.simulate.checkers.promise import UNDECIDED, Found
from remit.simulate.checkers.rows import Json, attempt_of

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
