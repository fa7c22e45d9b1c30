"""Judges a chaos run by the records of its jobs alone: lost, doubled or cut off."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple


class Line(NamedTuple):
    at_ms: int
    event: str
    replica: str
    token: str
    node: str
    pid: int


class ProcessLife(NamedTuple):
    """One process of one attempt, from its start to its last line."""

    replica: str
    token: str
    node: str
    pid: int
    start_ms: int
    last_ms: int
    last: str


class Stall(NamedTuple):
    """A node whose agent was stopped for longer than fences last: work there may be stopped, from then on for a while.

    `fenced_only`: its keeper was killed, with which fenced work dies; services are adopted by the next.
    """

    node: str
    from_ms: int
    to_ms: int
    fenced_only: bool = False


class Verdict(NamedTuple):
    """Lists of violations, as messages."""

    lost: list[str]
    doubled: list[str]
    cut: list[str]

    @property
    def broken(self) -> list[str]:
        return [*self.lost, *self.doubled, *self.cut]


def read(text: str) -> list[Line]:
    """Parse the record. Truncated lines, as on a full disk, raise: then nothing is proved."""
    lines = []
    for line in text.splitlines():
        at_ms, event, replica, token, node, pid = line.split(" ")
        lines.append(Line(int(at_ms), event, replica, token, node, int(pid)))
    return lines


def process_lives(lines: Iterable[Line]) -> list[ProcessLife]:
    found: dict[tuple[str, int], ProcessLife] = {}
    for line in lines:
        one = line.token, line.pid
        if line.event == "start":
            found[one] = ProcessLife(line.replica, line.token, line.node, line.pid, line.at_ms, line.at_ms, "start")
        else:
            found[one] = found[one]._replace(last_ms=line.at_ms, last=line.event)
    return list(found.values())


def judge(lines: Sequence[Line], *, jobs: Iterable[str], services: Iterable[str], stalls: Sequence[Stall]) -> Verdict:
    """`jobs`: keys of replicas that must each have ended at least once and never run twice at a time;
    `services`: prefixes of keys that may run twice, and that nothing stops but a stall.
    """
    found = process_lives(lines)
    served = tuple(services)
    fenced: dict[str, list[ProcessLife]] = {}
    for life in found:
        if not life.replica.startswith(served):
            fenced.setdefault(life.replica, []).append(life)
    lost = [f"{job} never came to its end" for job in jobs if not any(one.last == "end" for one in fenced.get(job, ()))]
    doubled = [message for one in fenced.values() for message in _overlaps(one)]
    cut = [
        f"{one.replica} ({one.token}, pid {one.pid}) on {one.node} was cut off at {one.last_ms}, after {one.last}"
        for one in found
        if one.last not in ("end", "alive")
        and not any(_covers(stall, one) and not (stall.fenced_only and one.replica.startswith(served)) for stall in stalls)
    ]
    return Verdict(lost, doubled, cut)


def still_alive(found: Sequence[Line], pids: frozenset[int], at_ms: int) -> list[Line]:
    """An additional `alive` line for each process that still runs when the record is closed."""
    return [
        Line(at_ms, "alive", one.replica, one.token, one.node, one.pid)
        for one in process_lives(found)
        if one.last != "end" and one.pid in pids
    ]


def duplicates(found: Iterable[ProcessLife]) -> list[str]:
    """Replicas that still run twice after all has settled, including services."""
    alive: dict[str, list[ProcessLife]] = {}
    for one in found:
        if one.last == "alive":
            alive.setdefault(one.replica, []).append(one)
    return [
        f"{replica} runs {len(running)} times still: {', '.join(f'{one.token} on {one.node}' for one in running)}"
        for replica, running in alive.items()
        if len(running) > 1
    ]


def _overlaps(of_one: list[ProcessLife]) -> Iterable[str]:
    ordered = sorted(of_one, key=lambda one: one.start_ms)
    for before, after in pairwise(ordered):
        if after.token == before.token:
            yield f"{after.replica}: attempt {after.token} was started twice (pids {before.pid}, {after.pid})"
        elif after.start_ms <= before.last_ms:
            yield f"{after.replica}: {after.token} began at {after.start_ms}, and {before.token} wrote at {before.last_ms}"


def _covers(stall: Stall, life: ProcessLife) -> bool:
    return stall.node == life.node and stall.from_ms <= life.last_ms <= stall.to_ms
