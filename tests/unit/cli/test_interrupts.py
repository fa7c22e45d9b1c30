"""Does an interrupt end what is insisted on, also where whatever is raised is swallowed?"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import pytest

from remit.cli import interrupts as module
from remit.cli.interrupts import persistent_interrupts


def test_one_that_is_swallowed_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 0.05)
    swallowed = 0
    with pytest.raises(KeyboardInterrupt), persistent_interrupts():
        for _ in range(2):
            try:
                os.kill(os.getpid(), signal.SIGINT) if not swallowed else time.sleep(10)
            except BaseException:  # noqa: BLE001 - as what is being loaded may do
                swallowed += 1
        time.sleep(10)
    assert swallowed == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_that_is_swallowed_last_is_heard_at_the_end() -> None:
    with pytest.raises(KeyboardInterrupt), persistent_interrupts(), suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)  # and nothing comes after it


def test_without_an_interrupt_nothing_happens_and_a_handler_of_ones_own_is_kept() -> None:
    with persistent_interrupts():
        pass
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with persistent_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]
