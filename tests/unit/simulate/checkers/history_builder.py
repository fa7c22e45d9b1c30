"""Builds the histories that checkers are tested on: lawful by default, and anything on request. No tests.

It is no authority: it decides nothing and keeps only the chain. The rows are exactly what the test wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from types import MappingProxyType
from typing import Any

from remit.simulate.checkers.judge import CommitTimes, Core, Judge
from remit.simulate.checkers.reference.lifecycle import ON_NODE
from remit.simulate.checkers.reference.rows import attempt_id

Json = Any
ROLES = (
    "scheduler", "node-lifecycle", "repair", "rollout", "workloads", "endpoints", "budgets", "policy", "agent/n1", "agent/n2",
)  # fmt: skip
HOLDER = "a1"


class World:
    """One judge and a manual clock. All processes share the clock, so the three times of a commit are equal."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000
        self.judge = Judge(lambda: self.now_ms)

    @property
    def found(self) -> list[str]:
        """Names of the checks that reported a violation."""
        return list(dict.fromkeys(violation.check for violation in self.judge.violations))


class HistoryBuilder:
    """Writes the commits of one scope."""

    def __init__(self, world: World | None = None, scope: str = "r1") -> None:
        self.world = World() if world is None else world
        self.scope, self.boot, self.revision, self.count = scope, "b1", 0, 0
        self.head: dict[str, Any] = {
            "incarnation": f"{scope}-i1", "epoch": 0, "sequence": 0, "holder": "", "count": 0, "digest": "",
        }  # fmt: skip
        self.rows: dict[str, Json] = {}
        self.take_over()
        self.commit({"incarnation": self.head["incarnation"]}, [])

    # -- the chain ---------------------------------------------------------------------------------------------------

    def take_over(self, holder: str = HOLDER) -> None:
        epoch = self.head["epoch"] + 1
        self._advance([], [], epoch=epoch, holder=holder, before=f"{self.head['digest']} {epoch} {holder}")

    def commit(
        self,
        rows: Mapping[str, Json],
        entries: Sequence[Json],
        *,
        head: Mapping[str, Any] | None = None,
        stand: CommitTimes | None = None,
        audit: bool = True,
    ) -> None:
        """Commit one batch: rows by key (None deletes) and audit entries; with neither, a heartbeat. `head` overrides the
        chain.
        """
        puts = [(key, self._bytes(key, content)) for key, content in rows.items() if content is not None]
        if audit and (entries or not rows):
            batch = {"epoch": self.head["epoch"], "window": 1, "horizon": 1, "first": 1, "at": "", "entries": list(entries)}
            puts.append((f"batch/{self.head['sequence'] + 1:016d}", json.dumps(batch).encode()))
        deletes = [key for key, content in rows.items() if content is None]
        self._advance(puts, deletes, head=head or {}, stand=stand)
        for key, content in rows.items():
            self.rows[key] = json.loads(json.dumps(content))
            if content is None:
                del self.rows[key]

    def _bytes(self, key: str, content: Json) -> bytes:
        return str(content).encode() if key == "incarnation" else json.dumps(content).encode()

    def _advance(
        self,
        puts: Sequence[tuple[str, bytes]],
        deletes: Sequence[str],
        *,
        epoch: int | None = None,
        holder: str | None = None,
        before: str | None = None,
        head: Mapping[str, Any] | None = None,
        stand: CommitTimes | None = None,
    ) -> None:
        taken = self.head["digest"] if before is None else before
        table = [taken, [[key, len(value)] for key, value in puts], list(deletes)]
        hashed = sha256(json.dumps(table, separators=(",", ":")).encode())
        for _, value in puts:
            hashed.update(value)
        self.head = {
            **self.head,
            "sequence": self.head["sequence"] + 1,
            "epoch": self.head["epoch"] if epoch is None else epoch,
            "holder": self.head["holder"] if holder is None else holder,
            "count": len(puts) + len(deletes),
            "digest": hashed.hexdigest()[:32],
            **(head or {}),
        }
        self.revision += 1
        now = self.world.now_ms
        where = CommitTimes(self.boot, now, now, now) if stand is None else stand
        written = (*puts, ("head", json.dumps(self.head).encode()))
        self.world.judge.on_commit(self.scope, written, deletes, self.revision, where)

    def restore(self, rows: Mapping[str, Json], *, incarnation: str) -> None:
        """Replace the store's rows with these, as a restored backup does."""
        self.rows = json.loads(json.dumps(dict(rows)))
        self.revision += 1
        self.head = {**self.head, "incarnation": incarnation, "epoch": self.head["epoch"] + 1, "holder": "restore"}
        written = [(key, self._bytes(key, content), 1) for key, content in self.rows.items()]
        written.append(("head", json.dumps(self.head).encode(), self.revision))
        self.world.judge.on_restore(self.scope, written, self.revision)

    def mark_restored(self, more: Mapping[str, Json] = MappingProxyType({})) -> None:
        """Commit the first batch of a new incarnation: the state of nodes and of their replicas is unknown."""
        self.take_over("a2")
        rows: dict[str, Json] = {"incarnation": self.head["incarnation"], **more}
        for key, row in self.rows.items():
            if key.startswith("node/"):
                rows[key] = {**row, "status": {"health": "unknown"}}
            elif key.startswith("replica/") and (phase := row.get("status", {}).get("phase")) in ON_NODE:
                rows[key] = self.status(key, phase="unknown", before=phase)
        self.commit(rows, [])

    # -- audit entries -----------------------------------------------------------------------------------------------

    def entry(self, did: str, subject: str, role: str, **more: Any) -> Json:
        self.count += 1
        fields = {
            "id": f"{self.head['incarnation']}.1.n{self.count}", "digest": "d", "did": did, "subject": subject,
            "actor": f"{role}!", "role": role.split("/")[0],
            "lease": "" if role in ("user", "operator") else role, "epoch": 0 if role in ("user", "operator") else 1,
            "seen": 0, "age_ms": 0, "number": 0, "code": "", "detail": "", "trace": "",
        }  # fmt: skip
        return list({**fields, **more}.values())

    # -- objects -----------------------------------------------------------------------------------------------------

    def prepare(self, **more: Any) -> HistoryBuilder:
        """Leases, two ready nodes, a tenant and a service of three replicas; `more` goes into the workload's spec."""
        leases = {f"lease/{role}": {"metadata": {"name": role}, "spec": {"holder": f"{role}!", "epoch": 1}} for role in ROLES}
        self.commit(leases, [self.entry("acquire", role, role) for role in ROLES])
        nodes = {f"node/{name}": node(name, zone) for name, zone in (("n1", "a"), ("n2", "b"))}
        tenants = {"tenant/t1": tenant("t1")}
        self.commit({**nodes, **tenants}, [self.entry("apply", key, "operator") for key in (*nodes, *tenants)])
        self.mark("ready", "n1", "n2")
        self.declare("w", **more)
        return self

    def mark(self, health: str, *names: str) -> None:
        rows = {f"node/{name}": {**self.rows[f"node/{name}"], "status": {"health": health}} for name in names}
        self.commit(rows, [self.entry("mark", name, "node-lifecycle") for name in names])

    def declare(self, name: str, generation: int = 1, *, comes_with: Iterable[int] = (), **more: Any) -> None:
        spec = {"type": "service", "replicas": 3, "template": {"command": ["x"], "resources": {"cpu": "1"}}, **more}
        meta = {"name": name, "tenant": "t1", "generation": generation, "labels": {"app": name}}
        own = {"workload": name, "generation": generation, "labels": {"app": name}, "spec": spec}
        rows = {f"workload/t1/{name}": {"metadata": meta, "spec": spec}, generation_key(name, generation): {"spec": own}}
        rows |= {f"replica/t1/{name}-{i}": replica(name, i, uid=f"u{name}{i}", generation=generation) for i in comes_with}
        self.commit(rows, [self.entry("apply", f"workload/t1/{name}", "user")])

    def spawn(self, *indices: int, workload: str = "w", **more: Any) -> list[str]:
        rows = {f"replica/t1/{workload}-{i}": replica(workload, i, uid=f"u{workload}{i}", **more) for i in indices}
        self.commit(rows, [self.entry("spawn", workload, "workloads")])
        return list(rows)

    def copy(self, key: str) -> str:
        return attempt_id(self.rows[key])

    def status(self, key: str, **changes: Any) -> Json:
        """The row of a replica with its status changed; None removes a field."""
        row = self.rows[key]
        status = {**row.get("status", {}), **changes}
        return {**row, "status": {name: value for name, value in status.items() if value is not None}}

    def bind(self, key: str, at: str = "n1", *, stand: CommitTimes | None = None, **more: Any) -> None:
        changes = {"phase": "bound", "node": at, "grants": ["tenant/t1"], **more}
        self.commit({key: self.status(key, **changes)}, [self.entry("bind", key, "scheduler")], stand=stand)

    def move(self, key: str, phase: str, role: str, did: str = "move", **changes: Any) -> None:
        if phase == "failed" and role.startswith("agent") and "failures" not in changes:
            changes["failures"] = self.rows[key]["status"].get("failures", 0) + 1
        self.commit({key: self.status(key, phase=phase, **changes)}, [self.entry(did, key, role)])

    def run(self, key: str, at: str = "n1", *, until: str = "running") -> None:
        """Bind, start, run; until this phase."""
        self.bind(key, at)
        for phase in ("starting", "running", "ready"):
            self.move(key, phase, f"agent/{at}")
            if phase == until:
                return

    def release(self, key: str, at: str = "n1") -> None:
        self.move(key, "draining", "workloads")
        self.move(key, "stopping", f"agent/{at}")
        self.move(key, "released", f"agent/{at}", grants=None, devices=None, result="ok")

    def requeue(self, key: str) -> None:
        before = self.rows[key]["status"]
        kept = {"failures": before["failures"]} if before.get("failures") else {}
        row = {**self.rows[key], "status": {"phase": "pending", "attempt": before.get("attempt", 1) + 1, **kept}}
        self.commit({key: row}, [self.entry("move", key, "repair")])

    def grant(self, name: str, role: str = "budgets", **spec: Any) -> None:
        status = spec.pop("status", {"deadline": {"boot": self.boot, "atMs": self.world.now_ms + 3_600_000}})
        full_spec = {"holder": "scheduler", "amount": {"cpu": "2"}, "parent": "tenant/t1", "tenant": "t1", "ttl": "1h", **spec}
        row = {"metadata": {"name": name}, "spec": full_spec, "status": status}
        self.commit({f"grant/{name}": row}, [self.entry("issue", name, role)])

    @property
    def found(self) -> list[str]:
        return self.world.found


