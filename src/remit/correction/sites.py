"""Which nodes are for a workload? By what each node is, with the scheduler's own rules; what is free there is not asked."""

from __future__ import annotations

from typing import Any

from remit.law.asks import make_ask
from remit.law.fit import Ask, static_answer
from remit.law.ledgers import NodeLedger
from remit.model.kinds import Node, Workload
from remit.model.records import PolicyRevision
from remit.observation.board import Board


class Sites:
    """Every node of a board, and the asks of those workloads that were asked about."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._sites: dict[str, tuple[int, NodeLedger]] = {}
        self._asks: dict[str, tuple[int, int, Ask | None]] = {}
        board.subscribe(self)

    def changed(self, key: str, old: Any, new: Any) -> None:
        """What is gone is forgotten, also if another has its name."""
        if isinstance(old, Node | Workload) and (new is None or new.metadata.uid != old.metadata.uid):
            self._sites.pop(key.removeprefix("node/"), None)
            self._asks.pop(key, None)

    def reached(self) -> None:
        pass

    def fits(self, workload: Workload) -> dict[str, bool]:
        """The nodes that are for it, in order of name; and whether each takes new work now."""
        ask = self._ask(workload)
        if ask is None:
            return {}
        found: dict[str, bool] = {}
        for key, kept in self._board.kind("node/"):
            site = self._site(key.removeprefix("node/"), kept.revision, kept.thing)
            if static_answer(ask, site) is None:
                found[site.node.metadata.name] = bool(site.ready and site.open)
        return dict(sorted(found.items()))

    def _site(self, name: str, revision: int, node: Node) -> NodeLedger:
        known = self._sites.get(name)
        if known is None or known[0] != revision:
            known = self._sites[name] = revision, NodeLedger(node)
        return known[1]

    def _ask(self, workload: Workload) -> Ask | None:
        meta, latest = workload.metadata, self._policies()
        key, number = f"workload/{meta.tenant}/{meta.name}", 0 if latest is None else latest.spec.number
        known = self._asks.get(key)
        if known is None or known[:2] != (meta.generation, number):
            policies = () if latest is None else tuple(latest.spec.policies.values())
            ask: Ask | None
            try:
                ask = make_ask(meta.tenant, meta.name, meta.labels, workload.spec, policies, meta.generation)
            except ValueError:
                ask = None  # what cannot be asked for is for no node; the authority says so when it is declared
            known = self._asks[key] = meta.generation, number, ask
        return known[2]

    def _policies(self) -> PolicyRevision | None:
        latest: PolicyRevision | None = None
        for _, kept in self._board.kind("policyrevision/"):
            if latest is None or kept.thing.spec.number > latest.spec.number:
                latest = kept.thing
        return latest
