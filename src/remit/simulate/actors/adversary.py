"""Sends invalid operations to reach every refusal code.

A sloppy asker in every role, to reach every refusal; it ruins nothing that is lawful.

It does one mischief at a time, now and then. Each aims at one code of `model.claims.Code` (see `MISCHIEF`), most of them in the
meddler's own yard (yard.py); what more it tries there is in trespass.py. Against what is not its own it only asks what cannot
be accepted: by the wrong role, at an old revision, from the wrong phase, with a device that is not there. It keeps to its own
leases, `<role>/meddler`.

`POLICY_LAPSED` is reached when the region's policies are past their lease, `AWAITING_REPORTS` also after a restore; both are
tried whenever it is their turn. `FAULT` needs a bug of ours, so nothing aims at it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from msgspec.structs import replace

from remit.client.authority_client import NoAnswer
from remit.law.lifecycle import NODE_EDGES, OWNER, edge
from remit.model.claims import (
    Abandon,
    Accept,
    Acquire,
    Actor,
    Adopt,
    AnyClaim,
    Apply,
    Bind,
    Close,
    Code,
    Credit,
    DeclareLost,
    Delete,
    Evidence,
    Explain,
    Forget,
    Ganged,
    Issue,
    Mark,
    Move,
    Note,
    Observe,
    Operation,
    OperationID,
    Recognise,
    Refused,
    Renew,
    Report,
    Reserve,
    Role,
    Rollback,
    Spawn,
    Vacate,
    Verdict,
    Vouch,
    Yield,
    operation_id,
)
from remit.model.kinds import NodeHealth, Policy, PolicySpec, Region
from remit.model.metadata import Condition, Metadata
from remit.model.objects import key_of
from remit.model.policies import PolicyAllow, PolicyMatch, PolicyRule
from remit.model.records import DecisionSpec, EventSpec, GrantSpec, Phase, SummarySpec
from remit.model.resources import Amount, Duration
from remit.simulate.actors.adversary_limits import TRESPASSES, Trespasser
from remit.simulate.actors.adversary_tenant import HOME, NAME, NEW, NOWHERE, SHUT
from remit.simulate.actors.role import Seat

LITTLE: Final = Amount({"cpu": 10})
PLACED_HERE: Final = frozenset({"create", "reserve", "bind", "confirm", "forget", "distrust"})
"""Transitions with claims of their own: a move that names one is invalid."""


class Meddler(Trespasser):
    """It rests for `mean_beats` between two mischiefs, on average. `upper` is where policies are published, if not here.

    In quiet times there is no mischief: the yard is taken away, and again whenever a restore brings it back.
    """

    def __init__(self, seat: Seat, upper: Seat | None = None, *, mean_beats: int = 2) -> None:
        super().__init__(seat)
        self.reached: dict[Code, int] = {}
        self.tried: dict[str, int] = {}
        """How often each trespass came to its point."""
        self._deck: list[Code | str] = []
        self._mean_ms = mean_beats * seat.pace.beat_ms
        self._upper = upper

    async def play(self) -> None:
        while True:
            await self.world.clock.sleep_ms(1 + self.chance.uniform_ms(2 * self._mean_ms))
            if self.view.head is not None:
                await self._try(self.leave if self.seat.pace.quiet else self._mischief)

    async def _try(self, deed: Callable[[], Awaitable[object]]) -> None:
        try:
            await deed()
        except NoAnswer as error:
            self.gave_up(error)

    async def _mischief(self) -> None:
        drawn = self.chance.below(12)
        if drawn == 0:
            await self.tidy()
        elif drawn == 1:
            await self.gossip()
        else:
            self._deck = self._deck or self.chance.shuffled([*MISCHIEF, *TRESPASSES])
            aim = self._deck.pop()
            await self.furnish()
            if not await self._aim(aim):
                self._deck.insert(0, aim)  # the world was not so; once more, after the others
            await self.shut_down()

    async def _aim(self, aim: Code | str) -> bool:
        if isinstance(aim, Code):
            await MISCHIEF[aim](self)
            return aim in self.reached
        hit = await TRESPASSES[aim](self)
        self.tried[aim] = self.tried.get(aim, 0) + hit
        return hit

    def _noted(self, actor: Actor, verdicts: Any) -> list[Verdict]:
        for verdict in verdicts:
            if isinstance(verdict, Refused):
                self.reached[verdict.code] = self.reached.get(verdict.code, 0) + 1
        return super()._noted(actor, verdicts)

    # -- what is said without agreement ----------------------------------------------------------------------------------

    async def gossip(self) -> None:
        """Soft claims of every role; they bind nobody, so they may be about anything."""
        role = self.chance.choice([role for role in Role if role is not Role.AUTHORITY])
        names = [key for key, _ in self.others("node/")] or [f"node/{HOME}"]
        about, number = self.chance.choice(names), self.chance.below(100)
        claims: list[AnyClaim] = [
            Note(f"{NAME}-{number}", EventSpec(regarding=about, reason="Seen", source=NAME)),
            Explain(f"{NAME}-{number}", NAME, DecisionSpec(replicas={about: ""}, reason="a guess")),
            Report(f"{NAME}-{number % 8}", SummarySpec(holder=NAME, epoch=1, sequence=number, used=LITTLE)),
            Observe("Node", HOME, Condition(type=f"Odd{number % 4}", status="Unknown", observed_generation=number)),
            Observe("Node", f"{NAME}-none", Condition(type="Odd", status="True")),
            Report("", SummarySpec(holder=NAME, epoch=1, sequence=1)),
        ]
        await self.say(role, *self.chance.shuffled(claims)[:3])

    # -- who asks --------------------------------------------------------------------------------------------------------

    async def wrong_role(self) -> None:
        await self.say(Role.USER, Delete("Node", HOME), Recognise(NOWHERE, "one"), Acquire("user", Duration(1_000)))
        await self.say(Role.ENDPOINTS, Spawn(NAME, f"{NAME}-plain", 1, 0), Renew("none"))
        for key, seen in self.others("replica/")[:1]:
            wrong = self.chance.choice([name for name, owner in OWNER.items() if owner is not Role.ENDPOINTS])
            await self.say(Role.ENDPOINTS, Move(key, seen.revision, wrong, seen.thing.status.attempt))

    async def not_mine(self) -> None:
        """Leases of other roles, other nodes, other grants."""
        await self.say(Role.SCHEDULER, Acquire("repair", Duration(1_000)), Close("clock"))
        nodes = self.others("node/")
        if nodes:
            key, seen = self.chance.choice(nodes)
            await self.say(Role.AGENT, Apply(seen.thing), Delete("Node", key.removeprefix("node/")))
        busy = [(key, seen) for key, seen in self.others("replica/") if seen.thing.status.phase is Phase.BOUND]
        for key, seen in busy[:1]:
            await self.say(Role.AGENT, Move(key, seen.revision, "start", seen.thing.status.attempt))

    async def old_epoch(self) -> None:
        actor = await self.actor(Role.REPAIR)
        await self.say_as(replace(actor, epoch=actor.epoch + 1), Close("none"))
        await self.say_as(Actor(NAME, Role.SCHEDULER, "scheduler", 1), Close("none"), Vacate("scheduler"))
        await self.say_as(Actor(NAME, Role.NODES), Mark(HOME, 1, NodeHealth.LOST))

    async def lapsed_lease(self) -> None:
        lease = f"{Role.ROLLOUT}/{NAME}-short"
        said = (await self.say_as(Actor(NAME, Role.ROLLOUT), Acquire(lease, Duration(100))))[0]
        if not isinstance(said, Refused):
            await self.world.clock.sleep_ms(2_000)
            await self.say_as(Actor(NAME, Role.ROLLOUT, lease, said.number), Move("none", 1, "retire"))

    async def taken_lease(self) -> None:
        mine = await self.actor(Role.REPAIR)
        await self.say_as(Actor(f"{NAME}-twin", Role.REPAIR), Acquire(mine.lease, Duration(1_000)))

    # -- operations ------------------------------------------------------------------------------------------------------

    async def _operation(self, claim: AnyClaim, id_: OperationID | None = None) -> Operation:
        return Operation(id_ or await self.client.issue(), Actor(NAME, Role.USER), claim, Evidence(self.view.revision, 0))

    async def old_id(self) -> None:
        status = await self.client.status()
        for id_ in (
            operation_id("before", status.window, self.world.ids.nonce()),
            operation_id(status.incarnation, status.window + 1_000, self.world.ids.nonce()),
        ):
            await self.say_again(await self._operation(Delete("Config", "none", NAME), id_))
            await self.say(Role.USER, Abandon(id_))

    async def twice_used_id(self) -> None:
        first = await self._operation(Delete("Config", "none", NAME))
        await self.say_again(first, await self._operation(Delete("Config", "other", NAME), first.id))
        await self.say_again(replace(first, claim=Delete("Secret", "none", NAME)))
        await self.say_again(first)

    async def abandoned(self) -> None:
        operation = await self._operation(Delete("Config", "none", NAME))
        await self.say(Role.USER, Abandon(operation.id))
        await self.say_again(operation)

    # -- what is named ---------------------------------------------------------------------------------------------------

    async def nonsense(self) -> None:
        """Claims that contradict themselves."""
        await self.say(Role.OPERATOR, DeclareLost(HOME), Recognise("nobody", "one"), Delete("Replica", "none"))
        await self.say(Role.BUDGETS, Issue("NO LABEL", self._offer()), Issue(f"{NAME}-x", self._offer(amount=Amount())))
        far = Accept(f"{NAME}-far", GrantSpec(holder=NAME, amount=LITTLE, ttl=Duration(1)), 1, 0, "a", "b")
        await self.say(Role.BUDGETS, far, Yield("clock", LITTLE))
        transition = self.chance.choice(sorted(PLACED_HERE))
        await self.say(Role.REPAIR, Move("none", 1, transition), Acquire(f"repair/{NAME}", Duration(1)))

    async def unsayable(self) -> None:
        """What only Remit itself may say."""
        await self.say(Role.OPERATOR, Apply(Region(metadata=Metadata(name=f"{NAME}-own", labels={"remit/mine": "yes"}))))

    async def foreign(self) -> None:
        """As somebody of one tenant, about another's."""
        mine, theirs = f"{NAME}-one", f"{NAME}-two"
        await self.say_as(Actor(NAME, Role.USER, tenant=mine), Delete("Workload", "none", theirs))

    async def missing(self) -> None:
        await self.say(Role.OPERATOR, Delete("Node", f"{NAME}-none"), Rollback(99_999_999))
        await self.say(Role.SCHEDULER, Bind("replica/none/none-0", 1, HOME, "none"), Close("none"))
        await self.say(Role.BUDGETS, Renew("none"), Yield("none", LITTLE), Credit("none", 1, 1, LITTLE, "a", "b"))
        await self.bind("plain", f"{NAME}-none")

    async def there_already(self) -> None:
        await self.say(Role.OPERATOR, Apply(self.chance.choice(self.furniture()), expect=0))
        found = await self.pending("plain")
        if found is not None:
            index = self.view.get(found[0]).spec.index if self.view.get(found[0]) else 0
            await self.say(Role.WORKLOADS, Spawn(NAME, f"{NAME}-plain", 1, index))

    async def old_revision(self) -> None:
        """Of anybody's: an old revision is never the current one."""
        for key, seen in self.others("replica/")[:2]:
            await self.say(Role.WORKLOADS, Move(key, seen.revision - 1, "cancel"), Forget(key, seen.revision - 1))
            await self.say(Role.SCHEDULER, Bind(key, seen.revision - 1, HOME, f"tenant/{NAME}"))
        seen_home = await self.look(key_of("Node", HOME))
        if seen_home is not None:
            await self.say(Role.NODES, Mark(HOME, seen_home.revision - 1, NodeHealth.SUSPECT))

    async def wrong_phase(self) -> None:
        """Of anybody's, but only what the table does not have from where it stands."""
        replicas, nodes = self.others("replica/"), self.others("node/")
        if replicas:
            key, seen = self.chance.choice(replicas)
            status = seen.thing.status
            names = [n for n in OWNER if n not in PLACED_HERE and edge(n, status.phase, status.before) is None]
            name = self.chance.choice(names)
            if OWNER[name] is not Role.AUTHORITY:
                await self.say(OWNER[name], Move(key, seen.revision, name, status.attempt, "odd"))
            if status.phase is not Phase.RELEASED:
                await self.say(Role.WORKLOADS, Forget(key, seen.revision))
        if nodes:
            key, seen = self.chance.choice(nodes)
            here = seen.thing.status.health
            there = self.chance.choice([health for health in NodeHealth if (here, health) not in NODE_EDGES])
            await self.say(Role.NODES, Mark(key.removeprefix("node/"), seen.revision, there))
        placed = await self.placed()
        if placed is not None:
            await self.say(Role.SCHEDULER, Bind(placed[0], placed[2], HOME, f"tenant/{NAME}"))

    async def wrong_attempt(self) -> None:
        placed = await self.placed()
        if placed is not None:
            await self.say(Role.AGENT, Move(placed[0], placed[2], "start", placed[1].status.attempt + 7))

    async def in_use(self) -> None:
        await self.say(Role.OPERATOR, Delete("Tenant", NAME))
        if await self.placed() is not None:
            await self.say(Role.OPERATOR, Delete("Node", HOME))

    async def going(self) -> None:
        """A workload that is deleted while a replica of it is left."""
        if await self.pending("going") is None:
            return
        name = f"{NAME}-going"
        await self.say(Role.USER, Delete("Workload", name, NAME), Apply(self.workload("going")))
        await self.bind("going")

    # -- waiting ---------------------------------------------------------------------------------------------------------

    async def too_early(self) -> None:
        placed = await self.placed()
        if placed is not None:
            await self.say(Role.REPAIR, Move(placed[0], placed[2], "abort"))
        offer = await self._lend(self._offer())
        await self.say(Role.REPAIR, Close(offer))

    async def fenced(self) -> None:
        """Its own node's agent was just heard of, so what runs there may still run."""
        placed = await self.placed()
        if placed is None:
            return
        await self.client.renew(await self.actor(Role.AGENT))
        await self.say(Role.NODES, Move(placed[0], placed[2], "doubt"))
        seen = await self.look(placed[0])
        if seen is not None:
            await self.say(Role.NODES, Move(placed[0], seen.revision, "lose", seen.thing.status.attempt, "lost"))

    async def stale(self) -> None:
        await self.bind("plain", age_ms=3_600_000)
        placed = await self.placed()
        if placed is not None:
            await self.say(Role.AGENT, Move(placed[0], placed[2], "start", placed[1].status.attempt), age_ms=3_600_000)

    # -- room ------------------------------------------------------------------------------------------------------------

    async def unready(self) -> None:
        await self.bind("plain", NEW)

    async def shut(self) -> None:
        await self.bind("plain", SHUT)

    async def device_taken(self) -> None:
        await self.placed("gpu")
        await self.bind("gpu", devices={"gpu-0": 1000})
        await self.bind("gpus")

    async def wrong_device(self) -> None:
        """Also with others' replicas: a device that no node has is never theirs."""
        await self.bind("plain", devices={"gpu-1": 1000})
        waiting = [(key, seen) for key, seen in self.others("replica/") if seen.thing.status.phase is Phase.PENDING]
        nodes = self.others("node/")
        if waiting and nodes:
            key, seen = self.chance.choice(waiting)
            node = self.chance.choice(nodes)[0].removeprefix("node/")
            claim = Bind(key, seen.revision, node, f"tenant/{seen.thing.metadata.tenant}", {f"{NAME}-device": 1000})
            await self.say(Role.SCHEDULER, claim)

    async def barred(self) -> None:
        """A policy about one workload of the yard; it comes into force here at once, or with the next that is adopted."""
        rule = PolicyRule(match=PolicyMatch(labels={NAME: "barred"}), allow=PolicyAllow(zones=("nowhere",)))
        claim = Apply(Policy(metadata=Metadata(name=NAME), spec=PolicySpec(rules=(rule,))))
        if isinstance(await self.bind("barred"), Refused):
            return
        if self._upper is None:
            await self.say(Role.OPERATOR, claim)
        else:
            await _publish(self._upper, claim)
        await self.tidy()
        await self.bind("barred")

    async def misplaced(self, workload: str) -> None:
        await self.bind(workload)

    async def shunned(self) -> None:
        await self.placed("shy")
        await self.bind("shy")

    async def unlawful_policy(self) -> None:
        """When the policies here are past their lease nothing is placed; and what is adopted must not be older than they."""
        await self.bind("plain")
        rows = [seen.thing.spec for _, seen in self.view.kind("policyrevision/")]
        number = max((spec.number for spec in rows if spec.deadline is not None), default=0)
        if number > 1:
            await self.say(Role.POLICY, Adopt(number - 1, {}, Duration(1_000), 0), Rollback(number))

    async def short_gang(self) -> None:
        found = await self.pending("gang")
        if found is not None:
            await self.say(Role.SCHEDULER, Ganged((Bind(*found, HOME, f"tenant/{NAME}"),)))
            await self.bind("gang")

    async def wrong_victims(self) -> None:
        placed, found = await self.placed(), await self.pending("plain")
        if placed is not None and found is not None:
            claim = Reserve(*found, HOME, f"tenant/{NAME}", victims={placed[0]: placed[2]})
            await self.say(Role.SCHEDULER, claim)

    async def too_many(self) -> None:
        await self.say(Role.WORKLOADS, Spawn(NAME, f"{NAME}-plain", 1, 1_000, 100))

    # -- grants ----------------------------------------------------------------------------------------------------------

    def _offer(self, amount: Amount = LITTLE, ttl_ms: int = 60_000, holder: str = f"scheduler/{NAME}") -> GrantSpec:
        return GrantSpec(
            holder=holder, amount=amount, parent=f"tenant/{NAME}", tenant=NAME, purpose="offer", ttl=Duration(ttl_ms)
        )

    async def _lend(self, spec: GrantSpec) -> str:
        name = f"{NAME}-{self.world.ids.nonce()[:10]}"
        await self.say(Role.BUDGETS, Issue(name, spec))
        return name

    async def short_grant(self) -> None:
        await self._lend(self._offer(Amount({"cpu": 1 << 40})))
        await self.bind("plain", grant=await self._lend(self._offer()))

    async def expired_grant(self) -> None:
        name = await self._lend(self._offer(Amount({"cpu": 500}), ttl_ms=50))
        await self.world.clock.sleep_ms(500)
        await self.bind("plain", grant=name)

    async def void_letters(self) -> None:
        """Letters between others than the two who deal with each other."""
        spec = GrantSpec(holder=NOWHERE, issuer=NOWHERE, amount=LITTLE, ttl=Duration(1_000))
        await self.say(Role.BUDGETS, Accept(f"{NAME}-letter", spec, 1, 0, "a", "b"), Vouch(NOWHERE, 1, {}, "a", "b"))

    async def unreported(self) -> None:
        name = await self._lend(replace(self._offer(ttl_ms=50), holder=NOWHERE))
        await self.world.clock.sleep_ms(500)
        await self.say(Role.BUDGETS, Close(name))
        await self.say(Role.OPERATOR, DeclareLost(NOWHERE))

    async def limits(self) -> None:
        await self.too_many()
        region = Region(metadata=Metadata(name=f"{NAME}-none"))
        await self.say(Role.OPERATOR, Apply(region, expect=1))


