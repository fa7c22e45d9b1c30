"""Simulated network: delivery, delay, loss and repeats by path, and what callers see when a server dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterator
from itertools import permutations
from typing import Any, ClassVar

import pytest

from remit.simulate.world.event_loop import SimLoop
from remit.simulate.world.network import RESET_S, STREAM_GAP_S, Network, NetworkConditions, SimLink
from remit.world.interfaces import NotSent, ReplyLost

EVEN = NetworkConditions(delay_s=(0.01, 0.01))
"""Every message takes equally long, so messages arrive in the order sent."""


class NetworkScene:
    """Processes by name, each with a link; what `send` delivers is recorded with its time."""

    made: ClassVar[list[NetworkScene]] = []

    def __init__(self, conditions: NetworkConditions = EVEN, seed: str = "town") -> None:
        self.loop = SimLoop.seeded(seed)
        self.network = Network(self.loop, seed, conditions)
        self.units = {name: self.loop.new_unit(name) for name in "abc"}
        self.links = {name: SimLink(self.network, name, unit) for name, unit in self.units.items()}
        self.arrived: list[tuple[Any, float]] = []
        self.outcomes: list[Any] = []
        self.loop.call_at(1e6, self.loop.stop)
        self.made.append(self)

    def send(self, source: str, target: str, what: Any) -> None:
        self.network.send(source, target, self.units[target], lambda: self.arrived.append((what, self.loop.time())))

    def names(self) -> list[Any]:
        return [what for what, _ in self.arrived]

    def run(self, for_s: float) -> None:
        self.loop.run(self.loop.time() + for_s)
        assert not self.loop.failures, self.loop.failures

    def play(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self.loop.spawn(work, name=f"of {name}", unit=self.units[name])

    def kill(self, name: str) -> None:
        self.loop.kill(self.units[name])
        self.network.reset_connections(self.units[name])

    def serve(self, name: str, service: SlowService) -> None:
        async def main() -> None:
            async with self.links[name].serve(name, service):
                await asyncio.Event().wait()

        self.play(name, main())
        self.run(0.1)

    def ask(self, source: str, target: str) -> None:
        """Send a request and record its outcome and duration."""

        async def main() -> None:
            since_s, outcomes = self.loop.time(), "nothing"
            try:
                outcomes = (await self.links[source].request(target, b"?")).decode()
            except (ReplyLost, NotSent) as error:
                outcomes = type(error).__name__
            self.outcomes.append((outcomes, round(self.loop.time() - since_s, 3)))

        self.play(source, main())

    def follow(self, source: str, target: str) -> None:
        async def main() -> None:
            try:
                async for item in self.links[source].stream(target, b"?"):
                    self.outcomes.append(item.decode())
                self.outcomes.append("end")
            except (ReplyLost, NotSent) as error:
                self.outcomes.append(type(error).__name__)

        self.play(source, main())


class SlowService:
    """Answers after `takes_s`, and streams numbers, one `every_s`."""

    def __init__(self, *, takes_s: float = 0.0, every_s: float = 0.1, many: int = 10) -> None:
        self.takes_s, self.every_s, self.many = takes_s, every_s, many
        self.calls = 0

    async def request(self, body: bytes, /) -> bytes:
        self.calls += 1
        await asyncio.sleep(self.takes_s)
        return b"yes"

    async def stream(self, body: bytes, /) -> AsyncGenerator[bytes, None]:
        for n in range(self.many):
            yield b"%d" % n
            await asyncio.sleep(self.every_s)


@pytest.fixture(autouse=True)
def finish_loops() -> Iterator[None]:
    """No network scene is left to the next test."""
    yield
    while NetworkScene.made:
        NetworkScene.made.pop().loop.finish()


# Network conditions


def test_message_delay_is_within_conditions() -> None:
    net = NetworkScene(NetworkConditions(delay_s=(0.2, 0.5)))
    for n in range(200):
        net.send("a", "b", n)
    net.run(1.0)
    assert sorted(net.names()) == list(range(200))
    assert all(0.2 <= at_s <= 0.5 for _, at_s in net.arrived)
    assert net.names() != list(range(200)), "messages overtake each other"


def test_tail_delays_few_messages_by_much() -> None:
    net = NetworkScene(NetworkConditions(delay_s=(0.01, 0.01), tail_chance=0.1, tail_s=5.0))
    for n in range(500):
        net.send("a", "b", n)
    net.run(10.0)
    late = [at_s for _, at_s in net.arrived if at_s > 0.011]
    assert 20 < len(late) < 100
    assert max(at_s for _, at_s in net.arrived) <= 5.01


def test_loss_and_repeat_rates_match_conditions() -> None:
    net = NetworkScene(NetworkConditions(delay_s=(0.01, 0.01), loss=0.25))
    for n in range(1_000):
        net.send("a", "b", n)
    net.run(10.0)
    assert 650 < len(net.arrived) < 850
    assert net.network.counts == {"lost": 1_000 - len(net.arrived)}

    net = NetworkScene(NetworkConditions(delay_s=(0.01, 0.01), repeat=0.25))
    for n in range(1_000):
        net.send("a", "b", n)
    net.run(10.0)
    assert set(net.names()) == set(range(1_000))
    assert 1_150 < len(net.arrived) < 1_350
    assert net.network.counts == {"repeated": len(net.arrived) - 1_000}


def test_degradations_combine_and_are_undone_in_any_order() -> None:
    changes = [{"loss": 0.1}, {"loss": 0.3, "repeat": 0.2}, {"tail_chance": 0.5, "tail_s": 2.0}]
    for order in permutations(range(3)):
        net = NetworkScene()
        backs = [net.network.degrade(dict(one)) for one in changes]
        now = net.network.conditions
        assert (now.loss, now.repeat, now.tail_chance, now.tail_s) == (0.3, 0.2, 0.5, 2.0)
        left = set(range(3))
        for index in order:
            backs[index]()
            left.discard(index)
            now = net.network.conditions
            assert now.loss == max([changes[one].get("loss", 0.0) for one in left], default=0.0)
            assert now.tail_s == (2.0 if 2 in left else 0.0)
        assert net.network.conditions == EVEN


def test_degradation_never_improves_conditions() -> None:
    network = NetworkScene(NetworkConditions(loss=0.4)).network
    back = network.degrade({"loss": 0.1})
    assert network.conditions.loss == 0.4
    back()
    assert network.conditions == NetworkConditions(loss=0.4)


def test_seed_determines_fate_of_every_message() -> None:
    def fates(seed: str) -> list[tuple[Any, float]]:
        net = NetworkScene(NetworkConditions(loss=0.1, repeat=0.1, tail_chance=0.1, tail_s=1.0), seed)
        for n in range(100):
            net.send("a", "b", n)
        net.run(10.0)
        return net.arrived

    assert fates("1") == fates("1") != fates("2")


# Paths


def test_cut_affects_one_direction_and_messages_sent_during_it() -> None:
    net = NetworkScene()
    net.send("a", "b", "before")
    net.network.cut("a", "b")
    net.send("a", "b", "lost")
    net.send("b", "a", "back")
    net.send("a", "c", "elsewhere")
    net.run(1.0)
    net.network.heal("a", "b")
    net.send("a", "b", "after")
    net.run(1.0)
    assert sorted(net.names()) == ["after", "back", "before", "elsewhere"]
    assert net.network.counts == {"cut": 1}


def test_two_cuts_need_two_heals() -> None:
    net = NetworkScene()
    for _ in range(2):
        net.network.cut("a", "b")
    net.network.heal("a", "b")
    net.send("a", "b", "still cut")
    assert not net.network.reaches("a", "b")
    net.network.heal("a", "b")
    assert net.network.reaches("a", "b")
    net.send("a", "b", "open")
    net.run(1.0)
    assert net.names() == ["open"]


def test_clog_holds_messages_and_releases_them_in_order() -> None:
    net = NetworkScene()
    for _ in range(2):
        net.network.clog("a", "b")
    for n in range(10):
        net.send("a", "b", n)
        net.send("b", "a", "back")
        net.run(0.5)
    net.network.unclog("a", "b")
    net.run(1.0)
    assert net.names() == ["back"] * 10
    net.network.unclog("a", "b")
    net.run(1.0)
    assert net.names()[10:] == list(range(10))
    assert all(at_s == pytest.approx(6.01) for _, at_s in net.arrived[10:])
    net.send("a", "b", "after")
    net.run(1.0)
    assert net.names()[-1] == "after"


def test_messages_clogged_for_killed_process_are_lost() -> None:
    net = NetworkScene()
    net.network.clog("a", "b")
    net.send("a", "b", "held")
    net.kill("b")
    net.network.unclog("a", "b")
    net.run(1.0)
    assert not net.names()


def test_slow_path_delays_only_its_messages() -> None:
    net = NetworkScene()
    net.network.path("a", "b").slow_s += 2.0
    for _ in range(100):
        net.send("a", "b", "slow")
        net.send("b", "a", "fast")
    net.run(5.0)
    slow = [at_s for what, at_s in net.arrived if what == "slow"]
    assert len(slow) == 100
    assert 1.5 < max(slow) <= 2.01
    assert all(at_s == 0.01 for what, at_s in net.arrived if what == "fast")


def test_frozen_process_receives_messages_when_thawed() -> None:
    net = NetworkScene()
    net.loop.freeze(net.units["b"])
    net.send("a", "b", "one")
    net.send("a", "b", "two")
    net.run(5.0)
    assert not net.names()
    net.loop.thaw(net.units["b"])
    net.run(1.0)
    assert net.arrived == [("one", 5.0), ("two", 5.0)]


# Requests


def test_request_is_answered() -> None:
    net = NetworkScene()
    net.serve("b", SlowService(takes_s=1.0))
    net.ask("a", "b")
    net.run(5.0)
    assert net.outcomes == [("yes", 1.02)]


def test_request_without_server_is_not_sent_after_reset() -> None:
    net = NetworkScene()
    net.ask("a", "b")
    net.run(5.0)
    assert net.outcomes == [("NotSent", RESET_S)]


def test_request_to_server_killed_during_work_loses_reply() -> None:
    net = NetworkScene()
    net.serve("b", SlowService(takes_s=1.0))
    net.ask("a", "b")
    net.run(0.5)
    net.kill("b")
    net.run(5.0)
    assert [outcomes for outcomes, _ in net.outcomes] == ["ReplyLost"]


def test_request_to_server_killed_before_arrival_loses_reply() -> None:
    """Its machine is reachable and reports that the connection is gone."""
    net, service = NetworkScene(), SlowService()
    net.serve("b", service)
    net.ask("a", "b")
    net.run(0.005)
    net.kill("b")
    net.run(60.0)
    assert service.calls == 0
    assert [outcomes for outcomes, _ in net.outcomes] == ["ReplyLost"]


@pytest.mark.parametrize("alive", [True, False])
@pytest.mark.parametrize("way", [("a", "b"), ("b", "a")])
def test_request_over_cut_path_stays_silent(way: tuple[str, str], alive: bool) -> None:
    net, service = NetworkScene(), SlowService()
    if alive:
        net.serve("b", service)
    net.network.cut(*way)
    net.ask("a", "b")
    net.follow("a", "b")
    net.run(600.0)
    assert net.outcomes == []
    assert service.calls == (1 if alive and way == ("b", "a") else 0)


def test_server_killed_behind_cut_stays_silent() -> None:
    net = NetworkScene()
    net.serve("b", SlowService(takes_s=1.0))
    net.ask("a", "b")
    net.run(0.5)
    net.network.cut("b", "a")
    net.kill("b")
    net.run(600.0)
    assert net.outcomes == []


def test_repeated_request_is_served_twice_and_answered_once() -> None:
    net, service = NetworkScene(NetworkConditions(delay_s=(0.01, 0.01), repeat=1.0)), SlowService()
    net.serve("b", service)
    net.ask("a", "b")
    net.run(5.0)
    assert service.calls == 2
    assert [outcomes for outcomes, _ in net.outcomes] == ["yes"]


def test_killed_caller_sends_nothing() -> None:
    net, service = NetworkScene(), SlowService()
    net.serve("b", service)
    net.ask("a", "b")
    net.kill("a")
    net.run(5.0)
    assert service.calls == 0


# Streams


def test_stream_is_complete_and_ordered_though_items_overtake() -> None:
    net = NetworkScene(NetworkConditions(delay_s=(0.0, 0.8)))
    net.serve("b", SlowService(many=50))
    net.follow("a", "b")
    net.run(60.0)
    assert net.outcomes == [*(f"{n}" for n in range(50)), "end"]


def test_stream_with_repeated_items_is_complete() -> None:
    """A repeated item counts as received, however quiet the stream is afterwards."""
    net = NetworkScene(NetworkConditions(delay_s=(0.01, 0.01), repeat=1.0))
    net.serve("b", SlowService(many=5, every_s=5 * STREAM_GAP_S))
    net.follow("a", "b")
    net.run(60.0)
    assert net.outcomes == [*(f"{n}" for n in range(5)), "end"]


@pytest.mark.parametrize("every_s", [STREAM_GAP_S / 3, STREAM_GAP_S * 3])
def test_stream_breaks_after_lost_item(every_s: float) -> None:
    net = NetworkScene()
    net.serve("b", SlowService(many=1_000, every_s=every_s))
    net.follow("a", "b")
    net.run(2.5 * every_s)
    net.network.cut("b", "a")
    net.run(every_s)
    net.network.heal("b", "a")
    net.run(4 * every_s + 2 * STREAM_GAP_S)
    assert net.outcomes == ["0", "1", "2", "ReplyLost"]


def test_streams_of_killed_server_break() -> None:
    net = NetworkScene()
    net.serve("b", SlowService(many=1_000, every_s=1.0))
    net.follow("a", "b")
    net.run(2.5)
    net.kill("b")
    net.run(1.0)
    assert net.outcomes == ["0", "1", "2", "ReplyLost"]


def test_stream_to_server_killed_while_opening_breaks() -> None:
    net = NetworkScene()
    net.serve("b", SlowService())
    net.follow("a", "b")
    net.run(0.005)
    net.kill("b")
    net.run(60.0)
    assert net.outcomes == ["ReplyLost"]


def test_stream_without_server_is_not_sent() -> None:
    net = NetworkScene()
    net.follow("a", "b")
    net.run(5.0)
    assert net.outcomes == ["NotSent"]
