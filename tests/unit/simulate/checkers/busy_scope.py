"""What does a busy scope look like? Nodes, work with terms, grants; and then moves, one a commit. No test is here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.unit.simulate.checkers.history_builder import Pen, World, node, replica

TERMS: list[dict[str, Any]] = [
    {"topologySpread": [{"topologyKey": "zone", "maxSkew": 1000}]},
    {"antiAffinity": [{"labelSelector": {"app": "nobody"}, "topologyKey": "node"}]},
    {},
]


def crowd(nodes: int = 100, replicas: int = 300, grants: int = 30) -> Pen:
    """A scope in which all of these stand, and every replica is pending, ten to a workload."""
    pen = Pen(World()).furnish()
    rows = {f"node/m{i}": {**node(f"m{i}", "abc"[i % 3]), "status": {}} for i in range(nodes)}
    names = [f"m{i}" for i in range(nodes)]
    pen.commit(rows, [pen.entry("apply", key, "operator") for key in rows])
    pen.mark("ready", *names)
    big = {"metadata": {"name": "t1"}, "spec": {"quota": {"cpu": "5000"}}}
    pen.commit({"tenant/t1": big}, [pen.entry("apply", "tenant/t1", "operator")])
    leases = {f"lease/agent/{n}": {"metadata": {"name": n}, "spec": {"holder": f"agent/{n}!", "epoch": 1}} for n in names}
    pen.commit(leases, [pen.entry("acquire", f"agent/{n}", f"agent/{n}") for n in names])
    for i in range(grants):
        pen.grant(f"g{i}", amount={"cpu": "1"})
    for i in range(replicas // 10):
        pen.declare(f"w{i}", replicas=10, placement=TERMS[i % 3])
        made = {f"replica/t1/w{i}-{k}": replica(f"w{i}", k, uid=f"u{i}-{k}") for k in range(10)}
        pen.commit(made, [pen.entry("spawn", f"w{i}", "workloads")])
    return pen


def lives(pen: Pen) -> Iterator[str]:
    """Every replica is bound, started, run and ready, a commit each; answers what each commit did."""
    names = [key.removeprefix("node/") for key in pen.rows if key.startswith("node/m")]
    keys = [key for key in pen.rows if key.startswith("replica/")]
    homes = {key: names[i % len(names)] for i, key in enumerate(keys)}
    for key, at in homes.items():
        pen.bind(key, at)
        yield "bind"
    for phase in ("starting", "running", "ready"):
        for key, at in homes.items():
            pen.move(key, phase, f"agent/{at}")
            yield "move"
