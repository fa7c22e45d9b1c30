"""State machine over scopes whose store fails and whose authority is replaced, with retries. A subclass adds the claims."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any
from unittest import mock

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from remit.client.endpoint import EndpointError, NotLeader, OutcomeUnknown
from remit.commitment.authority import LeadershipLost
from remit.commitment.outcomes import BATCH_PREFIX, batch_key, decode_batch
from remit.commitment.recovery import read_rows
from remit.commitment.standby import Standby
from remit.model.claims import (
    Abandon,
    Acquire,
    Actor,
    AnyClaim,
    Apply,
    Code,
    Delete,
    Evidence,
    Operation,
    OperationID,
    Refused,
    Reserve,
    Verdict,
)
from remit.simulate.checkers.reference.ledger_sums import ledger_limits, node_limits, total_sums
from remit.simulate.checkers.reference.lifecycle import ON_NODE
from remit.simulate.checkers.reference.rows import phase_of
from remit.store.memory import MemoryBackup
from remit.store.protocol import StoreError
from tests.properties.authority_world import HOUR, USER, CountedIds, Crash, Scope, workload
from tests.properties.commitment.books_check import stale
from tests.properties.commitment.coverage_counts import Tallies

REACHED = Tallies("authority")
"""Counts of all state machines of the authority together."""

FAULTS = [
    ["landed"], ["lost"], ["late"], ["later"], ["afloat"], ["afloat", "lost"], ["unavailable"], ["before"], ["after"], ["slow"],
    ["lost", "landed"], ["lost", "lost", "later"], ["landed", "unavailable"], ["late", "lost"], ["later", "after"],
]  # fmt: skip

NUMBER = st.integers(0, 63)


class FaultyScopeMachine(RuleBasedStateMachine):
    """Shared by the machines of one scope and of two: event loop, claims, faults, retries, takeovers."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.batches = mock.patch.object(Scope, "batch_max", 4)  # so that batches overlap
        self.batches.start()
        self.r: Scope
        self.silent: list[Operation] = []
        self.batch: list[Operation] | None = None
        self.backup: tuple[MemoryBackup, int, set[str]] | None = None

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        try:
            if hasattr(self, "r"):
                for scope in self.scopes():
                    self.do(scope.close())
                judge = self.r.judged.judge
                REACHED.add(judge)
                for code in judge.codes_seen:
                    event(f"code {code}")
        finally:
            self.batches.stop()
            self.loop.close()
        super().teardown()

    def scopes(self) -> list[Scope]:
        return [self.r]

    # -- operations --------------------------------------------------------------------------------------------------

    async def ensure_leader(self, scope: Scope) -> None:
        if not scope.lead.alive:
            await self.succeed(scope)

    async def succeed(self, scope: Scope) -> None:
        """Take over; after any failure the next attempt must succeed eventually."""
        for _ in range(8):
            try:
                await scope.take_over()
                return
            except (Crash, StoreError, OutcomeUnknown, LeadershipLost) as died:
                event(f"takeover ended by {type(died).__name__}")
            finally:
                scope.store.reads.clear()
        raise AssertionError("no takeover succeeded")

    def ask(self, actor: Actor, *claims: AnyClaim, evidence: Evidence = Evidence(), scope: Scope | None = None) -> None:
        self.do(self._ask(scope or self.r, actor, claims, evidence))

    async def _ask(self, scope: Scope, actor: Actor, claims: tuple[AnyClaim, ...], evidence: Evidence) -> None:
        await self.ensure_leader(scope)
        operations = [await scope.operation(actor, claim, evidence) for claim in claims]
        if self.batch is not None and scope is self.r:
            self.batch += operations
            return
        await self.send(scope, operations)

    async def send(self, scope: Scope, operations: list[Operation]) -> list[Verdict] | EndpointError:
        answer = await scope.send(operations)
        if isinstance(answer, OutcomeUnknown):
            self.silent += operations
        if isinstance(answer, EndpointError):
            REACHED.count(type(answer).__name__)
        else:
            for operation, verdict in zip(operations, answer, strict=True):
                code = verdict.code.value if isinstance(verdict, Refused) else "accepted"
                if isinstance(operation.claim, Reserve) and operation.claim.victims:
                    REACHED.count(f"Reserve with victims:{code}")
                REACHED.count(f"{type(operation.claim).__name__}:{code}")
        return answer

    # -- faults ------------------------------------------------------------------------------------------------------

    @rule(words=st.sampled_from(FAULTS))
    def inject_store_faults(self, words: list[str]) -> None:
        """F01 F12 F15: a lost answer with or without its write, a late write, a slow or absent store, a crash."""
        self.r.store.plan.extend(words)

    @rule()
    def land_lost_writes(self) -> None:
        self.do(self.r.store.land())

    reboots = False

    @rule(read=st.sampled_from(["unavailable", "ok", "before"]), reboot=st.booleans())
    def take_over(self, read: str, reboot: bool) -> None:
        """F15 F16 F17: the old authority keeps running without notice. The new one may crash on its way, and another follows.

        It may run on another boot, whose times cannot be compared with those of the last.
        """
        if reboot and self.reboots:
            self.r.clock.on = f"boot-{self.r.takeovers}"
        self.r.store.reads.extend(["ok", read])
        self.do(self.succeed(self.r))
        for forgotten in self.r.deposed[:-2]:
            self.do(forgotten.stop())
        del self.r.deposed[:-2]

    @rule(where=st.sampled_from(["gate", "gated"]), n=NUMBER)
    def take_over_during_commit(self, where: str, n: int) -> None:
        self.do(self._in_the_middle(where, Delete("Secret", f"s{n}", "t1")))

    async def _in_the_middle(self, where: str, claim: AnyClaim) -> None:
        scope = self.r
        await self.ensure_leader(scope)
        scope.store.plan.clear()
        operation = await scope.operation(USER, claim)
        scope.store.plan.append(where)
        old = scope.lead
        asking = asyncio.get_running_loop().create_task(old.ask([operation]))
        await scope.store.at_gate.wait()
        await scope.take_over()
        scope.store.gate.set()
        answer = await asking
        scope.store.gate, scope.store.at_gate = asyncio.Event(), asyncio.Event()
        if where == "gate":
            assert isinstance(answer, EndpointError), f"a deposed authority answered {answer}"
        elif not isinstance(answer, EndpointError):
            scope.hear(operation, answer[0])
        again = await self.send(scope, [operation])
        assert not isinstance(again, EndpointError)

    @rule(n=NUMBER)
    def call_deposed_authority(self, n: int) -> None:
        """F15: it neither accepts nor refuses nor renews."""
        if self.r.deposed:
            self.do(self._ask_deposed(n))

    async def _ask_deposed(self, n: int) -> None:
        old = self.r.deposed[n % len(self.r.deposed)]
        plan, self.r.store.plan = list(self.r.store.plan), type(self.r.store.plan)()
        operation = await self.r.operation(USER, Delete("Secret", "none", "t1"))
        before = await self.r.store.inner.revision()
        answer = await old.ask([operation])
        assert isinstance(answer, EndpointError), f"a deposed authority answered {answer}"
        try:
            held = await old.authority.renew(self.r.actors["scheduler"])
        except (NotLeader, OutcomeUnknown):
            held = False
        assert not held, "a deposed authority renewed a lease"
        assert await self.r.store.inner.revision() == before
        self.r.store.plan.extend(plan)

    # -- retries -----------------------------------------------------------------------------------------------------

    @rule(n=NUMBER)
    def repeat_operation(self, n: int) -> None:
        """F01 F37: the same id gets the same verdict from any authority, and nothing changes."""
        scope = self.r
        known = [operation for i, operation in scope.operations.items() if i in scope.answers]
        if known:
            self.do(self._again(scope, known[n % len(known)], through_standby=n % 3 == 0))

    async def _again(self, scope: Scope, operation: Operation, *, through_standby: bool) -> None:
        await self.ensure_leader(scope)
        scope.store.plan.clear()
        first, before = scope.answers[operation.id], await scope.dump()
        if through_standby:
            leader = scope.lead.authority
            peers = {leader.head.holder: leader}
            standby = Standby(scope.store, scope="r1", name="s", clock=scope.clock, ids=CountedIds("s"), peers=peers)
            answers: Any = list(await standby.submit([operation]))
        else:
            answers = await scope.send([operation])
        assert not isinstance(answers, EndpointError)
        horizon = scope.lead.authority.outcomes.horizon
        expired = isinstance(answers[0], Refused) and answers[0].code is Code.OPERATION_EXPIRED
        if expired:
            assert int(operation.id.split(".")[1]) < horizon, f"{operation.id} expired before the horizon {horizon}"
        else:
            assert answers[0] == first, f"{operation} was {first}, and then {answers[0]}"
        assert await scope.dump() == before, "a retry changed something"

    @rule(n=NUMBER)
    def resume_unanswered_operation(self, n: int) -> None:
        if self.silent:
            self.do(self._resume(self.silent.pop(n % len(self.silent))))

    async def _resume(self, operation: Operation) -> None:
        await self.ensure_leader(self.r)
        await self.send(self.r, [operation])

    @rule(n=NUMBER)
    def abandon_operation(self, n: int) -> None:
        """The outcome so far is returned; if there is none, the operation is never applied."""
        pool = self.silent or list(self.r.operations.values())
        if pool:
            self.do(self._abandon(pool[n % len(pool)]))

    async def _abandon(self, operation: Operation) -> None:
        scope = self.r
        await self.ensure_leader(scope)
        scope.store.plan.clear()
        known = scope.checker.outcomes.get(operation.id)
        made = await scope.operation(USER, Abandon(operation.id))
        answers = await self.send(scope, [made])
        assert not isinstance(answers, EndpointError)
        answer = answers[0]
        code = answer.code.value if isinstance(answer, Refused) else ""
        if code == "operation_expired":
            return
        if known is not None and known[2] != "operation_mismatch":
            assert (code, getattr(answer, "number", 0)) == (known[2], known[1] if not known[2] else 0), (answer, known)
        else:
            assert code == "abandoned", answer
            late = await scope.send([operation])
            assert isinstance(late, list) and isinstance(late[0], Refused), late

    @rule(n=NUMBER)
    def reuse_operation_id(self, n: int) -> None:
        known = list(self.r.answers)
        if known:
            self.do(self._misuse(known[n % len(known)]))

    async def _misuse(self, used: str) -> None:
        await self.ensure_leader(self.r)
        self.r.store.plan.clear()
        before = await self.r.dump()
        answers = await self.r.send([Operation(OperationID(used), USER, Delete("Secret", "misuse", "t1"))])
        assert isinstance(answers, list) and isinstance(answers[0], Refused), answers
        assert answers[0].code in (Code.OPERATION_MISMATCH, Code.OPERATION_EXPIRED, Code.ABANDONED), answers
        assert await self.r.dump() == before

    @rule(window=st.integers(0, 3), ahead=st.booleans())
    def use_id_of_other_window(self, window: int, ahead: bool) -> None:
        self.do(self._out_of_window(window, ahead))

    async def _out_of_window(self, window: int, ahead: bool) -> None:
        await self.ensure_leader(self.r)
        self.r.store.plan.clear()
        status = await self.r.lead.authority.status()
        horizon = self.r.lead.authority.outcomes.horizon
        id_window = status.window + 1 + window if ahead else horizon - 1 - window
        if id_window < 0:
            return
        made = Operation(OperationID(f"{status.incarnation}.{id_window}.x{id_window}"), USER, Apply(workload("never")))
        answers = await self.r.send([made])
        assert isinstance(answers, list) and isinstance(answers[0], Refused), answers
        assert answers[0].code is Code.OPERATION_EXPIRED
        assert "workload/t1/never" not in self.r.checker.rows

    # -- time --------------------------------------------------------------------------------------------------------

    @rule(ms=st.sampled_from([1, 1_000, 16_000, 31_000, 61_000, 61_000, 310_000, 700_000, 3_700_000]), silent=NUMBER)
    def advance_time(self, ms: int, silent: int) -> None:
        """Usually all leases are renewed meanwhile."""
        for _ in range(4):
            self.r.clock.at_ms += ms // 4
            if silent % 4:
                self.do(self._renew(silent))

    @rule(n=NUMBER)
    def renew_leases(self, n: int) -> None:
        """All but one; an expired one is acquired again."""
        self.do(self._renew(n))

    async def _renew(self, n: int) -> None:
        for index, actor in enumerate(list(self.r.actors.values())):
            await self.ensure_leader(self.r)
            if index != n and not await self.r.lead.authority.renew(actor):
                await self._ask(self.r, Actor(actor.name, actor.role), (Acquire(actor.lease, HOUR),), Evidence())

    # -- restores ----------------------------------------------------------------------------------------------------

    @rule()
    def take_backup(self) -> None:
        self.backup = self.do(self._backup())

    async def _backup(self) -> tuple[MemoryBackup, int, set[str]]:
        # The backup contains all commits so far, also those whose answer was lost and is requested again later.
        return await self.r.store.inner.backup(), self.r.row("head")["sequence"], set(self.r.checker.outcomes)

    @precondition(lambda self: self.backup is not None)
    @rule()
    def restore_backup(self) -> None:
        """F10: a new incarnation; commits after the backup are listed; no replica is believed to run."""
        self.batch = None
        self.do(self._restore())
        self.backup = None

    async def _restore(self) -> None:
        assert self.backup is not None
        snapshot, sequence, known = self.backup
        old, lost = self.r.store.inner, set(self.r.answers) - known
        ran = [row.key for row in snapshot.rows if row.key.startswith("replica/")]
        revision = await old.revision()
        batches = read_rows(old, BATCH_PREFIX, lambda: revision, after=batch_key(sequence))
        listed = {entry.id async for row in batches for entry in decode_batch(row.value).entries}
        assert lost <= listed, f"acknowledged after the backup, and not listed: {lost - listed}"
        await self.r.restore(snapshot)
        await self.r.take_over()
        for key in ran:
            phase = phase_of(self.r.row(key))
            assert phase not in ON_NODE, f"{key} is believed to be {phase} after a restore"
        self.silent = [operation for operation in self.silent if operation.id in self.r.answers]
        REACHED.count("restore")

    # -- invariants ----------------------------------------------------------------------------------------------------

    @invariant()
    def no_violation_was_found(self) -> None:
        for scope in self.scopes() if hasattr(self, "r") else ():
            for running in [*scope.deposed, scope.lead]:
                running.check()

    @invariant()
    def books_equal_sums_of_rows(self) -> None:
        """S23: the authority's ledgers equal the checker's sums."""
        for scope in self.scopes() if hasattr(self, "r") else ():
            if scope.lead.alive:
                assert books(scope.lead.authority.books) == summed(scope), "the books and the rows disagree"

    @invariant()
    def cached_answers_equal_fresh_ones(self) -> None:
        for scope in self.scopes() if hasattr(self, "r") else ():
            if scope.lead.alive:
                assert list(stale(scope.lead.authority.books)) == []


