"""Which messages arrive, when and how often, as the state of their way says? And what does a caller hear of a server's end?"""

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
"""Every message takes as long: what is sent first arrives first."""


class Town:
    """Processes by name, each with a link; what `send` carries is noted with its time."""

    made: ClassVar[list[Town]] = []

    def __init__(self, weather: NetworkConditions = EVEN, seed: str = "town") -> None:
        self.loop = SimLoop.seeded(seed)
        self.network = Network(self.loop, seed, weather)
        self.units = {name: self.loop.new_unit(name) for name in "abc"}
        self.links = {name: SimLink(self.network, name, unit) for name, unit in self.units.items()}
        self.arrived: list[tuple[Any, float]] = []
        self.said: list[Any] = []
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

    def serve(self, name: str, service: Answering) -> None:
        async def main() -> None:
            async with self.links[name].serve(name, service):
                await asyncio.Event().wait()

        self.play(name, main())
        self.run(0.1)

    def ask(self, source: str, target: str) -> None:
        """What comes of it, and how long it took."""

        async def main() -> None:
            since_s, said = self.loop.time(), "nothing"
            try:
                said = (await self.links[source].request(target, b"?")).decode()
            except (ReplyLost, NotSent) as error:
                said = type(error).__name__
            self.said.append((said, round(self.loop.time() - since_s, 3)))

        self.play(source, main())

    def follow(self, source: str, target: str) -> None:
        async def main() -> None:
            try:
                async for item in self.links[source].stream(target, b"?"):
                    self.said.append(item.decode())
                self.said.append("end")
            except (ReplyLost, NotSent) as error:
                self.said.append(type(error).__name__)

        self.play(source, main())


class Answering:
    """Answers after `takes_s`, and streams numbers, one `every_s`."""

    def __init__(self, *, takes_s: float = 0.0, every_s: float = 0.1, many: int = 10) -> None:
        self.takes_s, self.every_s, self.many = takes_s, every_s, many
        self.asked = 0

    async def request(self, body: bytes, /) -> bytes:
        self.asked += 1
        await asyncio.sleep(self.takes_s)
        return b"yes"

    async def stream(self, body: bytes, /) -> AsyncGenerator[bytes, None]:
        for n in range(self.many):
            yield b"%d" % n
            await asyncio.sleep(self.every_s)


@pytest.fixture(autouse=True)
def finished() -> Iterator[None]:
    """Nothing of a town is left to the next test."""
    yield
    while Town.made:
        Town.made.pop().loop.finish()


# The weather


def test_a_message_takes_as_long_as_the_weather_says() -> None:
    town = Town(NetworkConditions(delay_s=(0.2, 0.5)))
    for n in range(200):
        town.send("a", "b", n)
    town.run(1.0)
    assert sorted(town.names()) == list(range(200))
    assert all(0.2 <= at_s <= 0.5 for _, at_s in town.arrived)
    assert town.names() != list(range(200)), "they overtake each other"


def test_a_tail_delays_some_by_much() -> None:
    town = Town(NetworkConditions(delay_s=(0.01, 0.01), tail_chance=0.1, tail_s=5.0))
    for n in range(500):
        town.send("a", "b", n)
    town.run(10.0)
    late = [at_s for _, at_s in town.arrived if at_s > 0.011]
    assert 20 < len(late) < 100
    assert max(at_s for _, at_s in town.arrived) <= 5.01


def test_loss_and_repeats_are_as_frequent_as_they_say() -> None:
    town = Town(NetworkConditions(delay_s=(0.01, 0.01), loss=0.25))
    for n in range(1_000):
        town.send("a", "b", n)
    town.run(10.0)
    assert 650 < len(town.arrived) < 850
    assert town.network.counts == {"lost": 1_000 - len(town.arrived)}

    town = Town(NetworkConditions(delay_s=(0.01, 0.01), repeat=0.25))
    for n in range(1_000):
        town.send("a", "b", n)
    town.run(10.0)
    assert set(town.names()) == set(range(1_000))
    assert 1_150 < len(town.arrived) < 1_350
    assert town.network.counts == {"repeated": len(town.arrived) - 1_000}


