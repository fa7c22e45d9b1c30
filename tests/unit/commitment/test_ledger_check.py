"""Ledger checks: each finds its inconsistency, and none fires on consistent books."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from remit.commitment import ledger_check
from remit.model.claims import Issue
from remit.model.objects import encode
from remit.model.records import Phase, Replica
from remit.model.resources import WHOLE_DEVICE
from tests.properties.authority_world import HOUR, amounts, node, populated_scope, run
from tests.unit.commitment.authority_fixture import T1, bind, slice_of, spawn_replicas

KEY, OTHER = "replica/t1/w-0", "replica/t1/w-1"


def rewrite_status(books: Any, key: str, **status: Any) -> None:
    replica: Replica = books.replica(key)[0]
    changed = replace(replica, status=replace(replica.status, **status))
    books.replicas[key] = (books.replicas[key][0], encode(changed))


def device_with_two_owners(books: Any) -> None:
    for key in (KEY, OTHER):
        rewrite_status(books, key, devices={"gpu-0": WHOLE_DEVICE})


def unowned_usage_on_node(books: Any) -> None:
    books.nodes["n1"].free["cpu"] -= 1


def capacity_freed_twice(books: Any) -> None:
    books.nodes["n1"].free["@gpu-0"] += 1


def bound_without_grants(books: Any) -> None:
    rewrite_status(books, KEY, grants=())


def bound_to_missing_node(books: Any) -> None:
    rewrite_status(books, KEY, node="none")


def pending_but_charged(books: Any) -> None:
    rewrite_status(books, KEY, phase=Phase.PENDING)


def forgotten_draw(books: Any) -> None:
    books.grants[T1].free["cpu"] += 1


def grant_issued_twice(books: Any) -> None:
    books.grants[T1].grant_on(amounts(cpu=1).pairs, 1)


def grant_over_declared_amount(books: Any) -> None:
    books.grants[T1].resize(dict(amounts(cpu=99).pairs))


def quota_issued_from_offer(books: Any) -> None:
    grant, revision = books.objects["grant/s"]
    books.objects["grant/s"] = (replace(grant, spec=replace(grant.spec, parent="o")), revision)


INCONSISTENCIES = [
    ("one-owner-per-device", device_with_two_owners),
    ("node-ledgers-balance", unowned_usage_on_node),
    ("node-ledgers-balance", capacity_freed_twice),
    ("one-binding", bound_without_grants),
    ("one-binding", bound_to_missing_node),
    ("one-binding", pending_but_charged),
    ("grants-cover", forgotten_draw),
    ("grants-cover", grant_issued_twice),
    ("quota-covers", grant_over_declared_amount),
    ("quota-covers", quota_issued_from_offer),
]


@pytest.mark.parametrize(("check", "corrupt"), INCONSISTENCIES, ids=[corrupt.__name__ for _, corrupt in INCONSISTENCIES])
def test_inconsistent_books_are_detected(check: str, corrupt: Any) -> None:
    async def run_test() -> None:
        scope = await populated_scope(nodes=[node("n1", gpus=1)])
        offer = replace(slice_of("2", "scheduler", HOUR, ""), purpose="offer")
        await scope.must(scope.actors["budgets"], Issue("s", slice_of("2", "scheduler")), Issue("o", offer))
        for key in await spawn_replicas(scope, "w", 2):
            await bind(scope, key)
        assert [found for check_books in ledger_check.CHECKS.values() for found in check_books(scope.books)] == []
        corrupt(scope.books)
        assert list(ledger_check.CHECKS[check](scope.books))
        await scope.close()

    run(run_test())
