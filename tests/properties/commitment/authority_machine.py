"""State machine that makes every sort of claim in one scope, in any order: declarations, placement, moves, grants, leases."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from remit.law.lifecycle import TRANSITIONS
from remit.model.claims import (
    Acquire,
    Actor,
    Adopt,
    Apply,
    Bind,
    BindGang,
    Close,
    Delete,
    Evidence,
    Forget,
    Issue,
    Mark,
    Move,
    Operation,
    RecordDecision,
    RecordEvent,
    Renew,
    Report,
    Reserve,
    Rollback,
    SetCondition,
    Spawn,
    Vacate,
)
from remit.model.kinds import (
    Affinity,
    DeviceRequest,
    NodeHealth,
    Placement,
    Policy,
    PolicyAllow,
    PolicyMatch,
    PolicyRule,
    PolicySpec,
    Spread,
    Toleration,
    Workload,
)
from remit.model.kinds.registry import AnyObject
from remit.model.metadata import Condition, Metadata
from remit.model.records import DecisionSpec, EventSpec, GrantSpec, SummarySpec
from remit.model.resources import Duration
from remit.model.roles import Role
from remit.simulate.checkers.reference.ledger_sums import total_sums
from remit.simulate.checkers.reference.lifecycle import ACTIVE, HOLDING, ON_NODE
from remit.simulate.checkers.reference.rows import of_kind, phase_of
from tests.properties.authority_world import (
    HOUR,
    LEASES,
    OPERATOR,
    TAINTED,
    USER,
    amounts,
    node,
    populated_scope,
    tenant,
    workload,
)
from tests.properties.commitment.faulty_scope_machine import NUMBER, FaultyScopeMachine, books

PLACES = Placement(tolerations=(Toleration(key="dedicated", operator="Exists"),), node_selector={"disk": "ssd"})
SPREAD = Placement(topology_spread=(Spread(topology_key="zone"),))
APART = Placement(anti_affinity=(Affinity(label_selector={"app": "apart"}, topology_key="node"),))
NEAR = Placement(affinity=(Affinity(label_selector={"app": "near"}, topology_key="zone"),), zones=("a", "b"))


def catalogue(replicas: int = 3) -> list[Workload]:
    """One workload of each sort; small numbers, so that they interact."""
    whole_device, share = (DeviceRequest(kind="gpu", count=1, models=("A10",)),), (DeviceRequest(kind="gpu", share="400m"),)
    return [
        workload("plain", "1", replicas),
        workload("gang", "1", max(replicas, 2), gang=2),
        workload("big", "3", replicas, priority="high"),
        workload("whole", "500m", replicas, devices=whole_device, type_="job", retries=1),
        workload("share", "200m", replicas, devices=share),
        workload("spread", "500m", replicas, placement=SPREAD),
        workload("apart", "500m", replicas, placement=APART, labels={"app": "apart"}),
        workload("shy", "100m", replicas, labels={"app": "apart"}),
        workload("near", "300m", replicas, placement=NEAR, labels={"app": "near"}),
        workload("picky", "500m", replicas, placement=PLACES, priority="top"),
        workload("gpu-top", "500m", replicas, devices=whole_device, priority="top"),
        workload("theirs", "1", replicas, owner="t2"),
    ]


WRONG = ["at", "node", "device", "grant", "epoch", "stale", "name", "draft", "lease"]
STEPS = st.lists(st.tuples(NUMBER, NUMBER, NUMBER), min_size=6, max_size=24)


def policy(
    name: str, *, zones: tuple[str, ...] = (), pools: tuple[str, ...] = (), tenants: tuple[str, ...] = (), app: str = ""
) -> PolicySpec:
    match = PolicyMatch(tenants=tenants, labels={"app": app} if app else {})
    return PolicySpec(rules=(PolicyRule(match=match, allow=PolicyAllow(zones=zones, pools=pools)),))


POLICIES = [
    policy("p", zones=("a",)),
    policy("p", zones=("a", "b")),
    policy("p", pools=("default",)),
    policy("p", zones=("b",), tenants=("t2",)),
    policy("p", zones=("b",), app="apart"),
]


class AuthorityMachine(FaultyScopeMachine):
    """One scope: everything declared, placed, moved and granted within it."""

    reboots = True

    @initialize(sorts=st.sets(st.integers(0, 11), min_size=3, max_size=6), steps=STEPS)
    def set_up(self, sorts: set[int], steps: list[tuple[int, int, int]]) -> None:
        self.do(self._set_up(sorts))
        self.run_ordinary_steps(steps=steps)

    always: frozenset[int] = frozenset()
    """Entries of the catalogue that exist in every run."""

    async def _set_up(self, sorts: set[int]) -> None:
        nodes = [node("n1", gpus=2), node("n2", "2", "b", labels={"disk": "ssd"}), node("n3", "2", "b", gpus=1)]
        self.r = await populated_scope(nodes=nodes)
        works = [catalogue()[i] for i in sorted(sorts | self.always)]
        await self.r.must(USER, *(Apply(work) for work in works))
        spawns = [Spawn(work.metadata.tenant, work.metadata.name, 1, 0, 3) for work in works]
        await self.r.must(self.r.actors["workloads"], *spawns)

    # -- choice of objects -------------------------------------------------------------------------------------------

    def replicas(self, *phases: str) -> list[str]:
        rows = self.r.checker.rows
        return sorted(key for key, r in of_kind(rows, "replica") if not phases or phase_of(r) in phases)

    def nodes(self) -> list[str]:
        return sorted(key.removeprefix("node/") for key, _ in of_kind(self.r.checker.rows, "node"))

    def grants(self) -> list[str]:
        return [key.removeprefix("grant/") for key, _ in of_kind(self.r.checker.rows, "grant")]

    def devices(self, key: str, name: str, seed: int) -> dict[str, int]:
        """Devices of the node that satisfy the replica, free ones if there are any."""
        rows = self.r.checker.rows
        replica = rows[key][1]
        found = f"generation/{replica['metadata']['tenant']}/{replica['spec']['workload']}/{replica['spec']['generation']:08d}"
        if found not in rows or f"node/{name}" not in rows:
            return {}
        taken = total_sums(rows)[0]
        chosen: dict[str, int] = {}
        for ask in rows[found][1]["spec"]["spec"]["template"].get("devices", ()):
            share = 400 if ask.get("share") else 1000
            names = [d["name"] for d in rows[f"node/{name}"][1]["spec"].get("devices", ())]
            free = [d for d in names if taken.get((name, f"@{d}"), 0) + share <= 1000] or names
            chosen.update({free[(seed + i) % len(free)]: share for i in range(ask.get("count", 0) or 1) if free})
        return chosen

    def grant_for(self, key: str, seed: int) -> str:
        tenant_ = self.r.checker.rows[key][1]["metadata"]["tenant"]
        choices = [f"tenant/{tenant_}", f"tenant/{tenant_}", *self.grants()]
        return choices[seed % len(choices)]

    # -- declarations ------------------------------------------------------------------------------------------------

    @rule(n=NUMBER, replicas=st.integers(0, 4), fill=st.booleans())
    def declare_workload(self, n: int, replicas: int, fill: bool) -> None:
        works = catalogue(replicas)
        self.ask(USER, Apply(works[n % len(works)], fill=fill))

    @rule(n=NUMBER, cpu=st.sampled_from(["1", "2", "4", "8"]), zone=st.sampled_from("abb"), shape=st.integers(0, 7))
    def declare_node(self, n: int, cpu: str, zone: str, shape: int) -> None:
        """Also smaller than its usage, cordoned, tainted, relabelled, without its devices."""
        obj: AnyObject = node(
            f"n{n % 4 + 1}",
            cpu,
            zone,
            gpus=2 * (shape != 1),
            unschedulable=shape == 2,
            draining=shape == 3,
            taints=(TAINTED,) if shape in (4, 5) else (),
            labels={"disk": "ssd"} if shape in (5, 6) else {},
        )
        self.ask(OPERATOR, Apply(obj))

    @rule(n=NUMBER, cpu=st.sampled_from(["1", "3", "8", "16"]), gpu=st.integers(0, 4))
    def change_quota(self, n: int, cpu: str, gpu: int) -> None:
        self.ask(OPERATOR, Apply(tenant(f"t{n % 2 + 1}", cpu, gpu)))

    @rule(n=NUMBER)
    def mark_node(self, n: int) -> None:
        names = self.nodes()
        if names:
            name = names[n % len(names)]
            was = self.r.row(f"node/{name}").get("status", {}).get("health", "joining")
            health = NodeHealth.READY if was in ("joining", "suspect") and n % 4 else list(NodeHealth)[n % 5]
            self.ask(self.r.actors["node-lifecycle"], Mark(name, self.r.at(f"node/{name}"), health))

    @rule(n=NUMBER)
    def delete_object(self, n: int) -> None:
        kinds = [("Node", f"n{n % 4 + 1}", ""), ("Workload", catalogue()[n % 12].metadata.name, "t1"), ("Tenant", "t2", "")]
        kinds += [("PriorityClass", "high", ""), ("Policy", "p", "")]
        kind, name, owner = kinds[n % len(kinds)]
        self.ask(OPERATOR, Delete(kind, name, owner))

    @rule(n=NUMBER)
    def publish_or_roll_back_policy(self, n: int) -> None:
        if n % 3:
            self.ask(OPERATOR, Apply(Policy(metadata=Metadata(name=f"p{n % 2}"), spec=POLICIES[n % len(POLICIES)])))
        else:
            self.ask(self.r.actors["policy"], Rollback(n % 5))

    @rule(step=st.integers(-1, 1), n=NUMBER, ttl=st.sampled_from([1_000, 100_000]))
    def adopt_leased_policy(self, step: int, n: int, ttl: int) -> None:
        numbers = [content["spec"]["number"] for _, content in of_kind(self.r.checker.rows, "policyrevision")]
        number = max(1, max(numbers, default=1) + step)
        claim = Adopt(number, {"p": POLICIES[n % len(POLICIES)]}, Duration(ttl), self.r.clock.at_ms - (n % 2) * 500)
        self.ask(self.r.actors["policy"], claim)

    # -- replicas ----------------------------------------------------------------------------------------------------

    @rule(n=NUMBER, first=st.integers(0, 4), count=st.integers(1, 3))
    def spawn_replicas(self, n: int, first: int, count: int) -> None:
        works = sorted(key for key, _ in of_kind(self.r.checker.rows, "workload"))
        if works:
            _, owner, name = works[n % len(works)].split("/")
            generation = self.r.row(works[n % len(works)])["metadata"]["generation"] - (n % 7 == 6)
            self.ask(self.r.actors["workloads"], Spawn(owner, name, generation, first, count))

    @rule(n=NUMBER, m=NUMBER, seed=NUMBER)
    def bind_replica(self, n: int, m: int, seed: int) -> None:
        """F02 F27: most of these fit; the others are refused."""
        waiting, names = self.replicas("pending", "reserved"), self.nodes()
        if waiting and names:
            self.bind_to_node(waiting[n % len(waiting)], names[m % len(names)], seed)

    def bind_to_node(self, key: str, name: str, seed: int) -> None:
        row = self.r.row(key)
        if phase_of(row) == "reserved" and seed % 8:
            status = row["status"]
            claim = Bind(key, self.r.at(key), status["node"], status["grants"][0], status.get("devices", {}))
        else:
            claim = Bind(key, self.r.at(key), name, self.grant_for(key, seed), self.devices(key, name, seed))
        self.ask(self.r.actors["scheduler"], claim)

    @rule(
        n=NUMBER, m=NUMBER, wrong=st.sampled_from(["at", "node", "device", "grant", "epoch", "stale", "name", "draft", "lease"])
    )
    def make_wrong_claim(self, n: int, m: int, wrong: str) -> None:
        every, names = self.replicas(), self.nodes()
        if not every or not names:
            return
        key, name, actor = every[n % len(every)], names[m % len(names)], self.r.actors["scheduler"]
        at = {"at": self.r.at(key) - 1, "draft": -1}.get(wrong, self.r.at(key))
        devices = {"gpu-7": 1000} if wrong == "device" else self.devices(key, name, m)
        grant = "tenant/t9" if wrong == "grant" else f"tenant/{self.r.row(key)['metadata']['tenant']}"
        if wrong in ("epoch", "lease"):
            actor = Actor(actor.name, actor.role, "scheduler" if wrong == "epoch" else "repair", actor.epoch - 1)
        claim = Bind("replica/t1/none-0" if wrong == "name" else key, at, "n9" if wrong == "node" else name, grant, devices)
        self.ask(actor, claim, evidence=Evidence(age_ms=60_001 if wrong == "stale" else 0))

    @rule(n=NUMBER, m=NUMBER, count=st.integers(0, 3), seed=NUMBER)
    def reserve(self, n: int, m: int, count: int, seed: int) -> None:
        """F19 F24: with victims of lower priority if there are any, sometimes with wrong ones."""
        waiting, names = self.replicas("pending"), self.nodes()
        if not waiting or not names:
            return
        waiting.sort(key=lambda key: -self.r.row(key)["spec"].get("priority", 0))
        key, name = waiting[n % min(3, len(waiting))], names[m % len(names)]
        rank = self.r.row(key)["spec"].get("priority", 0)
        weaker = [
            other
            for other in self.replicas(*ACTIVE)
            if self.r.row(other)["status"]["node"] == name
            and (self.r.row(other)["spec"].get("priority", 0) < rank or seed == 0)
        ]
        victims = {other: self.r.at(other) for other in weaker[:count]}
        devices = self.devices(key, name, seed)
        claim = Reserve(key, self.r.at(key), name, self.grant_for(key, seed), devices, victims=victims)
        self.ask(self.r.actors["scheduler"], claim)

    @rule(n=NUMBER, m=NUMBER)
    def preempt(self, n: int, m: int) -> None:
        """F19 F24: on nodes and devices that weaker replicas hold."""
        rank = {key: self.r.row(key)["spec"].get("priority", 0) for key in self.replicas()}
        running = {key: self.r.row(key)["status"] for key in self.replicas(*ACTIVE)}
        pairs = [
            (key, name)
            for key in self.replicas("pending")
            for name in self.nodes()
            if any(status["node"] == name and rank[other] < rank[key] for other, status in running.items())
        ]
        if not pairs:
            return
        key, name = pairs[n % len(pairs)]
        weaker = [other for other, status in running.items() if status["node"] == name and rank[other] < rank[key]]
        chosen = weaker[m % len(weaker) :][:3]
        devices = self.devices(key, name, m)
        theirs = [device for other in chosen for device, share in running[other].get("devices", {}).items() if share == 1000]
        if 1000 in devices.values() and theirs:
            devices = {theirs[0]: 1000}
        victims = {other: self.r.at(other) for other in chosen}
        grant = f"tenant/{self.r.row(key)['metadata']['tenant']}"
        claim = Reserve(key, self.r.at(key), name, grant, devices, victims=victims)
        self.ask(self.r.actors["scheduler"], claim)

    @rule(m=NUMBER, least=st.integers(1, 3))
    def bind_gang(self, m: int, least: int) -> None:
        """F25: at least its minimum, or none."""
        members = [key for key in self.replicas("pending", "reserved") if "/gang-" in key][: least + 1]
        names = self.nodes()
        if members and names:
            binds = []
            for i, key in enumerate(members):
                status = self.r.row(key).get("status", {})
                name = status.get("node") or names[(m + i * (m % 2)) % len(names)]
                binds.append(Bind(key, self.r.at(key), name, (status.get("grants") or ["tenant/t1"])[0]))
            self.ask(self.r.actors["scheduler"], BindGang(tuple(binds)))

    @rule(n=NUMBER, k=NUMBER)
    def move_replica(self, n: int, k: int) -> None:
        """By a transition that starts in its phase, claimed by its owner."""
        every = self.replicas(*HOLDING, "released")
        if every:
            key = every[n % len(every)]
            names = sorted({row.name for row in TRANSITIONS if row.source == phase_of(self.r.row(key))})
            self.move(key, names[k % len(names)])

    @rule(n=NUMBER)
    def advance_replica(self, n: int) -> None:
        """The common path, so that runs get far: bound, starting, running, ready; draining, stopping, released."""
        on = {"bound": "start", "starting": "run", "running": "ready", "draining": "stop", "stopping": "stopped"}
        on |= {"ready": "serve", "finished": "settle", "failed": "release", "released": "requeue", "unknown": "resume"}
        every = self.replicas(*on)
        if every:
            for key in every[n % len(every) :][:4]:
                if key in self.r.checker.rows and phase_of(self.r.row(key)) in on:
                    self.move(key, on[str(phase_of(self.r.row(key)))])

    def move(self, key: str, transition: str) -> None:
        row = next(row for row in TRANSITIONS if row.name == transition)
        status = self.r.row(key).get("status", {})
        lease = f"agent/{status.get('node', '')}" if row.role is Role.AGENT else str(row.role)
        actor = self.r.actors.get(lease)
        if actor is None:
            return
        if transition == "forget":
            self.ask(actor, Forget(key, self.r.at(key)))
        elif transition in ("confirm", "bind", "reserve", "create", "distrust"):
            self.bind_to_node(key, status.get("node", "n1"), 1)
        else:
            result = "ok" if transition in ("finish", "stopped", "crash", "lose") else ""
            self.ask(actor, Move(key, self.r.at(key), transition, status.get("attempt", 1), result, transition))

    @rule(
        n=NUMBER,
        transition=st.sampled_from(sorted({row.name for row in TRANSITIONS} | {"teleport"})),
        lease=st.sampled_from((*LEASES, "agent/n1", "agent/n2")),
        wrong=st.sampled_from(["", "", "at", "attempt", "age"]),
    )
    def claim_any_transition(self, n: int, transition: str, lease: str, wrong: str) -> None:
        every = self.replicas()
        if every:
            key = every[n % len(every)]
            attempt = self.r.row(key).get("status", {}).get("attempt", 1) + (wrong == "attempt")
            claim = Move(key, self.r.at(key) - (wrong == "at"), transition, attempt, "r" * (n % 2))
            self.ask(self.r.actors[lease], claim, evidence=Evidence(age_ms=16_000 if wrong == "age" else 0))

    @rule(n=NUMBER)
    def lose_replicas_of_silent_node(self, n: int) -> None:
        """F34 F39: unknown, and failed past the fence; before that the refusal names the wait."""
        every = self.replicas(*ON_NODE)
        if every:
            key = every[n % len(every)]
            self.move(key, "doubt")
            self.r.clock.at_ms += (10_000, 31_000, 310_000)[n % 3]
            if key in self.r.checker.rows and phase_of(self.r.row(key)) == "unknown":
                self.move(key, "lose")

    @rule(steps=STEPS)
    def run_ordinary_steps(self, steps: list[tuple[int, int, int]]) -> None:
        """Many steps of ordinary schedulers, agents and controllers, so that runs get far."""
        for n, m, seed in steps:
            match seed % 16:
                case 0 | 1 | 2 | 3:
                    self.bind_replica(n=n, m=m, seed=m)
                case 4:
                    self.reserve(n=n, m=m, count=n % 3, seed=m)
                case 5:
                    self.preempt(n=n, m=m)
                case 6:
                    self.bind_gang(m=m, least=n % 3 + 1)
                case 7 | 8 | 9:
                    self.advance_replica(n=n)
                case 10 | 11:
                    self.move_replica(n=n, k=m)
                case 12:
                    self.confirm_reservation(n=n)
                case 13:
                    self.spawn_replicas(n=n, first=m % 5, count=1)
                case 14:
                    self.issue_grant(n=n, cpu="2", ttl=3_000_000, sort=("quota", "offer", "budget", "nested")[m % 4])
                case _:
                    self.claim_any_transition(
                        n=n, transition=TRANSITIONS[m % len(TRANSITIONS)].name, lease=(*LEASES, "agent/n1")[m % 10], wrong=""
                    )

    @rule(steps=STEPS)
    def run_more_ordinary_steps(self, steps: list[tuple[int, int, int]]) -> None:
        self.run_ordinary_steps(steps=steps)

    @rule(steps=STEPS)
    def run_still_more_ordinary_steps(self, steps: list[tuple[int, int, int]]) -> None:
        self.run_ordinary_steps(steps=steps)

    @rule(n=NUMBER)
    def confirm_reservation(self, n: int) -> None:
        """Its victims stop, their agents report it, and it is bound."""
        reserved = self.replicas("reserved")
        if not reserved:
            return
        key = reserved[n % len(reserved)]
        for victim in self.r.row(key)["status"].get("victims", {}):
            for _ in range(2):
                on = {"draining": "stop", "stopping": "stopped", "unknown": "resume"}
                if victim in self.r.checker.rows and phase_of(self.r.row(victim)) in on:
                    self.move(victim, on[str(phase_of(self.r.row(victim)))])
        if key in self.r.checker.rows and phase_of(self.r.row(key)) == "reserved":
            self.bind_to_node(key, "n1", 1)

    # -- grants within the scope, and soft state -----------------------------------------------------------------------

    @rule(
        n=NUMBER,
        cpu=st.sampled_from(["1", "2", "6"]),
        ttl=st.sampled_from([1_000, 100_000, 3_000_000]),
        sort=st.sampled_from(["quota", "offer", "budget", "nested", "slots"]),
    )
    def issue_grant(self, n: int, cpu: str, ttl: int, sort: str) -> None:
        parents = [f"tenant/t{n % 2 + 1}", *self.grants()]
        parent = parents[n % len(parents)] if sort == "nested" else parents[0]
        budget = sort == "budget"
        spec = GrantSpec(
            holder="scheduler" if n % 5 else "shard-1",
            amount=amounts(cpu=cpu, gpu=1),
            shares={f"t{n % 2 + 1}": amounts(cpu="1")} if budget else {},
            parent="" if budget else parent,
            tenant="" if budget or sort in ("offer", "slots") else f"t{n % 2 + 1}",
            purpose=sort if sort != "nested" else "quota",  # type: ignore[arg-type]
            ttl=Duration(ttl),
        )
        lease = "scheduler" if sort == "nested" and n % 2 else "budgets"
        self.ask(self.r.actors[lease], Issue(f"g{n % 6}", spec))

    @rule(n=NUMBER, action=st.sampled_from(["renew", "close", "close", "reap"]))
    def renew_or_close_grant(self, n: int, action: str) -> None:
        names = self.grants()
        if names:
            name = names[n % len(names)]
            actor = self.r.actors["repair" if action == "reap" else "budgets"]
            self.ask(actor, Renew(name) if action == "renew" else Close(name))

    @rule(n=NUMBER)
    def record_soft_state(self, n: int) -> None:
        self.ask(
            USER,
            RecordEvent(f"e{n % 5}", EventSpec(regarding="x")),
            RecordDecision(f"d{n % 5}", "t1", DecisionSpec(replicas={"x": ""})),
        )
        condition = Condition(type=f"C{n % 3}", status="True", observed_generation=n)
        self.ask(self.r.actors["agent/n1"], SetCondition("Node", f"n{n % 4 + 1}", condition))
        self.ask(USER, Report(f"r{n % 2}", SummarySpec(holder="x", epoch=n % 3, sequence=n)))

    # -- leases ------------------------------------------------------------------------------------------------------

    @rule(n=NUMBER, action=st.sampled_from(["steal", "again", "vacate", "wrong"]))
    def contend_for_lease(self, n: int, action: str) -> None:
        leases = sorted(self.r.actors)
        actor = self.r.actors[leases[n % len(leases)]]
        match action:
            case "vacate":
                self.ask(actor, Vacate(actor.lease))
                self.ask(Actor(actor.name, actor.role), Acquire(actor.lease, HOUR))
            case "wrong":
                self.ask(Actor("x", Role.REPAIR), Acquire("scheduler", HOUR))
            case _:
                name = actor.name if action == "again" else "thief"
                self.ask(Actor(name, actor.role), Acquire(actor.lease, HOUR))

    # -- batches, restarts, restores -------------------------------------------------------------------------------------

    @precondition(lambda self: self.batch is None)
    @rule(steps=STEPS)
    def claim_concurrently(self, steps: list[tuple[int, int, int]]) -> None:
        """Several batches of claims, made without knowledge of each other."""
        self.batch = []
        self.run_ordinary_steps(steps=steps)
        batch, self.batch = self.batch or [], None
        self.do(self._send_batch(batch))

    @precondition(lambda self: self.batch is None)
    @rule()
    def collect_claims_for_batch(self) -> None:
        self.batch = []

    @precondition(lambda self: self.batch)
    @rule()
    def send_collected_batch(self) -> None:
        batch, self.batch = self.batch or [], None
        self.do(self._send_batch(batch))

    async def _send_batch(self, batch: list[Operation]) -> None:
        await self.ensure_leader(self.r)
        await self.send(self.r, batch)

    @rule()
    def restarted_authority_has_same_books(self) -> None:
        """F20: everything follows from the store alone."""
        self.do(self._restart())

    async def _restart(self) -> None:
        await self.ensure_leader(self.r)
        self.r.store.plan.clear()
        old = self.r.lead.authority
        before, policy_before = books(old.books), old.books.current_policy()
        counts = {
            name: {k: v for k, v in getattr(old.books, name).items() if v} for name in ("population", "active", "reserved")
        }
        await self.r.take_over()
        new = self.r.lead.authority
        assert books(new.books) == before
        assert new.books.current_policy() == policy_before
        for name, counted in counts.items():
            assert {k: v for k, v in getattr(new.books, name).items() if v} == counted, name
