"""A store survives SIGKILL at any moment. The short form; `make soak` runs hundreds of kills."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from remit.store.protocol import Commit
from remit.store.sqlite.store import SqliteStore
from tests.contracts.stores import OneThread
from tests.integration.store.kill_writer_main import Acknowledged, Parent, kill_loop, rows_of

KILLS = 25


def test_nothing_acknowledged_is_lost_over_many_kills(tmp_path: Path) -> None:
    """F13, F20."""
    report = kill_loop(KILLS, seed=1, directory=tmp_path)
    assert report.violations == []
    assert report.kills == KILLS
    assert report.commits_acknowledged > KILLS


@pytest.mark.smoke
def test_checker_notices_planted_losses(tmp_path: Path) -> None:
    """The checker itself, with planted losses: a missing commit, half of one, and a head that went back."""
    acknowledged = Acknowledged({0: (1, 7)}, 5, 1, [])
    problems = "\n".join(asyncio.run(Parent(tmp_path).check(acknowledged)))
    assert "1 was acknowledged, 0 is there" in problems
    assert "head 5 was acknowledged" in problems

    async def plant() -> None:
        thread = OneThread()
        store = await SqliteStore.open(tmp_path, offload=thread, holder="planter", incarnation="planted")
        await store.commit(Commit(puts=(*rows_of(2, 1)[1:], ("w2/last", b"1"))))
        await store.close()
        thread.close()

    asyncio.run(plant())
    assert "half a transaction" in "\n".join(asyncio.run(Parent(tmp_path).check(Acknowledged({}, 0, 0, []))))
