"""Is what a client heard what stands in the history? Acknowledgements against outcomes; how long each took: liveness.py."""

from __future__ import annotations

from remit.simulate.checkers.history import NOT_OUTCOMES, History
from remit.simulate.checkers.promise import Found


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
