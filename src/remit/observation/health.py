"""Node silence and mass-silence detection from heartbeat ages.

Provides evidence only; controllers decide how to act on it.

The authority measures silence on its own clock and reports it on request. A new authority starts from zero, so a leader
change never makes nodes suspect. A report ages: a node was silent for at least the reported time, and may have sent a
heartbeat since.

If most nodes of a region go silent at once, the likely cause is the network or the authority, not the machines. Then nothing
may be concluded about any single node.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from remit.model.kinds import Node
from remit.model.wire.agent_messages import HeartbeatReport

MASS_PERCENT: Final = 55
MASS_NODES_MORE_THAN: Final = 2
"""A region or zone needs more nodes than this for its silence to count as a mass silence."""


class HeartbeatAges(NamedTuple):
    """The authority's heartbeat report, requested at `sent_ms` on the client's clock."""

    report: HeartbeatReport
    sent_ms: int

    def silent_ms(self, node: str) -> int:
        """Return a lower bound of the time since the node's last heartbeat."""
        age = self.report.nodes.get(node)
        return self.report.listened_ms if age is None else age.silent_ms

    def is_responsive(self, node: str, within_ms: int, now_ms: int) -> bool:
        """Whether the node has certainly sent a heartbeat within this time."""
        age = self.report.nodes.get(node)
        return age is not None and age.silent_ms + now_ms - self.sent_ms <= within_ms

    def is_reconciled(self, node: str) -> bool:
        """Whether the node has reconciled with this incarnation of the scope. Then nothing runs there that the scope does not
        know of.
        """
        age = self.report.nodes.get(node)
        return age is not None and age.settled == self.report.incarnation

    def mass_silences(self, nodes: Iterable[Node], silent_ms: int) -> tuple[frozenset[str], frozenset[tuple[str, str]]]:
        """Return the regions, and the zones with their regions, most of whose nodes have been silent for longer than
        `silent_ms`.

        If no node at all sends heartbeats, all of them are returned, however few they are: then the authority itself is as
        likely to be cut off as the nodes.
        """
        regions: dict[str, list[bool]] = {}
        zones: dict[tuple[str, str], list[bool]] = {}
        for node in nodes:
            silent = self.silent_ms(node.metadata.name) > silent_ms
            regions.setdefault(node.spec.region, []).append(silent)
            zones.setdefault((node.spec.region, node.spec.zone), []).append(silent)
        all_silences = [silent for silences in regions.values() for silent in silences]
        if len(all_silences) > 1 and all(all_silences):
            return frozenset(regions), frozenset(zones)
        return (
            frozenset(name for name, silences in regions.items() if is_mass_silence(silences)),
            frozenset(name for name, silences in zones.items() if is_mass_silence(silences)),
        )


def is_mass_silence(silences: list[bool]) -> bool:
    return len(silences) > MASS_NODES_MORE_THAN and sum(silences) * 100 >= MASS_PERCENT * len(silences)