async def _publish(upper: Seat, claim: AnyClaim) -> None:
    try:
        await upper.client(Actor(NAME, Role.OPERATOR)).ask(claim)
    except NoAnswer as error:
        for operation in error.operation_ids:
            upper.ear.gave_up(upper.process.name, upper.scope, operation)


def _misplaced(workload: str) -> Callable[[Meddler], Awaitable[None]]:
    return lambda meddler: meddler.misplaced(workload)


MISCHIEF: Final[Mapping[Code, Callable[[Meddler], Awaitable[None]]]] = {
    Code.INVALID: Meddler.nonsense,
    Code.RESERVED: Meddler.unsayable,
    Code.TENANT: Meddler.foreign,
    Code.ROLE: Meddler.wrong_role,
    Code.NOT_OWNER: Meddler.not_mine,
    Code.STALE_EPOCH: Meddler.old_epoch,
    Code.LEASE_EXPIRED: Meddler.lapsed_lease,
    Code.LEASE_HELD: Meddler.taken_lease,
    Code.STALE_EVIDENCE: Meddler.stale,
    Code.OPERATION_EXPIRED: Meddler.old_id,
    Code.OPERATION_MISMATCH: Meddler.twice_used_id,
    Code.ABANDONED: Meddler.abandoned,
    Code.NOT_FOUND: Meddler.missing,
    Code.EXISTS: Meddler.there_already,
    Code.REVISION: Meddler.old_revision,
    Code.PHASE: Meddler.wrong_phase,
    Code.ATTEMPT: Meddler.wrong_attempt,
    Code.IN_USE: Meddler.in_use,
    Code.DELETING: Meddler.going,
    Code.WAIT: Meddler.too_early,
    Code.FENCE: Meddler.fenced,
    Code.NODE_UNREADY: Meddler.unready,
    Code.DRAINING: Meddler.shut,
    Code.NO_ROOM: _misplaced("huge"),
    Code.DEVICE_TAKEN: Meddler.device_taken,
    Code.DEVICE_MISMATCH: Meddler.wrong_device,
    Code.SELECTOR: _misplaced("choosy"),
    Code.TAINT: _misplaced("frail"),
    Code.PLACE: _misplaced("abroad"),
    Code.POLICY: Meddler.barred,
    Code.POLICY_LAPSED: Meddler.unlawful_policy,
    Code.SPREAD: _misplaced("skewed"),
    Code.AFFINITY: _misplaced("lonely"),
    Code.ANTI_AFFINITY: Meddler.shunned,
    Code.OVER_QUOTA: _misplaced("greedy"),
    Code.GRANT_SHORT: Meddler.short_grant,
    Code.GRANT_EXPIRED: Meddler.expired_grant,
    Code.GRANT_VOID: Meddler.void_letters,
    Code.AWAITING_REPORTS: Meddler.unreported,
    Code.GANG_SHORT: Meddler.short_gang,
    Code.VICTIMS: Meddler.wrong_victims,
    Code.LIMIT: Meddler.limits,
}
"""Which mischief aims at which code. Every code but `FAULT` has one."""
