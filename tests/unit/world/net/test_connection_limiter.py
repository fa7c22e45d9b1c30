"""Does every address find a place, however many connections another has?"""

from __future__ import annotations

import pytest

from remit.world.net.connections import ALWAYS_ADMITTED, ConnectionLimiter, address_key


def taken(crowd: ConnectionLimiter, address: str) -> int:
    """As many as it gets."""
    count = 0
    while crowd.count < crowd.limit and crowd.admits(address):
        crowd.opened(address)
        count += 1
    return count


def test_one_address_has_half__the_next_half_of_the_rest__and_the_sixth_still_a_few() -> None:
    crowd = ConnectionLimiter(2_000)
    held = [taken(crowd, f"10.0.0.{number}") for number in range(12)]
    assert held[:6] == [1_000, 500, 250, 125, 63, ALWAYS_ADMITTED]
    assert sum(held) == 2_000
    for _ in range(1_000):
        crowd.closed("10.0.0.0")
    assert taken(crowd, "10.9.9.9") > ALWAYS_ADMITTED, "what one gives back another may have"


def test_those_who_come_in_just_now_count_too() -> None:
    inside, coming = ConnectionLimiter(100), ConnectionLimiter(100)
    for _ in range(40):
        inside.opened("10.0.0.1")
    for _ in range(10):
        coming.opened("10.0.0.1")
    assert not inside.admits("10.0.0.1", coming)
    assert inside.admits("10.0.0.2", coming)


@pytest.mark.parametrize(
    ("address", "whose"),
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
def test_an_address_of_ipv6_counts_with_its_network(address: str, whose: str) -> None:
    assert address_key(address) == whose
