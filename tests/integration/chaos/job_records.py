"""What do the jobs' own records say? Lost, doubled or cut off: judged from what work wrote of itself, and from nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple


class Line(NamedTuple):
    at_ms: int
    what: str
    replica: str
    token: str
    node: str
    pid: int


class Life(NamedTuple):
    """One process of one attempt, from its start to the last that it wrote."""

    replica: str
    token: str
    node: str
    pid: int
    start_ms: int
    last_ms: int
    last: str


class Stall(NamedTuple):
    """A node whose agent was stopped for longer than fences are: what ran there may be ended, from then on and for a while.
    `fenced_only`: its keeper was killed, with which fenced work dies; services are adopted by the next.
    """

    node: str
    from_ms: int
    to_ms: int
    fenced_only: bool = False


class Judged(NamedTuple):
    """Everything that must be empty, in words."""

    lost: list[str]
    doubled: list[str]
    cut: list[str]

    @property
    def broken(self) -> list[str]:
        return [*self.lost, *self.doubled, *self.cut]


def read(text: str) -> list[Line]:
    """Lines that were cut off, because the machine's disk was full say, are refused: then nothing is proved."""
    lines = []
    for line in text.splitlines():
        at_ms, what, replica, token, node, pid = line.split(" ")
        lines.append(Line(int(at_ms), what, replica, token, node, int(pid)))
    return lines


def lives(lines: Iterable[Line]) -> list[Life]:
    found: dict[tuple[str, int], Life] = {}
    for line in lines:
        one = line.token, line.pid
        if line.what == "start":
            found[one] = Life(line.replica, line.token, line.node, line.pid, line.at_ms, line.at_ms, "start")
        else:
            found[one] = found[one]._replace(last_ms=line.at_ms, last=line.what)
    return list(found.values())


def judge(lines: Sequence[Line], *, jobs: Iterable[str], services: Iterable[str], stalls: Sequence[Stall]) -> Judged:
    """`jobs`: the keys of replicas that must each have ended well at least once, and were never to run twice at once;
    `services`: prefixes of keys that may run twice, and that nothing stops but a stall.
    """
    found = lives(lines)
    served = tuple(services)
    fenced: dict[str, list[Life]] = {}
    for life in found:
        if not life.replica.startswith(served):
            fenced.setdefault(life.replica, []).append(life)
    lost = [f"{job} never came to its end" for job in jobs if not any(one.last == "end" for one in fenced.get(job, ()))]
    doubled = [words for one in fenced.values() for words in _overlaps(one)]
    cut = [
        f"{one.replica} ({one.token}, pid {one.pid}) on {one.node} was cut off at {one.last_ms}, after {one.last}"
        for one in found
        if one.last not in ("end", "alive")
        and not any(_covers(stall, one) and not (stall.fenced_only and one.replica.startswith(served)) for stall in stalls)
    ]
    return Judged(lost, doubled, cut)


def still_alive(found: Sequence[Line], pids: frozenset[int], at_ms: int) -> list[Line]:
    """Of those that run still, when the record is closed, one more line each says so."""
    return [
        Line(at_ms, "alive", one.replica, one.token, one.node, one.pid)
        for one in lives(found)
        if one.last != "end" and one.pid in pids
    ]


def crowds(found: Iterable[Life]) -> list[str]:
    """Once all has settled nothing runs twice: also not what may for a while."""
    alive: dict[str, list[Life]] = {}
    for one in found:
        if one.last == "alive":
            alive.setdefault(one.replica, []).append(one)
    return [
        f"{replica} runs {len(those)} times still: {', '.join(f'{one.token} on {one.node}' for one in those)}"
        for replica, those in alive.items()
        if len(those) > 1
    ]


def _overlaps(of_one: list[Life]) -> Iterable[str]:
    ordered = sorted(of_one, key=lambda one: one.start_ms)
    for before, after in pairwise(ordered):
        if after.token == before.token:
            yield f"{after.replica}: attempt {after.token} was started twice (pids {before.pid}, {after.pid})"
        elif after.start_ms <= before.last_ms:
            yield f"{after.replica}: {after.token} began at {after.start_ms}, and {before.token} wrote at {before.last_ms}"


def _covers(stall: Stall, life: Life) -> bool:
    return stall.node == life.node and stall.from_ms <= life.last_ms <= stall.to_ms
