"""Metrics of components without an API: served on loopback only."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request

import pytest

from remit.model.counters import BoundedCounter, Histogram
from remit.serve.metrics.exposition import MetricsRegistry, Sample, serve_metrics
from remit.world.interfaces import ListenFailed
from remit.world.net.connections import ListenAddress


def samples() -> list[Sample]:
    took = Histogram((1, 2))
    took.add(1.5)
    counts = BoundedCounter(("begun",))
    counts.add("begun", 3)
    return [Sample("remit_agent_starts_total", counts["begun"], ("begun",)), Sample("remit_agent_fetch_duration_seconds", took)]


def test_metrics_are_served_at_one_path_only() -> None:
    def fetch(url: str) -> None:
        body = urllib.request.urlopen(url, timeout=10).read().decode()
        assert 'remit_agent_starts_total{result="begun"} 3.0' in body
        assert 'remit_agent_fetch_duration_seconds_bucket{le="2.0"} 1.0' in body
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(url.replace("/metrics", "/v1/nodes"), timeout=10)
        assert refused.value.code == 404
        refused.value.close()

    async def main() -> None:
        async with serve_metrics(MetricsRegistry(samples), ListenAddress("127.0.0.1", 0)) as url:
            await asyncio.to_thread(fetch, url)

    asyncio.run(main())


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::"])
def test_listening_beyond_loopback_requires_token(host: str) -> None:
    async def main() -> None:
        async with serve_metrics(MetricsRegistry(samples), ListenAddress(host, 0)):
            pytest.fail("it must not listen")

    with pytest.raises(ListenFailed, match="token"):
        asyncio.run(main())


def test_unknown_or_mistyped_sample_raises() -> None:
    with pytest.raises(KeyError):
        MetricsRegistry(lambda: [Sample("remit_made_up", 1)]).render()
    with pytest.raises(TypeError):
        MetricsRegistry(lambda: [Sample("remit_agent_starts_total", Histogram((1,)), ("begun",))]).render()
