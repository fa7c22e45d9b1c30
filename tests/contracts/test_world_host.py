"""Contract of host, ports and probes: an inventory, free ports, and probe results."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contracts.worlds import HOSTS, HostTwin

SOON_MS = 10_000
HERE = "127.0.0.1"


@pytest.fixture(params=HOSTS, ids=lambda twin: twin.__name__)
def twin(request: pytest.FixtureRequest, tmp_path: Path) -> HostTwin:
    make: type[HostTwin] = request.param
    return make(tmp_path)


def test_inventory_has_name_and_capacity(twin: HostTwin) -> None:
    async def scenario() -> None:
        found = twin.host().inventory()
        assert found.hostname
        assert found.kernel
        assert found.boot == twin.clock().boot()
        assert found.cpu_milli > 0
        assert found.memory_bytes > 1 << 20
        assert twin.host().inventory() == found

    twin.run(scenario())


def test_found_ports_are_distinct_from_recent_ones(twin: HostTwin) -> None:
    async def scenario() -> None:
        ports = twin.ports()
        assert await ports.find_free(0) == []
        found = [port for count in (1, 3, 50, 50) for port in await ports.find_free(count)]
        assert len(set(found)) == 104
        assert all(1024 <= port < 65_536 for port in found)
        with pytest.raises(ValueError, match="-1"):
            await ports.find_free(-1)

    twin.run(scenario())


def test_probe_succeeds_while_work_listens(twin: HostTwin) -> None:
    async def scenario() -> None:
        runner, prober, clock = twin.runner(), twin.prober(), twin.clock()
        (port,) = await twin.ports().find_free(1)
        for result in (
            await prober.http(HERE, port, "/", timeout_ms=SOON_MS),
            await prober.tcp(HERE, port, timeout_ms=SOON_MS),
        ):
            assert not result.ok
            assert result.detail == f"port {port} cannot be reached (connection refused)"
        running = await runner.start(twin.http_program(port))
        async with clock.timeout_ms(SOON_MS):
            while not (await prober.tcp(HERE, port, timeout_ms=SOON_MS)).ok:
                await clock.sleep_ms(20)
        result = await prober.http(HERE, port, "/", timeout_ms=SOON_MS)
        assert result.ok, result
        assert "200" in result.detail
        await runner.stop(running, grace_ms=SOON_MS)
        assert not (await prober.http(HERE, port, "/", timeout_ms=SOON_MS)).ok

    twin.run(scenario())
