"""Scheduler with few checks, to exercise refusals.

It binds to any node that seems to have capacity and ignores most placement rules, so the authority must refuse what is
invalid.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from remit.law.charges import still_holds
from remit.law.lifecycle import HOLDING_PHASES
from remit.model.claims import AnyClaim, Bind, BindGang, Code, Move, Refused, Reserve, Verdict
from remit.model.kinds import Node, NodeHealth, WorkloadSpec
from remit.model.records import Generation, Grant, GrantPhase, Phase, Replica
from remit.model.roles import Role
from remit.simulate.actors.role import RoleContext, SimulatedRole

_RETRY_HEARTBEATS: Final = 7.5
_BACKOFF_HEARTBEATS: Final = 0.25
_BATCH: Final = 64
_NODES_TRIED_MAX: Final = 12
_WAKING_PHASES: Final = (Phase.PENDING, Phase.RESERVED, Phase.RELEASED)
_NODE_REFUSALS: Final = (Code.NO_ROOM, Code.DEVICE_TAKEN, Code.SPREAD, Code.ANTI_AFFINITY, Code.POLICY)
"""Refusals that concern one node: another node may be accepted."""
_GRANT_REFUSALS: Final = (Code.OVER_QUOTA, Code.GRANT_SHORT, Code.GRANT_EXPIRED, Code.GRANT_VOID)
"""Refusals that concern one grant: another grant may be accepted."""
_RUNNING_PHASES: Final = (Phase.BOUND, Phase.STARTING, Phase.RUNNING, Phase.READY, Phase.SERVING)


class ReplicaNeeds(NamedTuple):
    """The needs of one replica, as far as this scheduler checks them."""

    resources: dict[str, int]
    devices: dict[str, int]
    spec: WorkloadSpec


class NaiveScheduler(SimulatedRole):
    role = Role.SCHEDULER

    def is_relevant(self, key: str, old: Any, new: Any) -> bool:
        """Pending and reserved replicas, changes that take or free capacity, and everything that limits it."""
        if isinstance(new, Replica):
            return (
                old is None
                or new.status.phase in _WAKING_PHASES
                or (old.status.phase in HOLDING_PHASES) != (new.status.phase in HOLDING_PHASES)
            )
        return key.startswith(("replica/", "node/", "grant/", "tenant/", "policyrevision/"))

    def __init__(self, context: RoleContext, *, lease: str = "") -> None:
        super().__init__(context, lease=lease)
        self._free: dict[str, dict[str, int]] = {}
        self._node_of: dict[str, str] = {}
        self._retry_at: dict[str, int] = {}
        """When a replica that did not fit anywhere is tried again. An unblocking event wakes it earlier."""
        self._backoff_until: dict[str, int] = {}
        """Until when a refused replica is skipped, so that others can use the capacity."""
        self._short_of_quota: dict[str, None] = {}
        """Skipped replicas that lacked quota. They are tried at once when their tenant releases quota."""
        self._exhausted_grant: dict[str, str] = {}
        """The grant that had nothing left for a replica."""
        self._delayed_until: dict[str, tuple[int, int]] = {}
        """The revision of a reservation, and until when it is deliberately not used."""
        self._retry_scheduled = False
        self._refused: dict[str, dict[str, None]] = {}
        """Nodes that were refused for a replica; other nodes are tried first."""
        self._rounds: dict[str, int] = {}
        """How often all nodes were tried without success."""
        self._policies: dict[str, None] = {}

    async def on_lease_acquired(self) -> None:
        await super().on_lease_acquired()
        self._free.clear()
        self._node_of.clear()
        self._retry_at.clear()
        self._backoff_until.clear()
        self._short_of_quota.clear()
        self._refused.clear()
        self._rounds.clear()
        self._exhausted_grant.clear()

    def claims_for(self, keys: Sequence[str]) -> Iterable[AnyClaim]:
        if self._forget_changed(keys):
            self.retry_all()
        self._free.clear()  # earlier assumptions may have been refused or never answered
        now_ms = self.world.clock.now_ms()
        claims: list[AnyClaim] = list(self._reserved())
        self._backoff_until = {key: until_ms for key, until_ms in self._backoff_until.items() if until_ms > now_ms}
        pending = [
            key
            for key in self.view.by_phase[Phase.PENDING]
            if self._retry_at.get(key, 0) <= now_ms and key not in self._backoff_until
        ]
        attempted: dict[str, None] = {}
        for key in self.rng.shuffled(pending)[:_BATCH]:
            replica: Replica = self.view.get(key)
            needs = self._needs_of(replica)
            if key in attempted or needs is None:
                continue
            is_short_gang = needs.spec.gang is not None and self._gang_size(replica) < needs.spec.gang.min
            # A gang is tried as a unit, whichever member is due.
            members = self._waiting_with(replica) if is_short_gang else [key]
            attempted.update(dict.fromkeys(members))
            claims += self._gang(members) if is_short_gang else self._place(key, replica, needs)
        for key in attempted:
            self._retry_at[key] = now_ms + round(_RETRY_HEARTBEATS * self.context.timing.heartbeat_ms)
        return claims

    def retry_all(self) -> None:
        """An unblocking event happened: try all replicas again."""
        self._retry_at.clear()

    def on_verdict(self, claim: AnyClaim, verdict: Verdict) -> None:
        """Back off after a refusal, so that other replicas can use the capacity."""
        if not isinstance(verdict, Refused) or not isinstance(claim, (Bind, Reserve, BindGang)):
            return
        # Another node, or quota instead of an offer, is tried soon. Otherwise capacity must be released first.
        members = claim.members if isinstance(claim, BindGang) else (claim,)
        exhausted = verdict.code in _GRANT_REFUSALS and any(self._is_optional_grant(member.grant) for member in members)
        soon = exhausted or verdict.code in _NODE_REFUSALS or verdict.code is Code.REVISION
        attempt_factor = (
            2 + max(self._rounds.get(member.replica, 0) for member in members) if verdict.code in _NODE_REFUSALS else 1
        )
        pause_ms = self._backoff_ms() * (min(4, attempt_factor) if soon else 12)
        pause_ms += self.rng.jitter_ms(pause_ms)
        for member in members:
            if verdict.code in _GRANT_REFUSALS:
                self._exhausted_grant[member.replica] = member.grant
            if verdict.code in _NODE_REFUSALS:
                self._refused.setdefault(member.replica, {}).update(
                    dict.fromkeys(self._similar_nodes(member.node, verdict.code))
                )
            if verdict.code is Code.OVER_QUOTA:
                self._short_of_quota[member.replica] = None
            self._backoff_until[member.replica] = self.world.clock.now_ms() + pause_ms
        if isinstance(claim, BindGang) and (first := self.view.get(members[0].replica)) is not None:
            # Also members without a node: a gang is tried as a unit, whichever member is due.
            self._backoff_until |= dict.fromkeys(self._waiting_with(first), self.world.clock.now_ms() + pause_ms)
        self.retry_all()
        self._schedule_retry()

    def _schedule_retry(self) -> None:
        if not self._retry_scheduled:
            self._retry_scheduled = True
            self.context.process.loop.spawn(self._retry_later(), name="look again")

    def _backoff_ms(self) -> int:
        return max(500, round(_BACKOFF_HEARTBEATS * self.context.timing.heartbeat_ms))

    async def _retry_later(self) -> None:
        """Retry by timer while replicas are backing off: the passing of time causes no event."""
        while self._backoff_until:
            await self.world.clock.sleep_ms(self._backoff_ms() // 2)
            self.changed_keys.keys[next(iter(self._backoff_until), "")] = None
            self.changed_keys.wake()
        self._retry_scheduled = False

    # -- free capacity ---------------------------------------------------------------------------------------------------

    def _forget_changed(self, keys: Sequence[str]) -> bool:
        """Drop cached state that these changes made wrong. Returns whether capacity may have been freed."""
        freed, tenants_with_quota = False, dict[str, None]()
        for key in keys:
            if key.startswith("replica/"):
                if self._forget_replica(key):
                    freed, tenants_with_quota[key.split("/")[1]] = True, None
            elif key.startswith(("node/", "grant/", "tenant/", "policyrevision/")):
                freed = True
                self._forget_source(key, tenants_with_quota)
        for key in [key for key in self._short_of_quota if key.split("/")[1] in tenants_with_quota]:
            self._backoff_until.pop(key, None)
            del self._short_of_quota[key]
        return freed

    def _forget_replica(self, key: str) -> bool:
        """Drop what was known of a replica. Returns whether it has freed its capacity."""
        replica = self.view.get(key)
        node = replica.status.node if replica is not None and replica.status.phase in HOLDING_PHASES else ""
        before = self._node_of.pop(key, "")
        if node:
            self._node_of[key] = node
        for name in {before, node} - {""}:
            self._free.pop(name, None)
        if replica is not None and replica.status.phase is Phase.PENDING:
            self._retry_at.setdefault(key, 0)
        else:
            for state in (self._retry_at, self._refused, self._rounds, self._exhausted_grant):
                state.pop(key, None)
        if replica is None:
            self._delayed_until.pop(key, None)
        return bool(before and not node)

    def _forget_source(self, key: str, tenants_with_quota: dict[str, None]) -> None:
        """Drop what was derived from a node, a ledger or a policy. Adds the tenants that may have more quota now."""
        self._free.pop(key.removeprefix("node/"), None)
        if key.startswith("tenant/"):
            tenants_with_quota[key.removeprefix("tenant/")] = None
        elif key.startswith("grant/"):
            tenants_with_quota.update(dict.fromkeys(waiting.split("/")[1] for waiting in self._short_of_quota))
        elif key.startswith("policyrevision/") and key not in self._policies:  # a new policy revision, not a renewal
            self._policies[key] = None
            self._refused.clear()
            self._backoff_until = {
                member: until_ms for member, until_ms in self._backoff_until.items() if member not in self._rounds
            }
            self._rounds.clear()

    def _free_on(self, name: str, node: Node) -> dict[str, int]:
        free = self._free.get(name)
        if free is None:
            free = dict(node.spec.capacity.pairs)
            free |= {f"@{device.name}": 1000 for device in node.spec.devices}
            for key in self.view.by_node.get(name, ()):
                replica: Replica = self.view.get(key)
                needs = self._needs_of(replica) if replica.status.phase in HOLDING_PHASES else None
                if needs is not None:
                    _subtract(free, needs.resources)
                    _subtract(free, {f"@{name}": n for name, n in replica.status.devices.items()})
            self._free[name] = free
        return free

    def _waiting_with(self, replica: Replica) -> list[str]:
        keys = self.view.by_workload.get((replica.metadata.tenant, replica.spec.workload), ())
        return [key for key in keys if key in self.view.by_phase[Phase.PENDING]]

    def _gang_size(self, replica: Replica) -> int:
        """How many replicas of its generation hold capacity. A gang with enough of them accepts single replicas."""
        keys = self.view.by_workload.get((replica.metadata.tenant, replica.spec.workload), ())
        others = (self.view.get(key) for key in keys)
        return sum(o.status.phase in HOLDING_PHASES and o.spec.generation == replica.spec.generation for o in others)

    def _needs_of(self, replica: Replica) -> ReplicaNeeds | None:
        meta, spec = replica.metadata, replica.spec
        generation: Generation | None = self.view.get(f"generation/{meta.tenant}/{spec.workload}/{spec.generation:08d}")
        if generation is None:
            return None
        template = generation.spec.spec.template
        return ReplicaNeeds(
            dict(template.resources.pairs), {a.kind: a.count for a in template.devices if a.count}, generation.spec.spec
        )

    # -- claims ----------------------------------------------------------------------------------------------------------

    def _place(self, key: str, replica: Replica, needs: ReplicaNeeds) -> Iterator[AnyClaim]:
        candidate = self._find_node(needs, self._refused.get(key, ()))
        if candidate is None and self._refused.pop(key, None) is not None:
            # All nodes with capacity refused it: retry with increasing backoff.
            self._rounds[key] = rounds = self._rounds.get(key, 0) + 1
            self._backoff_until[key] = self.world.clock.now_ms() + min(8, rounds) * self._backoff_ms()
            self._schedule_retry()
        at = self.view.rows[key].revision
        if candidate is not None:
            node, devices = candidate
            _subtract(
                self._free_on(node, self.view.get(f"node/{node}")), needs.resources | {f"@{name}": 1000 for name in devices}
            )
            grant = self._grant(key, replica.metadata.tenant)
            if self.rng.randrange(40) == 0:
                yield Reserve(key, at, node, grant, dict.fromkeys(devices, 1000))
            else:
                yield Bind(key, at, node, grant, dict.fromkeys(devices, 1000))
        elif replica.spec.priority > 0:
            yield from self._preempt(key, replica, needs)

    def _find_node(self, needs: ReplicaNeeds, excluded: Collection[str] = ()) -> tuple[str, list[str]] | None:
        nodes = [key for key, row in self.view.of_kind("node/") if row.obj.status.health is NodeHealth.READY]
        for key in self.rng.shuffled(nodes)[:_NODES_TRIED_MAX]:
            node: Node = self.view.get(key)
            name = node.metadata.name
            if node.spec.draining or node.spec.unschedulable or name in excluded:
                continue
            free = self._free_on(name, node)
            devices = self._devices(node, needs, free)
            if devices is not None and all(free.get(resource, 0) >= n for resource, n in needs.resources.items()):
                return name, devices
        return None

    def _devices(self, node: Node, needs: ReplicaNeeds, free: dict[str, int]) -> list[str] | None:
        chosen: list[str] = []
        for kind, count in needs.devices.items():
            free_devices = [d.name for d in node.spec.devices if d.kind == kind and free.get(f"@{d.name}", 0) == 1000]
            if len(free_devices) < count:
                return None
            chosen += free_devices[:count]
        return chosen

    def _grant(self, key: str, tenant: str) -> str:
        """A slice of the parent scope if there is one, sometimes an offer or an emergency budget, else the tenant's own quota;
        never the grant that was just refused.
        """
        slices, offers, exhausted = [], [], self._exhausted_grant.pop(key, "")
        for _, row in self.view.of_kind("grant/"):
            grant: Grant = row.obj
            if grant.status.phase is not GrantPhase.LIVE:
                continue
            if grant.spec.issuer and grant.spec.purpose == "quota" and grant.spec.tenant == tenant:
                slices.append(grant.metadata.name)
            elif (grant.spec.issuer and tenant in grant.spec.shares) or (
                grant.spec.holder == self.lease and grant.spec.tenant in ("", tenant)
            ):
                offers.append(grant.metadata.name)
        own = slices or [f"tenant/{tenant}"]
        choices = [name for name in (offers if self.rng.randrange(4) == 0 else own) if name != exhausted]
        return self.rng.choice(choices or [name for name in (*offers, *own) if name != exhausted] or own)

    def _similar_nodes(self, name: str, code: Code) -> list[str]:
        """Nodes that would probably be refused for the same reason: policies and spread apply per zone."""
        node: Node | None = self.view.get(f"node/{name}")
        if node is None or code not in (Code.POLICY, Code.SPREAD):
            return [name]
        return [row.obj.metadata.name for _, row in self.view.of_kind("node/") if row.obj.spec.zone == node.spec.zone]

    def _is_optional_grant(self, grant: str) -> bool:
        """Whether it is an offer or budget, for which quota can be used instead."""
        row: Grant | None = self.view.get(f"grant/{grant}")
        return not grant.startswith("tenant/") and (row is None or row.spec.purpose != "quota")

    def _gang(self, members: Sequence[str]) -> Iterator[AnyClaim]:
        binds = []
        for key in members:
            replica: Replica = self.view.get(key)
            needs = self._needs_of(replica)
            candidate = self._find_node(needs) if needs is not None else None
            if needs is None or candidate is None:
                continue
            node, devices = candidate
            _subtract(self._free_on(node, self.view.get(f"node/{node}")), needs.resources)
            grant = self._grant(key, replica.metadata.tenant)
            binds.append(Bind(key, self.view.rows[key].revision, node, grant, dict.fromkeys(devices, 1000)))
        if binds:
            yield BindGang(tuple(binds))

    def _preempt(self, key: str, replica: Replica, needs: ReplicaNeeds) -> Iterator[AnyClaim]:
        nodes = [name for name, row in self.view.of_kind("node/") if row.obj.status.health is NodeHealth.READY]
        for name in self.rng.shuffled(nodes)[:_NODES_TRIED_MAX]:
            node: Node = self.view.get(name)
            free = dict(self._free_on(node.metadata.name, node))
            victims: dict[str, int] = {}
            for other in self.view.by_node.get(node.metadata.name, ()):
                row = self.view.rows[other]
                if all(free.get(resource, 0) >= n for resource, n in needs.resources.items()):
                    break
                victim_needs = self._needs_of(row.obj)
                if row.obj.status.phase in _RUNNING_PHASES and row.obj.spec.priority < replica.spec.priority and victim_needs:
                    victims[other] = row.revision
                    _subtract(free, {resource: -n for resource, n in victim_needs.resources.items()})
            if victims and not needs.devices and all(free.get(resource, 0) >= n for resource, n in needs.resources.items()):
                at, grant = self.view.rows[key].revision, self._grant(key, replica.metadata.tenant)
                yield Reserve(key, at, node.metadata.name, grant, victims=victims)
                return

    def _reserved(self) -> Iterator[AnyClaim]:
        """Bind reserved replicas whose victims are gone; sometimes cancel a reservation or preempt without need."""
        for key in self.view.by_phase[Phase.RESERVED]:
            row = self.view.rows[key]
            status = row.obj.status
            if status.victims and self._delays_use(key):
                continue
            if self.rng.randrange(150) == 0:
                yield Move(key, row.revision, "unreserve", reason="thought better of it")
            elif not any(self._holds(victim, attempt) for victim, attempt in status.victims.items()):
                yield Bind(key, row.revision, status.node, status.grants[0], status.devices)
        for phase in _RUNNING_PHASES:
            for key in self.view.by_phase[phase]:
                if self.rng.randrange(3_000) == 0 and not self.context.timing.quiet:
                    yield Move(key, self.view.rows[key].revision, "preempt", reason="room is needed")

    def _delays_use(self, key: str) -> bool:
        """Sometimes delay the use of a reservation, so that repair may cancel it."""
        now_ms, at = self.world.clock.now_ms(), self.view.rows[key].revision
        if self._delayed_until.get(key, (0, 0))[0] != at:
            slow_ms = self.rng.jitter_ms(60 * self.context.timing.heartbeat_ms) if self.rng.randrange(4) == 0 else 0
            self._delayed_until[key] = at, now_ms + slow_ms
        return self._delayed_until[key][1] > now_ms and not self.context.timing.quiet

    def _holds(self, victim: str, attempt: str) -> bool:
        replica: Replica | None = self.view.get(victim)
        return replica is not None and still_holds(replica, attempt)


def _subtract(free: dict[str, int], needs: dict[str, int]) -> None:
    for name, n in needs.items():
        free[name] = free.get(name, 0) - n