def node(name: str, zone: str = "a", **more: Any) -> Json:
    spec = {"region": "r1", "zone": zone, "capacity": {"cpu": "4", "memory": "8Gi"}, **more}
    return {"metadata": {"name": name, "labels": {"disk": "ssd"} if name == "n1" else {}}, "spec": spec}


def tenant(name: str, cpu: str = "16") -> Json:
    return {"metadata": {"name": name}, "spec": {"quota": {"cpu": cpu, "devices": {"gpu": 4}}, "emergencyQuota": {"cpu": "2"}}}


def replica(workload: str, index: int, *, uid: str, generation: int = 1, **status: Any) -> Json:
    """A replica row; a higher index has a higher priority."""
    made = {
        "metadata": {"name": f"{workload}-{index}", "tenant": "t1", "uid": uid},
        "spec": {"workload": workload, "generation": generation, "index": index, "priority": index},
    }
    return {**made, "status": status} if status else made


def generation_key(workload: str, generation: int = 1) -> str:
    return f"generation/t1/{workload}/{generation:08d}"


def healed(
    h: HistoryBuilder, *, silent: frozenset[str] = frozenset(), roles: frozenset[str] = frozenset(ROLES), calm: bool = False
) -> None:
    nodes = frozenset({"n1", "n2"}) - silent
    core = Core(frozenset({h.scope}), {h.scope: nodes}, roles, h.world.now_ms, {h.scope: silent}, calm)
    h.world.judge.heal(core)


def pass_time(h: HistoryBuilder, seconds: int, *, beats: bool = True) -> None:
    """Advance the clock with a check each second and a heartbeat commit every two, as an idle authority makes."""
    for second in range(seconds):
        h.world.now_ms += 1_000
        if beats and second % 2:
            h.commit({}, [])
        h.world.judge.tick()