def books(kept: Any) -> dict[str, Any]:
    """The ledgers of an authority, without anything that depends on its clock."""
    return {
        "free": {(n, name): left for n, ledger in kept.nodes.items() for name, left in ledger.free.items() if left},
        "used": {(g, name): n for g, ledger in kept.grants.items() for name, n in ledger.used.items() if n},
        "lent": {(g, name): n for g, ledger in kept.grants.items() for name, n in ledger.granted_on.items() if n},
        "left": {(g, name): n for g, ledger in kept.grants.items() for name, n in ledger.amount.items() if n},
        "replicas": {name: revision for name, (revision, _) in kept.replicas.items()},
    }


def summed(scope: Scope) -> dict[str, Any]:
    """The same, computed from the rows."""
    rows = scope.checker.rows
    nodes, used, lent = total_sums(rows)
    capacity = {(n, name): count for n, counts in node_limits(rows).items() for name, count in counts.items()}
    free = {which: capacity.get(which, 0) - nodes.get(which, 0) for which in {**capacity, **nodes}}
    return {
        "free": {which: left for which, left in free.items() if left},
        "used": used,
        "lent": {which: n for which, n in lent.items() if n and which[0] in ledger_limits(rows)},
        "left": {(g, name): n for g, counts in ledger_limits(rows).items() for name, n in counts.items() if n},
        "replicas": {key: revision for key, (revision, _) in rows.items() if key.startswith("replica/")},
    }
