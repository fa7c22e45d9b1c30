"""What does an agent know of each node that it hosts? Its mind, its lease, what its keeper has; nothing is done here."""

from __future__ import annotations

from typing import NamedTuple

from remit.agent.copies import Copy
from remit.agent.core import Mind
from remit.agent.keeping import Begun
from remit.agent.work import Place
from remit.client.tenure import Tenure
from remit.law.tempo import Tempo
from remit.model.claims import Role
from remit.model.kinds import Node


class Hosted(NamedTuple):
    """A node of this agent: as it declares itself, and where what belongs to its work is kept."""

    node: Node
    place: Place


class Site:
    """What goes on at one node. Without a `node` to declare it is one that was hosted here once: what is left of it ends."""

    def __init__(self, place: Place, tempo: Tempo, node: Node | None) -> None:
        self.name, self.node, self.place = place.node, node, place
        self.lease = f"{Role.AGENT}/{self.name}"
        self.mind = Mind(self.name, tempo)
        self.tenure: Tenure | None = None
        self.kept: dict[Copy, Begun] = {}
        self.settled = ""

    def may_act(self, now_ms: int) -> bool:
        return self.tenure is not None and self.tenure.may_act(now_ms)


class Awaited:
    """Which replicas' last move the orders do not show yet, and at which revision they will."""

    def __init__(self) -> None:
        self._at: dict[str, tuple[int, str]] = {}

    def add(self, key: str, node: str, revision: int) -> None:
        self._at[key] = revision, node

    def is_ahead(self, key: str, revision: int) -> bool:
        return self._at.get(key, (0, ""))[0] > revision

    def pop_reached(self, revision: int) -> list[str]:
        reached = {key: node for key, (at, node) in self._at.items() if at <= revision}
        for key in reached:
            del self._at[key]
        return list(dict.fromkeys(reached.values()))

    def clear(self) -> None:
        """Another store tells from now on: its revisions are no later or earlier than those before."""
        self._at.clear()
