"""How much of what all share may one have? Counted by whom it is held for; what is shared, and whose turn it is, is not known.

Components have as much again, for themselves: whatever people hold, agents hear their orders. One tenant has a quarter at most,
and all tenants together three quarters; the last quarter is for those who look what is wrong, and for tenants that have little.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from remit.model.identity import Principal

EACH: Final = 4
LITTLE: Final = 64
"""One part in so many is little."""
_COMPONENTS: Final = "components"
_PEOPLE: Final = "people"
_TENANTS: Final = "tenants"


class Shares:
    """Of `most` in all."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._held: Counter[str] = Counter()

    @property
    def held(self) -> int:
        return self._held[_COMPONENTS] + self._held[_PEOPLE]

    def take(self, asker: Principal, amount: int = 1) -> bool:
        """False: it may not have so much more, and has not taken it."""
        if not self._may_have(asker, amount):
            return False
        for name in _names(asker):
            self._held[name] += amount
        return True

    def give_back(self, asker: Principal, amount: int = 1) -> None:
        for name in _names(asker):
            self._held[name] -= amount
            if not self._held[name]:
                del self._held[name]

    def _may_have(self, asker: Principal, amount: int) -> bool:
        names = _names(asker)
        if self._held[names[0]] + amount > self.most:
            return False
        if not asker.tenant:
            return True
        mine, tenants = self._held[names[-1]] + amount, self._held[_TENANTS] + amount
        return mine <= max(1, self.most // EACH) and (tenants <= self.most - self.most // EACH or mine <= self.most // LITTLE)


def _names(asker: Principal) -> tuple[str, ...]:
    if asker.audience in ("agent", "component"):
        return (_COMPONENTS,)
    return (_PEOPLE, _TENANTS, f"tenant {asker.tenant}") if asker.tenant else (_PEOPLE,)
