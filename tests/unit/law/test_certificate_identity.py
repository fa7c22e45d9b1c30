"""Is a certificate's bearer who its names say, and nobody else?"""

from __future__ import annotations

import pytest

from remit.law.certificate_identity import NOBODY, SERVER, acts_for, agent_of, bearer_of


def test_names_go_there_and_back() -> None:
    for bearer in (SERVER, agent_of(["b", "a", "b"]), agent_of(["n-1.x"])):
        assert bearer_of(bearer.names) == bearer
    assert agent_of(["b", "a"]).nodes == ("a", "b")


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
    assert bearer_of(names) == NOBODY


def test_only_an_agent_acts_for_nodes_and_only_for_its_own() -> None:
    assert acts_for(agent_of(["a", "b"]), ["a"]) and acts_for(agent_of(["a", "b"]), ["b", "a"])
    assert not acts_for(agent_of(["a"]), ["a", "b"])
    assert not acts_for(SERVER, ["a"]) and not acts_for(SERVER, [])
    assert not acts_for(NOBODY, [])
