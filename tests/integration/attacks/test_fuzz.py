"""Mutated bodies and messages never fail the server or a decoder: a few hundred from fixed seeds; `make soak` sends 20,000.

Inputs that once failed stay here.
"""

from __future__ import annotations

import random

import pytest

from tests.integration.attacks.attack_server import AttackedServer
from tests.integration.attacks.fuzz_bodies import fuzz
from tests.integration.attacks.fuzz_decoders import DECODERS, failure_of, seeds
from tests.integration.attacks.mutations import mutated

pytestmark = pytest.mark.smoke

BODIES = 400
INPUTS = 150

FOUND = {
    "journal with unbounded nesting": b'{"copy":' * 50_000,
    "journal that is not UTF-8": b'{"copy":["\xff","b",1],"number":3}\n',
}
"""Inputs that once made a decoder fail."""


def test_mutated_bodies_never_get_500(target: AttackedServer) -> None:
    """A22 to A28, mutated at random."""
    found = fuzz(target, BODIES, seed=7)
    assert found["bodies"] == BODIES and found["violations"] == 0, found
    assert found["accepted"] < BODIES // 2, "too few bodies are invalid"


@pytest.mark.parametrize("seed", range(2))
def test_mutated_messages_are_refused_by_every_decoder(seed: int) -> None:
    chance, good = random.Random(seed), seeds()
    for _ in range(INPUTS):
        data = mutated(chance, chance.choice(good), good)[: 1 << 16]
        assert not failure_of(data), data


@pytest.mark.parametrize("description", list(FOUND))
def test_input_that_once_failed_is_refused(description: str) -> None:
    assert not failure_of(FOUND[description])


@pytest.mark.parametrize("name", list(DECODERS))
def test_fuzzer_notices_error_in_every_decoder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any exception other than a refusal is noticed."""

    def broken(data: bytes) -> object:
        raise KeyError(data)

    monkeypatch.setitem(DECODERS, name, broken)
    assert failure_of(b"x").startswith(f"{name}: KeyError")
