"""Builders of a busy scope: nodes, work with placement terms, grants, and then one transition a commit. No tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.unit.simulate.checkers.history_builder import HistoryBuilder, World, node, replica

TERMS: list[dict[str, Any]] = [
    {"topologySpread": [{"topologyKey": "zone", "maxSkew": 1000}]},
    {"antiAffinity": [{"labelSelector": {"app": "nobody"}, "topologyKey": "node"}]},
    {},
]


def busy_scope(nodes: int = 100, replicas: int = 300, grants: int = 30) -> HistoryBuilder:
    """A scope with all of these, in which every replica is pending, ten to a workload."""
    h = HistoryBuilder(World()).prepare()
    rows = {f"node/m{i}": {**node(f"m{i}", "abc"[i % 3]), "status": {}} for i in range(nodes)}
    names = [f"m{i}" for i in range(nodes)]
    h.commit(rows, [h.entry("apply", key, "operator") for key in rows])
    h.mark("ready", *names)
    big = {"metadata": {"name": "t1"}, "spec": {"quota": {"cpu": "5000"}}}
    h.commit({"tenant/t1": big}, [h.entry("apply", "tenant/t1", "operator")])
    leases = {f"lease/agent/{n}": {"metadata": {"name": n}, "spec": {"holder": f"agent/{n}!", "epoch": 1}} for n in names}
    h.commit(leases, [h.entry("acquire", f"agent/{n}", f"agent/{n}") for n in names])
    for i in range(grants):
        h.grant(f"g{i}", amount={"cpu": "1"})
    for i in range(replicas // 10):
        h.declare(f"w{i}", replicas=10, placement=TERMS[i % 3])
        made = {f"replica/t1/w{i}-{k}": replica(f"w{i}", k, uid=f"u{i}-{k}") for k in range(10)}
        h.commit(made, [h.entry("spawn", f"w{i}", "workloads")])
    return h


def lifecycle_commits(h: HistoryBuilder) -> Iterator[str]:
    """Bind, start, run and make ready every replica, one commit each; yield the kind of each commit."""
    names = [key.removeprefix("node/") for key in h.rows if key.startswith("node/m")]
    keys = [key for key in h.rows if key.startswith("replica/")]
    homes = {key: names[i % len(names)] for i, key in enumerate(keys)}
    for key, at in homes.items():
        h.bind(key, at)
        yield "bind"
    for phase in ("starting", "running", "ready"):
        for key, at in homes.items():
            h.move(key, phase, f"agent/{at}")
            yield "move"
