"""Node and grant ledgers as a draft changes them. A ledger is copied on its first write. No I/O."""

from __future__ import annotations

from collections.abc import Mapping

from remit.commitment.changes import Changes
from remit.law.ledgers import GrantLedger, NodeLedger, ledgers_of, parent_charges
from remit.model.kinds import Node, Tenant
from remit.model.records import Grant


class DraftLedgers:
    """Ledgers of the books, hidden by those that the draft has written to."""

    __slots__ = ("_changes", "_committed_grants", "_committed_nodes", "_copied_grants", "_copied_nodes")

    def __init__(self, nodes: Mapping[str, NodeLedger], grants: Mapping[str, GrantLedger], changes: Changes) -> None:
        self._committed_nodes, self._committed_grants, self._changes = nodes, grants, changes
        self._copied_nodes, self._copied_grants = set[str](), set[str]()

    def node(self, name: str) -> NodeLedger | None:
        nodes = self._changes.nodes
        return nodes[name] if name in nodes else self._committed_nodes.get(name)

    def grant(self, name: str) -> GrantLedger | None:
        grants = self._changes.grants
        return grants[name] if name in grants else self._committed_grants.get(name)

    def all_nodes(self) -> Mapping[str, NodeLedger | None]:
        return {**self._committed_nodes, **self._changes.nodes}

    def writable_node(self, name: str) -> NodeLedger | None:
        """Return a ledger that may be posted to: a copy of the current one."""
        nodes = self._changes.nodes
        if name in self._copied_nodes:
            return nodes[name]
        ledger = nodes[name] if name in nodes else self._committed_nodes.get(name)
        if ledger is not None:
            ledger = nodes[name] = ledger.copy()
            self._copied_nodes.add(name)
        return ledger

    def writable_grant(self, name: str) -> GrantLedger | None:
        grants = self._changes.grants
        if name in self._copied_grants:
            return grants[name]
        ledger = grants[name] if name in grants else self._committed_grants.get(name)
        if ledger is not None:
            ledger = grants[name] = ledger.copy()
            self._copied_grants.add(name)
        return ledger

    def node_of(self, holder: str, node: str) -> NodeLedger:
        """Return the writable ledger of the node on which a replica holds capacity."""
        ledger = self._changes.nodes[node] if node in self._copied_nodes else self.writable_node(node)
        if ledger is None:
            raise LookupError(f"{holder}: node {node}, on which it holds capacity, is not in the books")
        return ledger

    def grant_of(self, holder: str, grant: str) -> GrantLedger:
        """Return the writable ledger of a grant that a replica is charged to."""
        ledger = self._changes.grants[grant] if grant in self._copied_grants else self.writable_grant(grant)
        if ledger is None:
            raise LookupError(f"{holder}: grant {grant}, to which it is charged, is not in the books")
        return ledger

    def put_node(self, node: Node) -> None:
        changes, name = self._changes, node.metadata.name
        old = self.node(name)
        new = NodeLedger(node) if old is None else old.with_node(node)
        changes.nodes[name] = new
        self._copied_nodes.add(name)
        if old is None or old.node_attributes != new.node_attributes:
            changes.topology_changed = True

    def drop_node(self, node: Node) -> None:
        self._changes.nodes[node.metadata.name] = None
        self._changes.topology_changed = True

    def put_tenant(self, tenant: Tenant) -> None:
        self._open(tenant, None, None)

    def put_grant(self, grant: Grant, before: Grant | None, deadline_ms: int | None) -> None:
        """Open or resize the ledgers of a grant, and post to its parents what it now takes from them."""
        if before is not None:
            self._post_to_parents(before, -1)
        self._open(grant, grant, deadline_ms)
        self._post_to_parents(grant, 1)

    def drop(self, owner: Tenant | Grant) -> None:
        """Close the ledgers of a tenant or a grant."""
        if isinstance(owner, Grant):
            self._post_to_parents(owner, -1)
        for name, _, _ in ledgers_of(owner):
            self._changes.grants[name] = None

    def add_copied(self, fork: DraftLedgers) -> None:
        """Add the ledgers that a fork has copied to those that this draft has copied."""
        self._copied_nodes |= fork._copied_nodes
        self._copied_grants |= fork._copied_grants

    def _open(self, owner: Tenant | Grant, grant: Grant | None, deadline_ms: int | None) -> None:
        for name, amount, tenant in ledgers_of(owner):
            ledger = self.writable_grant(name)
            if ledger is None:
                self._changes.grants[name] = GrantLedger(name, dict(amount.pairs), grant, tenant, deadline_ms)
                self._copied_grants.add(name)
            else:
                ledger.resize(dict(amount.pairs))
                ledger.grant, ledger.deadline_ms = grant, deadline_ms

    def _post_to_parents(self, grant: Grant, sign: int) -> None:
        for name, pairs in parent_charges(grant):
            ledger = self.writable_grant(name)
            if ledger is not None:
                ledger.grant_on(pairs, sign)
