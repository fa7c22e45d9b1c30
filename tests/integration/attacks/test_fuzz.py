"""Do spoilt bodies and messages trip anything up? A few hundred of each, from fixed seeds; `make soak` sends 20,000.

What was once found stays here, by itself.
"""

from __future__ import annotations

import random

import pytest

from tests.integration.attacks.attack_server import Stage
from tests.integration.attacks.fuzz_bodies import fuzz
from tests.integration.attacks.fuzz_decoders import DECODERS, seeds, tried
from tests.integration.attacks.mutations import mutated

pytestmark = pytest.mark.smoke

BODIES = 400
INPUTS = 150

FOUND = {
    "a journal with brackets without end": b'{"copy":' * 50_000,
    "a journal that is no text": b'{"copy":["\xff","b",1],"number":3}\n',
}
"""Each of these tripped something up once."""


def test_spoilt_bodies_are_answered_and_never_with_a_500(stage: Stage) -> None:
    """A22 to A28, spoilt at random."""
    found = fuzz(stage, BODIES, seed=7)
    assert found["bodies"] == BODIES and found["violations"] == 0, found
    assert found["accepted"] < BODIES // 2, "hardly anything is spoilt"


@pytest.mark.parametrize("seed", range(2))
def test_spoilt_messages_earn_a_refusal_from_every_decoder(seed: int) -> None:
    chance, good = random.Random(seed), seeds()
    for _ in range(INPUTS):
        data = mutated(chance, chance.choice(good), good)[: 1 << 16]
        assert not tried(data), data


@pytest.mark.parametrize("what", list(FOUND))
def test_what_was_found_once(what: str) -> None:
    assert not tried(FOUND[what])


@pytest.mark.parametrize("name", list(DECODERS))
def test_every_decoder_can_be_tripped_up_by_a_bug(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else than a refusal comes out of it is noticed."""

    def broken(data: bytes) -> object:
        raise KeyError(data)

    monkeypatch.setitem(DECODERS, name, broken)
    assert tried(b"x").startswith(f"{name}: KeyError")
