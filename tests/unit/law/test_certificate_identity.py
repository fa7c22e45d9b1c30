"""Is a certificate's bearer who its names say, and nobody else?"""

from __future__ import annotations

import pytest

from remit.law.certificate_identity import NO_IDENTITY, SERVER_IDENTITY, acts_for, agent_identity, identity_of


def test_names_go_there_and_back() -> None:
    for bearer in (SERVER_IDENTITY, agent_identity(["b", "a", "b"]), agent_identity(["n-1.x"])):
        assert identity_of(bearer.uris) == bearer
    assert agent_identity(["b", "a"]).nodes == ("a", "b")


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["remit://server", "remit://node/a"],
        ["remit://node/"],
        ["remit://node/a", "https://elsewhere"],
        ["remit://servers"],
        ["REMIT://server"],
        ["spiffe://remit/node/a"],
    ],
)
def test_a_mixture_or_a_stranger_is_nobody(names: list[str]) -> None:
    assert identity_of(names) == NO_IDENTITY


def test_only_an_agent_acts_for_nodes_and_only_for_its_own() -> None:
    assert acts_for(agent_identity(["a", "b"]), ["a"]) and acts_for(agent_identity(["a", "b"]), ["b", "a"])
    assert not acts_for(agent_identity(["a"]), ["a", "b"])
    assert not acts_for(SERVER_IDENTITY, ["a"]) and not acts_for(SERVER_IDENTITY, [])
    assert not acts_for(NO_IDENTITY, [])
