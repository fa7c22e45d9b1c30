"""Identities in certificates: URI names, and which nodes they may act for."""

from __future__ import annotations

import pytest

from remit.law.certificate_identity import NO_IDENTITY, SERVER_IDENTITY, acts_for, agent_identity, identity_of


def test_identity_uris_round_trip() -> None:
    for identity in (SERVER_IDENTITY, agent_identity(["b", "a", "b"]), agent_identity(["n-1.x"])):
        assert identity_of(identity.uris) == identity
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
def test_mixed_or_foreign_uris_give_no_identity(names: list[str]) -> None:
    assert identity_of(names) == NO_IDENTITY


def test_agent_acts_for_own_nodes_only() -> None:
    assert acts_for(agent_identity(["a", "b"]), ["a"]) and acts_for(agent_identity(["a", "b"]), ["b", "a"])
    assert not acts_for(agent_identity(["a"]), ["a", "b"])
    assert not acts_for(SERVER_IDENTITY, ["a"]) and not acts_for(SERVER_IDENTITY, [])
    assert not acts_for(NO_IDENTITY, [])
