"""Connection limiter: every address gets connections, however many another holds."""

from __future__ import annotations

import pytest

from remit.world.net.connections import ALWAYS_ADMITTED, ConnectionLimiter, address_key


def open_all(limiter: ConnectionLimiter, address: str) -> int:
    """Open as many connections as are admitted."""
    count = 0
    while limiter.count < limiter.limit and limiter.admits(address):
        limiter.opened(address)
        count += 1
    return count


def test_each_further_address_gets_half_of_the_rest_or_a_minimum() -> None:
    limiter = ConnectionLimiter(2_000)
    held = [open_all(limiter, f"10.0.0.{number}") for number in range(12)]
    assert held[:6] == [1_000, 500, 250, 125, 63, ALWAYS_ADMITTED]
    assert sum(held) == 2_000
    for _ in range(1_000):
        limiter.closed("10.0.0.0")
    assert open_all(limiter, "10.9.9.9") > ALWAYS_ADMITTED, "closed connections are available to others"


def test_connections_being_accepted_count_too() -> None:
    established, accepting = ConnectionLimiter(100), ConnectionLimiter(100)
    for _ in range(40):
        established.opened("10.0.0.1")
    for _ in range(10):
        accepting.opened("10.0.0.1")
    assert not established.admits("10.0.0.1", accepting)
    assert established.admits("10.0.0.2", accepting)


@pytest.mark.parametrize(
    ("address", "key"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:2::9", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
        ("::1", "::"),
        ("", ""),
        ("no:address", "no:address"),
    ],
)
def test_ipv6_address_counts_by_network(address: str, key: str) -> None:
    assert address_key(address) == key
