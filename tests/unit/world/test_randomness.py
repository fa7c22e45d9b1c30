"""Ids of the real world: form, uniqueness across threads and across a fork."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor

from remit.world.randomness import RandomIds

COUNT = 2_000


def test_nonces_have_sixteen_characters_of_base_32_and_never_repeat() -> None:
    ids = RandomIds()
    with ThreadPoolExecutor(4) as threads:
        nonces = list(threads.map(lambda _: ids.nonce(), range(COUNT)))
    assert len({*nonces}) == COUNT
    assert all(re.fullmatch(r"[a-z2-7]{16}", nonce) for nonce in nonces)


def test_forked_child_makes_other_nonces_than_its_parent() -> None:
    ids = RandomIds()
    ids.nonce()  # leaves unused nonces
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write_end, " ".join(ids.nonce() for _ in range(100)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    drawn = os.read(read_end, 1 << 16).decode().split()
    os.close(read_end)
    os.close(write_end)
    assert len({*drawn, *(ids.nonce() for _ in range(100))}) == 200
