"""Property: the sums of a scheduler's view equal the authority's books, after any commits, in any split into events.

The machine of authority_machine.py commits; a view follows it by single events, by folded events, and by lists with or
without earlier state. After every step it has the rows of the store and the sums of the books.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from remit.commitment.books import DecisionTime
from remit.commitment.draft import Draft
from remit.law.fit import RULES, mask, misfits, owned_anti_affinity
from remit.model.claims import Apply, Delete, Spawn
from remit.model.kinds import Policy, PolicyAllow, PolicyMatch, PolicyRule, PolicySpec, Workload
from remit.model.metadata import Metadata
from remit.observation.frozen_view import compare, recompute
from remit.observation.node_columns import translate_requirements
from remit.observation.scheduler_view import SchedulerView
from remit.simulate.checkers.reference.rows import of_kind, phase_of
from remit.store.memory import MemoryStore
from tests.properties.authority_world import OPERATOR, USER, FakeClock, Scope, workload
from tests.properties.commitment.authority_machine import SPREAD, AuthorityMachine
from tests.properties.commitment.faulty_scope_machine import NUMBER
from tests.properties.effort import tries
from tests.properties.observation.view_feed import events_after, folded, listed


def sums_of_view(view: SchedulerView) -> dict[str, Any]:
    columns = view.columns
    free = {(n, name): int(column[row]) for name, column in columns.free.items() for n, row in columns.rows.items()}
    for name, row in columns.rows.items():
        node = columns.nodes[row]
        assert node is not None
        capacity = {device.name: 1000 for device in node.spec.devices}
        for device in {**capacity, **columns.used[row]}:
            free[name, f"@{device}"] = capacity.get(device, 0) - columns.used[row].get(device, 0)
    ledgers = view.quota_ledgers.ledgers
    return {
        "free": {which: left for which, left in free.items() if left},
        "left": {(g, name): n for g, ledger in ledgers.items() for name, n in ledger.free.items() if n},
        "lent": {(g, name): n for g, ledger in ledgers.items() for name, n in ledger.granted_on.items() if n},
        "amount": {(g, name): n for g, ledger in ledgers.items() for name, n in ledger.amount.items() if n},
        "replicas": {key: view.replicas.at.revision[slot] for key, slot in view.replicas.slots.items()},
    }


def sums_of_books(books: Any) -> dict[str, Any]:
    grants = books.grants
    return {
        "free": {(n, name): left for n, ledger in books.nodes.items() for name, left in ledger.free.items() if left},
        "left": {(g, name): n for g, ledger in grants.items() for name, n in ledger.free.items() if n},
        "lent": {(g, name): n for g, ledger in grants.items() for name, n in ledger.granted_on.items() if n},
        "amount": {(g, name): n for g, ledger in grants.items() for name, n in ledger.amount.items() if n},
        "replicas": {name: revision for name, (revision, _) in books.replicas.items()},
    }


def equal_workloads() -> list[Workload]:
    """Equal except for names and labels, which matter to an anti-affinity, a term, or a policy rule."""
    return [
        workload("twin", "100m"),
        workload("shy", "100m", labels={"app": "apart"}),
        workload("odd", "100m", labels={"app": "odd"}),
        workload("loud", "3", 3, priority="high", labels={"app": "apart"}),
        workload("quiet", "3", 3, priority="high"),
        workload("wide", "500m", placement=SPREAD, labels={"app": "odd"}),
    ]


LABELLED = PolicySpec(rules=(PolicyRule(match=PolicyMatch(labels={"app": "odd"}), allow=PolicyAllow(zones=("b",))),))


class ViewMachine(AuthorityMachine):
    """The form of the next events is drawn; then the view must equal a fresh list."""

    always = frozenset({0, 2, 6, 10})

    def __init__(self) -> None:
        super().__init__()
        self.way = "events"
        self.clock = FakeClock()
        self.view = SchedulerView(self.clock)
        self.store: MemoryStore | None = None

    @rule(way=st.sampled_from(["events", "folded", "listed", "later"]))
    def choose_event_form(self, way: str) -> None:
        self.way = way

    @rule(n=NUMBER)
    def declare_equal_workloads(self, n: int) -> None:
        for work in equal_workloads()[n % 6 :][:3]:
            self.ask(USER, Apply(work))
            self.ask(self.r.actors["workloads"], Spawn("t1", work.metadata.name, 1, 0, 2))

    @rule(n=NUMBER)
    def publish_label_rule(self, n: int) -> None:
        self.ask(
            OPERATOR, Apply(Policy(metadata=Metadata(name="labels"), spec=LABELLED)) if n % 3 else Delete("Policy", "labels")
        )

    @rule(n=NUMBER)
    def stop_victims(self, n: int) -> None:
        """One after another, while their reservation waits; some are requeued and bound again meanwhile."""
        for key in self.replicas("reserved"):
            for victim in list(self.r.row(key).get("status", {}).get("victims", {}))[: n % 3 + 1]:
                on = {"draining": "stop", "stopping": "stopped", "released": "requeue" if n % 2 else "forget"}
                if victim in self.r.checker.rows and (phase := str(phase_of(self.r.row(victim)))) in on:
                    self.move(victim, on[phase])

    @rule(n=NUMBER)
    def remove_workload(self, n: int) -> None:
        """A workload is deleted with all its replicas, so that its name can be reused."""
        works = sorted(key for key, _ in of_kind(self.r.checker.rows, "workload"))
        if works:
            _, owner, name = works[n % len(works)].split("/")
            self.ask(OPERATOR, Delete("Workload", name, owner))
            for key in self.replicas("pending", "reserved", "released"):
                if key.startswith(f"replica/{owner}/{name}-"):
                    self.move(key, "forget" if phase_of(self.r.row(key)) == "released" else "cancel")
            for key in self.replicas("released"):
                if key.startswith(f"replica/{owner}/{name}-"):
                    self.move(key, "forget")
            self.ask(self.r.actors["workloads"], Delete("Workload", name, owner))

    @rule(n=NUMBER, m=NUMBER)
    def assume(self, n: int, m: int) -> None:
        view = self.view
        waiting = [slot for slot in view.replicas.pending() if slot not in view.assumed]
        if not waiting or not view.columns.rows or view.head is None:
            return
        slot, row = waiting[n % len(waiting)], list(view.columns.rows.values())[m % len(view.columns.rows)]
        node = view.columns.nodes[row]
        assert node is not None
        names = [device.name for device in node.spec.devices]
        devices = {names[0]: 400} if names and view.requirements_of(slot).device_shares else {}
        view.holds.assume(slot, row, devices, view.requirements_of(slot).quota)
        assert slot in view.assumed

    @rule(n=NUMBER)
    def forget_assumption(self, n: int) -> None:
        if self.view.assumed:
            slot = list(self.view.assumed)[n % len(self.view.assumed)]
            assert self.view.holds.forget(slot)
            assert not self.view.holds.forget(slot)

    @rule(ms=st.sampled_from([1_000, 20_000, 30_000]))
    def expire_assumptions(self, ms: int) -> None:
        self.clock.at_ms += ms
        old = self.view.holds.expire_assumed(self.clock.at_ms)
        assert all(self.clock.at_ms - one.at_ms < 30_000 for one in self.view.assumed.values())
        assert all(slot in self.view.changes.take().pending for slot in old[:1])

    @invariant()
    def view_equals_fresh_list(self) -> None:
        if hasattr(self, "r"):
            self.do(self._compare())

    async def _compare(self) -> None:
        store, view = self.r.store.inner, self.view
        if store is not self.store:
            # The first or another incarnation: no earlier state is trusted.
            self.store = store
            await listed(view, store)
        elif self.way == "listed":
            await listed(view, store)
        elif self.way != "later":
            events = await events_after(store, view.revision)
            for event in [folded(events)] if self.way == "folded" and events else events:
                view.apply(event)
        if self.way == "later":
            return
        assert not list(recompute(view)), "\n".join(recompute(view))
        fresh = SchedulerView(self.clock)
        await listed(fresh, store)
        assert not list(recompute(fresh)), "\n".join(recompute(fresh))
        found = list(compare(view, fresh))
        assert not found, "\n".join(found)
        self._fits_as_the_books_say(self.r, fresh)
        if not view.assumed:
            self._fits_as_the_books_say(self.r, view)

    def _fits_as_the_books_say(self, scope: Scope, view: SchedulerView) -> None:
        """Equal sums and counts, and so equal answers about every node."""
        books = scope.lead.authority.books
        if not scope.lead.alive or max((r for r, _ in books.replicas.values()), default=0) > view.revision:
            return
        mine, theirs = sums_of_view(view), sums_of_books(books)
        if mine["replicas"] != theirs["replicas"]:
            return  # an answer was lost, so the books lack the commit
        assert mine == theirs
        draft = Draft(books, DecisionTime(0, "", {}, 0, 0, ""))
        for slot in view.replicas.pending():
            generation = view.shapes.info(view.replicas.at.generation[slot])
            ask = books.requirements.of((generation.tenant, generation.workload, generation.number))
            assert ask is not None
            assert (ask.placeable, ask.gang) == (generation.open, generation.gang)
            for index in (
                *(term.peers for term in (*ask.spread, *ask.affinity, *ask.anti_affinity)),
                *owned_anti_affinity(ask),
            ):
                assert view.peers.total(index) == draft.peers.total(index)
            fits = mask(translate_requirements(view.requirements_of(slot), view.columns), view.columns, view.peers, RULES)
            for name, row in view.columns.rows.items():
                whose = misfits(ask, books.nodes[name], draft.peers)
                assert bool(fits[row]) == (not whose), f"{view.replicas.keys[slot]} on {name}: {whose}"


def test_view_keeps_sums_of_books() -> None:
    """S23 F03 F06 F07 F10 F21."""
    run_state_machine_as_test(ViewMachine, settings=tries(25, 40, stateful_step_count=30))