def test_worse_weather_adds_up_and_is_taken_back_in_any_order() -> None:
    changes = [{"loss": 0.1}, {"loss": 0.3, "repeat": 0.2}, {"tail_chance": 0.5, "tail_s": 2.0}]
    for order in permutations(range(3)):
        town = Town()
        backs = [town.network.degrade(dict(one)) for one in changes]
        now = town.network.conditions
        assert (now.loss, now.repeat, now.tail_chance, now.tail_s) == (0.3, 0.2, 0.5, 2.0)
        left = set(range(3))
        for index in order:
            backs[index]()
            left.discard(index)
            now = town.network.conditions
            assert now.loss == max([changes[one].get("loss", 0.0) for one in left], default=0.0)
            assert now.tail_s == (2.0 if 2 in left else 0.0)
        assert town.network.conditions == EVEN


def test_worse_weather_never_makes_a_bad_network_better() -> None:
    network = Town(NetworkConditions(loss=0.4)).network
    back = network.degrade({"loss": 0.1})
    assert network.conditions.loss == 0.4
    back()
    assert network.conditions == NetworkConditions(loss=0.4)


def test_one_seed_is_one_fate_of_every_message() -> None:
    def fates(seed: str) -> list[tuple[Any, float]]:
        town = Town(NetworkConditions(loss=0.1, repeat=0.1, tail_chance=0.1, tail_s=1.0), seed)
        for n in range(100):
            town.send("a", "b", n)
        town.run(10.0)
        return town.arrived

    assert fates("1") == fates("1") != fates("2")


# Ways


def test_a_cut_is_of_one_direction_and_of_what_is_sent_meanwhile() -> None:
    town = Town()
    town.send("a", "b", "before")
    town.network.cut("a", "b")
    town.send("a", "b", "lost")
    town.send("b", "a", "back")
    town.send("a", "c", "elsewhere")
    town.run(1.0)
    town.network.heal("a", "b")
    town.send("a", "b", "after")
    town.run(1.0)
    assert sorted(town.names()) == ["after", "back", "before", "elsewhere"]
    assert town.network.counts == {"cut": 1}


def test_two_cuts_on_one_way_are_mended_one_by_one() -> None:
    town = Town()
    for _ in range(2):
        town.network.cut("a", "b")
    town.network.heal("a", "b")
    town.send("a", "b", "still cut")
    assert not town.network.reaches("a", "b")
    town.network.heal("a", "b")
    assert town.network.reaches("a", "b")
    town.send("a", "b", "open")
    town.run(1.0)
    assert town.names() == ["open"]


def test_a_clog_holds_back_and_lets_go_in_the_order_of_sending() -> None:
    town = Town()
    for _ in range(2):
        town.network.clog("a", "b")
    for n in range(10):
        town.send("a", "b", n)
        town.send("b", "a", "back")
        town.run(0.5)
    town.network.unclog("a", "b")
    town.run(1.0)
    assert town.names() == ["back"] * 10
    town.network.unclog("a", "b")
    town.run(1.0)
    assert town.names()[10:] == list(range(10))
    assert all(at_s == pytest.approx(6.01) for _, at_s in town.arrived[10:])
    town.send("a", "b", "after")
    town.run(1.0)
    assert town.names()[-1] == "after"


def test_what_a_clog_held_for_one_who_died_meanwhile_is_lost() -> None:
    town = Town()
    town.network.clog("a", "b")
    town.send("a", "b", "held")
    town.kill("b")
    town.network.unclog("a", "b")
    town.run(1.0)
    assert not town.names()


def test_a_slow_way_takes_up_to_so_much_longer__others_do_not() -> None:
    town = Town()
    town.network.path("a", "b").slow_s += 2.0
    for _ in range(100):
        town.send("a", "b", "slow")
        town.send("b", "a", "fast")
    town.run(5.0)
    slow = [at_s for what, at_s in town.arrived if what == "slow"]
    assert len(slow) == 100
    assert 1.5 < max(slow) <= 2.01
    assert all(at_s == 0.01 for what, at_s in town.arrived if what == "fast")


def test_a_frozen_process_gets_its_messages_when_it_is_thawed() -> None:
    town = Town()
    town.loop.freeze(town.units["b"])
    town.send("a", "b", "one")
    town.send("a", "b", "two")
    town.run(5.0)
    assert not town.names()
    town.loop.thaw(town.units["b"])
    town.run(1.0)
    assert town.arrived == [("one", 5.0), ("two", 5.0)]


# Requests


def test_a_request_is_answered() -> None:
    town = Town()
    town.serve("b", Answering(takes_s=1.0))
    town.ask("a", "b")
    town.run(5.0)
    assert town.said == [("yes", 1.02)]


