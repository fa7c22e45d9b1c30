"""An observer's estimate of the authority's clock is never early, at any network delay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remit.client.authority_client import AuthorityClient, RetriesExhausted
from remit.client.endpoint import AuthorityStatus, Endpoint
from remit.law.overrides import active_overrides
from remit.law.timing import DRIFT_MAX_PERCENT
from remit.model.claims import Actor, Operation, Verdict
from remit.world.interfaces import World
from tests.unit.client.fake_authority import ACTOR, BIND, WINDOW_MS, FakeAuthority, ForwardingEndpoint, bench
from tests.unit.law.override_fixture import override
from tests.unit.world.virtual_world import VirtualClock, run_virtually, virtual_world


@dataclass
class FarAuthority(FakeAuthority):
    """An authority whose clock has an offset and another rate."""

    thousandths: int = 1000

    def now_ms(self) -> int:
        return self.world.clock.now_ms() * self.thousandths // 1000 + self.ahead_ms


@dataclass
class SlowLink(ForwardingEndpoint):
    target: Endpoint
    world: World
    there_ms: int
    back_ms: int

    async def submit(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
        return await self.target.submit(operations)

    async def renew(self, actor: Actor, /) -> bool:
        return await self.target.renew(actor)

    async def status(self) -> AuthorityStatus:
        await self.world.clock.sleep_ms(self.there_ms)
        status = await self.target.status()
        await self.world.clock.sleep_ms(self.back_ms)
        return status


def test_authority_clock_is_unknown_before_first_status() -> None:
    async def scene() -> None:
        b = bench()
        assert b.client.authority_clock() is None
        b.endpoints["a"].status_script = ["lose after"] * 99
        with pytest.raises(RetriesExhausted):
            await b.client.status(deadline_ms=500)
        assert b.client.authority_clock() is None
        b.endpoints["a"].status_script = []
        await b.client.submit(BIND)
        assert b.client.authority_clock() == ("far-boot", b.authority.now_ms()), "any call that reads the status sets it"

    run_virtually(scene())


def test_status_without_boot_id_yields_no_clock() -> None:
    """Authorities of earlier releases send no boot id."""

    async def scene() -> None:
        b = bench()
        b.authority.boot = ""
        await b.client.status()
        assert b.client.authority_clock() is None

    run_virtually(scene())


def test_clock_estimate_includes_request_delay_and_drift() -> None:
    async def scene() -> None:
        world = virtual_world()
        authority = FakeAuthority(world)
        client = AuthorityClient({"a": SlowLink(authority, world, 400, 100)}, ACTOR, world)
        await client.status()
        assert client.authority_clock() == ("far-boot", authority.now_ms() + 400 + 5), "5: possible drift in 500 ms"
        await world.clock.sleep_ms(10_000)
        assert client.authority_clock() == ("far-boot", authority.now_ms() + 400 + 105)

    run_virtually(scene())


def test_clock_estimate_is_not_early_after_machine_suspend() -> None:
    async def scene() -> None:
        b = bench()
        await b.client.status()
        assert isinstance(b.world.clock, VirtualClock)
        b.world.clock.suspend(3_600_000)
        estimate = b.client.authority_clock()
        assert estimate is not None and estimate[1] >= b.authority.now_ms()

    run_virtually(scene())


def test_new_authority_replaces_clock_estimate() -> None:
    async def scene() -> None:
        b = bench()
        await b.client.status()
        b.authority.boot, b.authority.ahead_ms = "other-boot", -5
        assert b.client.authority_clock() == ("far-boot", b.world.clock.now_ms() + 77_000_000), (
            "kept until another status arrives"
        )
        await b.world.clock.sleep_ms(WINDOW_MS)
        await b.client.submit(BIND)
        assert b.client.authority_clock() == ("other-boot", b.authority.now_ms())

    run_virtually(scene())


@given(
    st.integers(0, 2_000),
    st.integers(0, 900),
    st.lists(st.integers(0, 40_000), min_size=1, max_size=4),
    st.integers(1000 - 10 * DRIFT_MAX_PERCENT, 1000 + 10 * DRIFT_MAX_PERCENT),
    st.integers(1, 120_000),
)
def test_no_override_outlasts_its_deadline_for_remote_observer(
    there_ms: int, back_ms: int, waits_ms: list[int], thousandths: int, ttl_ms: int
) -> None:
    async def scene() -> None:
        world = virtual_world()
        authority = FarAuthority(world, thousandths=thousandths)
        client = AuthorityClient({"a": SlowLink(authority, world, there_ms, back_ms)}, ACTOR, world)
        deadline_ms = authority.now_ms() + ttl_ms
        one = override("o", "pause-expansion", tenants=["t"], until_ms=deadline_ms, boot="far-boot")
        await client.status()
        for wait_ms in waits_ms:
            await world.clock.sleep_ms(wait_ms)
            estimate = client.authority_clock()
            assert estimate is not None and estimate[1] >= authority.now_ms()
            if authority.now_ms() >= deadline_ms:
                assert active_overrides([one], estimate).paused_by("t", "w") == ""
            # Nor far ahead: at most by the request delay and the drift of both clocks since.
            passed_ms = there_ms + back_ms + sum(waits_ms)
            assert estimate[1] - authority.now_ms() <= there_ms + passed_ms * 2 * DRIFT_MAX_PERCENT // 100 + 3

    run_virtually(scene())
