"""client/retry_loop.py: rotation over servers, and which errors are retried."""

from __future__ import annotations

import pytest

from remit.client.retry import RetryBudget, RetryPolicy
from remit.client.retry_loop import AttemptFailure, CallProgress, RetryLoop, ServerRotation
from tests.unit.world.virtual_world import run_virtually, virtual_world


class Exhausted(Exception):
    pass


class Busy(Exception):
    pass


class Progress(CallProgress):
    def exhausted(self, reason: str) -> Exception:
        return Exhausted(f"{reason}: {self.last_reason}")


def retry_loop(servers: ServerRotation, policy: RetryPolicy = RetryPolicy()) -> tuple[RetryLoop, Progress]:
    world = virtual_world("1")
    loop = RetryLoop(
        servers,
        world.clock,
        world.randomness,
        policy,
        RetryBudget(),
        lambda e: AttemptFailure(str(e)) if type(e) is Busy else None,
    )
    return loop, Progress(loop.start()[1])


def test_failure_of_the_current_server__the_next_one_in_the_cycle_is_used() -> None:
    left = list[str]()
    rotation = ServerRotation(["a", "b"], left.append)
    assert not rotation.switch_from("a")
    assert rotation.current == "b"
    assert not rotation.switch_from("a")  # a concurrent call that failed at "a" does not switch again
    assert rotation.current == "b"
    rotation.switch_from("b")
    assert rotation.current == "a"
    assert left == ["a", "b"]


@pytest.mark.parametrize(("hint", "current", "followed"), [("c", "c", True), ("x", "b", False), ("a", "b", False)])
def test_hint__followed_if_it_names_another_server(hint: str, current: str, followed: bool) -> None:
    rotation = ServerRotation(["a", "b", "c"])
    assert rotation.switch_from("a", hint) is followed
    assert rotation.current == current


def test_no_server__refused() -> None:
    with pytest.raises(ValueError, match="no server"):
        ServerRotation([])


def test_error_that_is_an_answer__raised_and_not_retried() -> None:
    async def scene() -> None:
        tried = list[str]()
        loop, progress = retry_loop(ServerRotation(["a", "b"]))

        async def attempt(server: str) -> None:
            tried.append(server)
            raise KeyError("refused")

        with pytest.raises(KeyError):
            await loop.run(attempt, progress)
        assert tried == ["a"]

    run_virtually(scene())


def test_every_attempt_fails__ends_with_the_last_reason_after_the_allowed_attempts() -> None:
    async def scene() -> None:
        tried = list[str]()
        loop, progress = retry_loop(ServerRotation(["a", "b"]), RetryPolicy(attempts_max=3))

        async def attempt(server: str) -> None:
            tried.append(server)
            raise Busy(f"{server} is busy")

        with pytest.raises(Exhausted, match="3 attempts failed: a is busy"):
            await loop.run(attempt, progress)
        assert tried == ["a", "b", "a"]
        assert progress.unknown_outcomes == 0

    run_virtually(scene())