def test_nobody_serves_there__unreached_after_a_moment() -> None:
    town = Town()
    town.ask("a", "b")
    town.run(5.0)
    assert town.said == [("NotSent", RESET_S)]


def test_the_server_dies_while_it_works__unheard() -> None:
    town = Town()
    town.serve("b", Answering(takes_s=1.0))
    town.ask("a", "b")
    town.run(0.5)
    town.kill("b")
    town.run(5.0)
    assert [said for said, _ in town.said] == ["ReplyLost"]


def test_the_server_dies_while_the_request_is_under_way__the_caller_is_told() -> None:
    """Its machine is there, and says that the connection is gone."""
    town, service = Town(), Answering()
    town.serve("b", service)
    town.ask("a", "b")
    town.run(0.005)
    town.kill("b")
    town.run(60.0)
    assert service.asked == 0
    assert [said for said, _ in town.said] == ["ReplyLost"]


@pytest.mark.parametrize("alive", [True, False])
@pytest.mark.parametrize("way", [("a", "b"), ("b", "a")])
def test_a_cut_gives_silence__whoever_is_there(way: tuple[str, str], alive: bool) -> None:
    town, service = Town(), Answering()
    if alive:
        town.serve("b", service)
    town.network.cut(*way)
    town.ask("a", "b")
    town.follow("a", "b")
    town.run(600.0)
    assert town.said == []
    assert service.asked == (1 if alive and way == ("b", "a") else 0)


def test_the_server_dies_behind_a_cut__silence() -> None:
    town = Town()
    town.serve("b", Answering(takes_s=1.0))
    town.ask("a", "b")
    town.run(0.5)
    town.network.cut("b", "a")
    town.kill("b")
    town.run(600.0)
    assert town.said == []


def test_a_repeated_request_is_heard_twice_and_answered_once() -> None:
    town, service = Town(NetworkConditions(delay_s=(0.01, 0.01), repeat=1.0)), Answering()
    town.serve("b", service)
    town.ask("a", "b")
    town.run(5.0)
    assert service.asked == 2
    assert [said for said, _ in town.said] == ["yes"]


def test_a_dead_caller_sends_nothing() -> None:
    town, service = Town(), Answering()
    town.serve("b", service)
    town.ask("a", "b")
    town.kill("a")
    town.run(5.0)
    assert service.asked == 0


# Streams


def test_a_stream_is_in_order_and_whole_though_items_overtake_each_other() -> None:
    town = Town(NetworkConditions(delay_s=(0.0, 0.8)))
    town.serve("b", Answering(many=50))
    town.follow("a", "b")
    town.run(60.0)
    assert town.said == [*(f"{n}" for n in range(50)), "end"]


def test_a_stream_whose_items_are_repeated_is_whole() -> None:
    """What comes again was heard: nothing is lost, however quiet the stream is then."""
    town = Town(NetworkConditions(delay_s=(0.01, 0.01), repeat=1.0))
    town.serve("b", Answering(many=5, every_s=5 * STREAM_GAP_S))
    town.follow("a", "b")
    town.run(60.0)
    assert town.said == [*(f"{n}" for n in range(5)), "end"]


@pytest.mark.parametrize("every_s", [STREAM_GAP_S / 3, STREAM_GAP_S * 3])
def test_a_stream_with_a_lost_item_breaks__however_much_follows(every_s: float) -> None:
    town = Town()
    town.serve("b", Answering(many=1_000, every_s=every_s))
    town.follow("a", "b")
    town.run(2.5 * every_s)
    town.network.cut("b", "a")
    town.run(every_s)
    town.network.heal("b", "a")
    town.run(4 * every_s + 2 * STREAM_GAP_S)
    assert town.said == ["0", "1", "2", "ReplyLost"]


def test_the_server_dies__its_streams_break() -> None:
    town = Town()
    town.serve("b", Answering(many=1_000, every_s=1.0))
    town.follow("a", "b")
    town.run(2.5)
    town.kill("b")
    town.run(1.0)
    assert town.said == ["0", "1", "2", "ReplyLost"]


def test_the_server_dies_while_a_stream_is_being_opened__the_caller_is_told() -> None:
    town = Town()
    town.serve("b", Answering())
    town.follow("a", "b")
    town.run(0.005)
    town.kill("b")
    town.run(60.0)
    assert town.said == ["ReplyLost"]


def test_nobody_serves_there__the_stream_is_unreached() -> None:
    town = Town()
    town.follow("a", "b")
    town.run(5.0)
    assert town.said == ["NotSent"]
