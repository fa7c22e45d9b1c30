"""Are books that do not balance found out? Each check, on books in which somebody has meddled; and on none that are sound."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from remit.commitment import ledger_check
from remit.model.claims import Issue
from remit.model.objects import encode
from remit.model.records import Phase, Replica
from remit.model.resources import WHOLE_DEVICE
from tests.properties.authority_world import HOUR, amounts, furnished, node, run
from tests.unit.commitment.authority_fixture import T1, bind, slice_of, spawned

KEY, OTHER = "replica/t1/w-0", "replica/t1/w-1"


def rewritten(books: Any, key: str, **status: Any) -> None:
    replica: Replica = books.replica(key)[0]
    changed = replace(replica, status=replace(replica.status, **status))
    books.replicas[key] = (books.replicas[key][0], encode(changed))


def two_owners(books: Any) -> None:
    for key in (KEY, OTHER):
        rewritten(books, key, devices={"gpu-0": WHOLE_DEVICE})


def room_that_nobody_took(books: Any) -> None:
    books.nodes["n1"].free["cpu"] -= 1


def room_that_was_given_back_twice(books: Any) -> None:
    books.nodes["n1"].free["@gpu-0"] += 1


def held_and_charged_to_nothing(books: Any) -> None:
    rewritten(books, KEY, grants=())


def on_a_node_that_is_gone(books: Any) -> None:
    rewritten(books, KEY, node="none")


def pending_and_charged(books: Any) -> None:
    rewritten(books, KEY, phase=Phase.PENDING)


def a_draw_that_was_forgotten(books: Any) -> None:
    books.grants[T1].free["cpu"] += 1


def lent_once_too_often(books: Any) -> None:
    books.grants[T1].grant_on(amounts(cpu=1).pairs, 1)


def more_than_was_declared(books: Any) -> None:
    books.grants[T1].resize(dict(amounts(cpu=99).pairs))


def quota_out_of_an_offer(books: Any) -> None:
    grant, revision = books.objects["grant/s"]
    books.objects["grant/s"] = (replace(grant, spec=replace(grant.spec, parent="o")), revision)


MEDDLED = [
    ("one-owner-per-device", two_owners),
    ("node-ledgers-balance", room_that_nobody_took),
    ("node-ledgers-balance", room_that_was_given_back_twice),
    ("one-binding", held_and_charged_to_nothing),
    ("one-binding", on_a_node_that_is_gone),
    ("one-binding", pending_and_charged),
    ("grants-cover", a_draw_that_was_forgotten),
    ("grants-cover", lent_once_too_often),
    ("quota-covers", more_than_was_declared),
    ("quota-covers", quota_out_of_an_offer),
]


@pytest.mark.parametrize(("check", "meddle"), MEDDLED, ids=[meddle.__name__ for _, meddle in MEDDLED])
def test_books_that_do_not_balance_are_found_out(check: str, meddle: Any) -> None:
    async def tell() -> None:
        scope = await furnished(nodes=[node("n1", gpus=1)])
        offer = replace(slice_of("2", "scheduler", HOUR, ""), purpose="offer")
        await scope.must(scope.actors["budgets"], Issue("s", slice_of("2", "scheduler")), Issue("o", offer))
        for key in await spawned(scope, "w", 2):
            await bind(scope, key)
        assert [told for one in ledger_check.CHECKS.values() for told in one(scope.books)] == []
        meddle(scope.books)
        assert list(ledger_check.CHECKS[check](scope.books))
        await scope.close()

    run(tell())
