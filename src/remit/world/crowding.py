"""From where may one more connection come? Counted by address; what is said on it is not known here.

An address may hold as many connections as are still free: one alone gets half of all, the next half of the rest, and so on. So
whoever has none yet finds a place, however many another has. A few are taken from each address while there is any room.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from typing import Final

FEW: Final = 32
_OWN_BITS: Final = 64
"""Of an address of IPv6 the rest is its holder's to choose, so that counts as one."""


class Crowd:
    """Those of one listener, of `most` in all."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0
        self._held: Counter[str] = Counter()

    def may_come(self, address: str, beside: Crowd | None = None) -> bool:
        """One more from there, as far as its share goes; `beside` are others who count as well. Whether there is room at all is
        another question.
        """
        at = origin(address)
        mine, all_ = self._held[at], self.count
        if beside is not None:
            mine, all_ = mine + beside._held[at], all_ + beside.count
        return mine < max(FEW, self.most - all_)

    def came(self, address: str) -> None:
        self.count += 1
        self._held[origin(address)] += 1

    def left(self, address: str) -> None:
        at = origin(address)
        self.count -= 1
        self._held[at] -= 1
        if self._held[at] <= 0:
            del self._held[at]


def origin(address: str) -> str:
    """Whose it is, as far as an address tells: one machine of IPv4, one network of IPv6."""
    if ":" not in address:
        return address
    try:
        found = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Address(int(found) >> _OWN_BITS << _OWN_BITS))
