"""Node silence and mass-silence detection from heartbeat ages.

Evidence only: who acts on it, and how, is not said here.

Silence is counted by the authority, on its own clock, and told to whoever asks. A new authority begins anew, so nobody is
suspected for its being new. What was told is an older truth: a node was silent for at least so long, and may have spoken since.

Most nodes of a region at once are not most machines broken: it is the way to them, or whoever listens. Then nothing may be
concluded of any one of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from remit.model.kinds import Node
from remit.model.wire.agent_messages import HeartbeatReport

MASS_PERCENT: Final = 55
MASS_MORE_THAN: Final = 2
"""Nodes that a region, or a zone, has at least one more than before its silence is one of a mass."""


class Hearing(NamedTuple):
    """What the authority has heard, asked for at `sent_ms` of the asker's clock."""

    heard: HeartbeatReport
    sent_ms: int

    def silent_ms(self, node: str) -> int:
        """At least so long."""
        one = self.heard.nodes.get(node)
        return self.heard.listened_ms if one is None else one.silent_ms

    def is_here(self, node: str, within_ms: int, now_ms: int) -> bool:
        """Has it surely been heard of within this time?"""
        one = self.heard.nodes.get(node)
        return one is not None and one.silent_ms + now_ms - self.sent_ms <= within_ms

    def is_settled(self, node: str) -> bool:
        """Has it come to terms with this incarnation of the scope? Then nothing runs there that this one knows nothing of."""
        one = self.heard.nodes.get(node)
        return one is not None and one.settled == self.heard.incarnation

    def masses(self, nodes: Iterable[Node], silent_ms: int) -> tuple[frozenset[str], frozenset[tuple[str, str]]]:
        """The regions, and the zones with their regions, most of whose nodes have been silent for longer than this. All of
        them, if nobody at all is heard: however few they are, whoever listens is as likely to be cut off as they.
        """
        regions: dict[str, list[bool]] = {}
        zones: dict[tuple[str, str], list[bool]] = {}
        for node in nodes:
            silent = self.silent_ms(node.metadata.name) > silent_ms
            regions.setdefault(node.spec.region, []).append(silent)
            zones.setdefault((node.spec.region, node.spec.zone), []).append(silent)
        known = [silent for silences in regions.values() for silent in silences]
        if len(known) > 1 and all(known):
            return frozenset(regions), frozenset(zones)
        return (
            frozenset(name for name, silences in regions.items() if is_mass(silences)),
            frozenset(name for name, silences in zones.items() if is_mass(silences)),
        )


def is_mass(silences: list[bool]) -> bool:
    return len(silences) > MASS_MORE_THAN and sum(silences) * 100 >= MASS_PERCENT * len(silences)
