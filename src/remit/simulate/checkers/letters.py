"""Is anything in two hands? Grants on both sides of a border, and a tenant's use over all scopes, at one instant."""

from __future__ import annotations

from collections.abc import Mapping

from remit.simulate.checkers.history import History, Step
from remit.simulate.checkers.promise import Found
from remit.simulate.checkers.rows import MARKER, SCOPE, Counted, Json, Rows, amount, of_kind, outstanding


def across(issuer: Rows, holder: Rows, scope: str) -> Found:
    """Between two scopes, from all their rows: what the holder believes to have is never more than what its issuer has
    written off.
    """
    for key, grant in of_kind(holder, "grant"):
        if grant["spec"].get("issuer"):
            source = issuer.get(key)
            yield from _in_two_hands(key, grant, None if source is None else source[1], scope)


def _in_two_hands(key: str, held: Json, issued: Json, scope: str) -> Found:
    if held.get("status", {}).get("phase") == "void":
        return
    left = {} if issued is None else outstanding(issued)
    for name, n in amount(held["spec"]["amount"]).items():
        if n > left.get(name, 0):
            yield key, f"{scope} holds {n} {name} of {key}, its issuer has debited {left.get(name, 0)}"


class Letters:
    """All scopes of a run."""

    def __init__(self, histories: Mapping[str, History]) -> None:
        self.histories = histories
        self.written_off: set[tuple[str, str]] = set()
        """By issuer and grant: what an operator declared lost. That the holder is gone is the operator's word."""
        self.quotas: dict[str, dict[str, Counted]] = {}
        """By tenant and scope: the most that it ever had there. Slices stay lent, and may be drawn on, when a quota shrinks."""

    def absorb(self, history: History, changed: Mapping[str, tuple[Json, Json]]) -> None:
        for key, (_, new) in changed.items():
            if new is None or not key.startswith("tenant/"):
                continue
            most = self.quotas.setdefault(key.removeprefix("tenant/"), {}).setdefault(history.scope, {})
            quota, more = amount(new["spec"]["quota"]), amount(new["spec"].get("emergencyQuota"))
            for name in {**quota, **more}:
                most[name] = max(most.get(name, 0), quota.get(name, 0) + more.get(name, 0))

    def grants_are_in_one_hand(self, step: Step) -> Found:
        """What a holder has is never more than what its issuer has debited (S4 over scopes)."""
        mine = step.history
        lost = any(entry.did == "declare-lost" for entry in step.accepted)
        changed = [key for key, _, _ in step.of_kind("grant")]
        for key in changed:
            if mine.row(key) is not None:
                self.written_off.discard((mine.scope, key))
            elif lost:
                self.written_off.add((mine.scope, key))
        # Who recognises whom, and whether a restored scope still doubts, decides about every grant between the two.
        if MARKER in step.changed or any(key.startswith("peer/") for key in step.changed):
            changed = [key for other in self.histories.values() for key in other.kind("grant")]
        for key in dict.fromkeys(changed):
            yield from self._between(mine, key)

    def _between(self, mine: History, key: str) -> Found:
        own = mine.row(key)
        if own is not None and own["spec"].get("issuer"):
            pairs = [(self.histories.get(own["spec"]["issuer"].removeprefix(SCOPE)), mine)]
        else:
            pairs = [(mine, other) for other in self.histories.values() if other is not mine]
        for issuer, holder in pairs:
            held = holder.row(key)
            if issuer is None or held is None or held["spec"].get("issuer") != SCOPE + issuer.scope:
                continue
            if (issuer.scope, key) not in self.written_off and _settled(issuer, holder):
                yield from _in_two_hands(key, held, issuer.row(key), holder.scope)

    def tenants_use_no_more_than_their_quota(self, step: Step) -> Found:
        """Over all scopes, what is drawn never rises above quota and emergency quota."""
        sums = step.history.sums
        if step.doubting:
            return
        for (tenant, name), before in sums.tenants_before.items():
            if sums.tenants.get((tenant, name), 0) <= before or tenant not in self.quotas:
                continue
            total = sum(other.sums.tenants.get((tenant, name), 0) for other in self.histories.values())
            limit = sum(most.get(name, 0) for most in self.quotas[tenant].values())
            if total > limit:
                yield f"tenant/{tenant}", f"its use of {name} over all scopes rose to {total}, of at most {limit} ever"


def _settled(issuer: History, holder: History) -> bool:
    """Has a restore on either side been dealt with? Until then a restored issuer may not know what it lent, and grants nothing
    on; what a restored holder believes to have is void with its first batches.
    """
    for side in (issuer, holder):
        if side.head is None or side.row(MARKER) != side.head["incarnation"]:
            return False
    if len(issuer.incarnations) < 2:
        return True
    peer = issuer.row(f"peer/{SCOPE}{holder.scope}")
    return peer is not None and peer["spec"].get("standing") == "vouched"
