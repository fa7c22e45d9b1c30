"""Tests of `persistent_interrupts`."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import pytest

from remit.cli import interrupts as module
from remit.cli.interrupts import persistent_interrupts


def test_swallowed_interrupt_is_raised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 0.05)
    swallowed = 0
    with pytest.raises(KeyboardInterrupt), persistent_interrupts():
        for _ in range(2):
            try:
                os.kill(os.getpid(), signal.SIGINT) if not swallowed else time.sleep(10)
            except BaseException:  # noqa: BLE001 - as an imported module may do
                swallowed += 1
        time.sleep(10)
    assert swallowed == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupt_swallowed_at_the_end_is_raised_on_exit() -> None:
    with pytest.raises(KeyboardInterrupt), persistent_interrupts(), suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)  # no second interrupt follows


def test_custom_sigint_handler_is_not_replaced() -> None:
    with persistent_interrupts():
        pass
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        with persistent_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert received == [signal.SIGINT]
