"""What would the controllers correct? Each role in its simplest honest form: it looks, and asks for the next lawful step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from remit.client.client import NoAnswer
from remit.model.claims import AnyClaim, Close, Delete, Forget, Mark, Move, Role, Spawn
from remit.model.kinds import Node, NodeHealth, Workload
from remit.model.records import Grant, Phase, Replica
from remit.simulate.actors.seat import Player, Seat

_RUNS: Final = (Phase.BOUND, Phase.STARTING, Phase.RUNNING, Phase.READY, Phase.SERVING)
_ON_NODE: Final = (*_RUNS, Phase.DRAINING, Phase.STOPPING)
_MASS_PERCENT: Final = 55
MEDDLED: Final = "node/meddler-"
"""Nodes that nobody beats for: their health is what the meddler says, who has them."""


class Workloads(Player):
    """From workload to replicas: as many as are wanted, and none when it goes."""

    role = Role.WORKLOADS

    def concerns(self, key: str, old: Any, new: Any) -> bool:
        if isinstance(new, Replica):
            return old is None or new.status.phase in (Phase.RELEASED, Phase.FINISHED, Phase.PENDING) or self._going(new)
        return key.startswith(("workload/", "replica/"))

    def _going(self, replica: Replica) -> bool:
        workload = self.view.get(f"workload/{replica.metadata.tenant}/{replica.spec.workload}")
        return workload is None or workload.metadata.deleting

    def wants(self, keys: Sequence[str]) -> Iterable[AnyClaim]:
        for tenant, name in self._touched(keys):
            workload: Workload | None = self.view.get(f"workload/{tenant}/{name}")
            replicas = self.view.by_workload.get((tenant, name), {})
            if workload is None or workload.metadata.deleting:
                yield from self._clear(tenant, name, workload, replicas)
            else:
                yield from self._fill(workload, replicas)

    def _touched(self, keys: Sequence[str]) -> list[tuple[str, str]]:
        found: dict[tuple[str, str], None] = {}
        for key in keys:
            if key.startswith("workload/"):
                _, tenant, name = key.split("/")
                found[tenant, name] = None
            elif key.startswith("replica/"):
                _, tenant, name = key.split("/")
                found[tenant, name.rsplit("-", 1)[0]] = None  # also of one that is gone: its workload may go now
        return list(found)

    def _clear(self, tenant: str, name: str, workload: Workload | None, replicas: Iterable[str]) -> Iterator[AnyClaim]:
        left = False
        for key in replicas:
            left = True
            yield from self._away(key)
        if workload is not None and not left:
            yield Delete("Workload", name, tenant)

    def _away(self, key: str) -> Iterator[AnyClaim]:
        seen = self.view.rows[key]
        match seen.thing.status.phase:
            case Phase.PENDING | Phase.RESERVED:
                yield Move(key, seen.revision, "cancel", reason="not wanted any more")
            case Phase.FINISHED:
                yield Move(key, seen.revision, "settle")
            case Phase.RELEASED:
                yield Forget(key, seen.revision)
            case phase if phase in _RUNS:
                yield Move(key, seen.revision, "remove", reason="not wanted any more")

    def _fill(self, workload: Workload, replicas: Iterable[str]) -> Iterator[AnyClaim]:
        meta, spec = workload.metadata, workload.spec
        taken: set[int] = set()
        live: list[tuple[int, str]] = []
        released: list[str] = []
        for key in replicas:
            seen = self.view.rows[key]
            replica: Replica = seen.thing
            taken.add(replica.spec.index)
            if replica.status.phase is Phase.FINISHED:
                yield Move(key, seen.revision, "settle")
            waits = replica.status.phase in (Phase.PENDING, Phase.RESERVED)
            if waits and spec.type == "service" and replica.spec.generation < meta.generation:
                yield from self._away(key)  # what runs is for rollouts to take away
            if replica.status.phase is Phase.RELEASED:
                released.append(key)
            else:
                live.append((replica.spec.index, key))
        wanted = spec.completions or spec.replicas
        for key in released if spec.type != "job" else ():
            if len(live) >= wanted or self.view.get(key).spec.generation < meta.generation:
                yield Forget(key, self.view.rows[key].revision)
        if spec.type != "job" and len(live) > wanted:
            for _, key in sorted(live, reverse=True)[: len(live) - wanted]:
                if self.view.get(key).spec.generation == meta.generation:
                    yield from self._away(key)
        missing = wanted - (len(taken) if spec.type == "job" else len(live))
        for index in range(wanted + len(taken) + 1):
            if missing <= 0:
                break
            if index not in taken:
                missing -= 1
                yield Spawn(meta.tenant, meta.name, meta.generation, index)


class Repair(Player):
    """Ends what is stuck, and gives what failed another attempt."""

    role = Role.REPAIR

    def concerns(self, key: str, old: Any, new: Any) -> bool:
        return key.startswith(("replica/", "workload/")) and (
            not isinstance(new, Replica) or new.status.phase in (Phase.FAILED, Phase.RELEASED)
        )

    def __init__(self, seat: Seat, *, lease: str = "") -> None:
        super().__init__(seat, lease=lease)
        self._since: dict[tuple[str, Phase], int] = {}

    def wants(self, keys: Sequence[str]) -> Iterable[AnyClaim]:
        now_ms = self.world.clock.now_ms()
        for key in keys:
            seen = self.view.rows.get(key)
            if seen is None:
                continue
            if isinstance(seen.thing, Replica):
                yield from self._mend(key, seen.thing, seen.revision, now_ms)
            elif isinstance(seen.thing, Grant) and _of_this_scope(seen.thing):
                # Refused while it lives. What is closed goes only once all that was drawn on it has been released.
                yield Close(seen.thing.metadata.name)

    def _mend(self, key: str, replica: Replica, at: int, now_ms: int) -> Iterator[AnyClaim]:
        phase = replica.status.phase
        lasted_ms = now_ms - self._since.setdefault((key, phase), now_ms)
        match phase:
            case Phase.FAILED:
                yield Move(key, at, "release")
            case Phase.RELEASED if self._again(replica):
                yield Move(key, at, "requeue")
            case Phase.RESERVED if lasted_ms > 61_000:
                yield Move(key, at, "reclaim", reason="it was not bound in time")
            case Phase.BOUND if lasted_ms > 61_000:
                yield Move(key, at, "abort", reason="it was not started in time")
            case Phase.STARTING if lasted_ms > 601_000:
                yield Move(key, at, "abort", reason="it did not run in time")
        if phase is Phase.RELEASED:
            for other in Phase:
                self._since.pop((key, other), None)

    def _again(self, replica: Replica) -> bool:
        meta, spec = replica.metadata, replica.spec
        workload: Workload | None = self.view.get(f"workload/{meta.tenant}/{spec.workload}")
        if workload is None or workload.metadata.deleting:
            return False
        if workload.spec.type == "job":
            return replica.status.result != "ok" and replica.status.failures <= workload.spec.retries
        others = self.view.by_workload.get((meta.tenant, spec.workload), {})
        live = sum(self.view.get(key).status.phase is not Phase.RELEASED for key in others)
        return spec.generation == workload.metadata.generation and live < workload.spec.replicas


class Nodes(Player):
    """Believes in a node as long as it beats: first no new work, then unknown, and only past the fence lost."""

    role = Role.NODES

    def concerns(self, key: str, old: Any, new: Any) -> bool:
        return key.startswith("node/")

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self.beats: dict[str, int] = {}
        self._beats_of = ""
        self._since_ms = seat.world.clock.now_ms()
        """Since when it has listened. It does so also while another holds the role, and so need not begin anew with it."""

    def renew(self, incarnation: str) -> None:
        """Beats from before a restore say nothing of after it."""
        if incarnation != self._beats_of:
            self._beats_of, self._since_ms = incarnation, self.world.clock.now_ms()
            self.beats.clear()

    def silent_ms(self, node: str) -> int:
        return self.world.clock.now_ms() - max(self.beats.get(node, 0), self._since_ms)

    async def tick(self) -> None:
        """Beside the changes: time itself is news here. Whoever stood still has not listened meanwhile."""
        clock, beat_ms = self.world.clock, self.seat.pace.beat_ms
        while True:
            before_ms = clock.now_ms()
            await clock.sleep_ms(beat_ms // 2)
            if clock.now_ms() - before_ms > 2 * beat_ms:
                self._since_ms = clock.now_ms()
            await self._listen()
            for key, _ in self.view.kind("node/"):
                self.changes.keys[key] = None
            self.changes.wake()

    async def _listen(self) -> None:
        try:
            heard, sent_ms = await self.client.heard(deadline_ms=self.seat.pace.beat_ms)
        except NoAnswer:
            return
        if self.view.head is None or heard.incarnation != self.view.head.incarnation:
            return
        self.renew(heard.incarnation)
        self._since_ms = max(self._since_ms, sent_ms - heard.listened_ms)
        for name, node in heard.nodes.items():
            if node.settled == heard.incarnation:
                self.beats[name] = max(self.beats.get(name, 0), sent_ms - node.silent_ms)

    def wants(self, keys: Sequence[str]) -> Iterable[AnyClaim]:
        if self.view.head is not None:
            self.renew(self.view.head.incarnation)
        nodes = [(key.removeprefix("node/"), seen) for key, seen in self.view.kind("node/") if not key.startswith(MEDDLED)]
        heard_ms = self.world.clock.now_ms() - self.seat.pace.suspect_ms
        silent = 0 if self._since_ms >= heard_ms else sum(self.beats.get(name, 0) < heard_ms for name, _ in nodes)
        mass = len(nodes) > 2 and silent * 100 >= _MASS_PERCENT * len(nodes)
        for name, seen in nodes:
            node: Node = seen.thing
            if self._well(name, node, heard_ms):
                continue  # as almost all are
            claim = self._mark(node, seen.revision, mass)
            if claim is not None:
                yield claim
            if node.status.health in (NodeHealth.UNKNOWN, NodeHealth.LOST) and not mass:
                yield from self._give_up(name)
            elif node.spec.draining:
                yield from self._moves(name, _RUNS, "evict", "the node drains")

    def _well(self, name: str, node: Node, heard_ms: int) -> bool:
        return node.status.health is NodeHealth.READY and not node.spec.draining and self.beats.get(name, 0) >= heard_ms

    def _mark(self, node: Node, at: int, mass: bool) -> AnyClaim | None:
        silent_ms, pace = self.silent_ms(node.metadata.name), self.seat.pace
        heard_ms = self.beats.get(node.metadata.name)
        here = heard_ms is not None and self.world.clock.now_ms() - heard_ms <= pace.suspect_ms
        target: NodeHealth | None = None
        match node.status.health:
            case NodeHealth.JOINING | NodeHealth.SUSPECT if here:
                target = NodeHealth.READY
            case NodeHealth.READY if silent_ms > pace.suspect_ms:
                target = NodeHealth.SUSPECT
            case NodeHealth.SUSPECT if silent_ms > pace.unknown_ms and not mass:
                target = NodeHealth.UNKNOWN
            case NodeHealth.UNKNOWN | NodeHealth.LOST if here:
                target = NodeHealth.JOINING
            case NodeHealth.UNKNOWN if not mass and not any(True for _ in self._holding(node.metadata.name)):
                target = NodeHealth.LOST if silent_ms > 4 * pace.unknown_ms else None
        return None if target is None else Mark(node.metadata.name, at, target, reason=f"silent for {silent_ms} ms")

    def _give_up(self, node: str) -> Iterator[AnyClaim]:
        """Doubt what is there; what is in doubt fails once the authority agrees that the fence has passed."""
        yield from self._moves(node, _ON_NODE, "doubt", "the node is silent")
        if self.silent_ms(node) > self.seat.pace.unknown_ms:
            for key in self.view.by_node.get(node, ()):
                seen = self.view.rows[key]
                if seen.thing.status.phase is Phase.UNKNOWN:
                    yield Move(key, seen.revision, "lose", result="lost", reason="the node is lost")

    def _moves(self, node: str, phases: Sequence[Phase], transition: str, reason: str) -> Iterator[AnyClaim]:
        for key in self.view.by_node.get(node, ()):
            seen = self.view.rows[key]
            if seen.thing.status.phase in phases:
                yield Move(key, seen.revision, transition, reason=reason)

    def _holding(self, node: str) -> Iterator[str]:
        return (key for key in self.view.by_node.get(node, ()) if self.view.get(key).status.phase is not Phase.RELEASED)


class Rollouts(Player):
    """Takes old generations away, one after another, while the rest is there."""

    role = Role.ROLLOUT

    def concerns(self, key: str, old: Any, new: Any) -> bool:
        if isinstance(new, Replica):
            workload = self.view.get(f"workload/{new.metadata.tenant}/{new.spec.workload}")
            return workload is not None and workload.metadata.generation > new.spec.generation
        return isinstance(new, Workload) and old is not None

    def wants(self, keys: Sequence[str]) -> Iterable[AnyClaim]:
        things = [self.view.get(key) for key in keys]
        workloads = {(t.metadata.tenant, t.spec.workload): None for t in things if isinstance(t, Replica)}
        workloads |= {(t.metadata.tenant, t.metadata.name): None for t in things if isinstance(t, Workload)}
        for tenant, name in workloads:
            workload: Workload | None = self.view.get(f"workload/{tenant}/{name}")
            if workload is None or workload.spec.type == "job" or workload.metadata.deleting:
                continue
            for key in self.view.by_workload.get((tenant, name), ()):
                seen = self.view.rows[key]
                old = seen.thing.spec.generation < workload.metadata.generation
                if old and seen.thing.status.phase in _RUNS:
                    yield Move(key, seen.revision, "retire", reason="a newer generation is wanted")
                    break


class Endpoints(Player):
    """Publishes what is ready."""

    role = Role.ENDPOINTS

    def __init__(self, seat: Seat, *, lease: str = "") -> None:
        super().__init__(seat, lease=lease)
        self._left: dict[str, int] = {}
        """Until when what is ready is left as it is: some wait for more than one look."""

    def concerns(self, key: str, old: Any, new: Any) -> bool:
        return isinstance(new, Replica) and new.status.phase is Phase.READY

    def wants(self, keys: Sequence[str]) -> Iterable[AnyClaim]:
        for key in keys:
            seen = self.view.rows.get(key)
            if seen is None or not isinstance(seen.thing, Replica):
                continue
            match seen.thing.status.phase:
                case Phase.READY if self._due(key):
                    self._left.pop(key, None)
                    yield Move(key, seen.revision, "serve")
                case Phase.SERVING if self.chance.below(60) == 0:
                    yield Move(key, seen.revision, "unserve", reason="its endpoint changes")

    def _due(self, key: str) -> bool:
        now_ms = self.world.clock.now_ms()
        if key not in self._left:
            self._left[key] = now_ms + (0 if self.chance.below(4) else self.chance.uniform_ms(12 * self.seat.pace.beat_ms))
        return self._left[key] <= now_ms or self.seat.pace.quiet


def _of_this_scope(grant: Grant) -> bool:
    return not grant.spec.holder.startswith("scope/") and not grant.spec.issuer
