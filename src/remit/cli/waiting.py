"""Has it come so far yet? Asks again and again until it has, or time is up, and shows how far it is. Nothing is changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import click

from remit.cli.columns import BAD, GOOD, UNSURE
from remit.cli.finding import NOT_FOUND
from remit.cli.progress import Progress, condition_of, funnel, funnel_words, is_rolled_out, progress, why_pending
from remit.cli.reaching import Failure, NotPlaced
from remit.cli.told import console
from remit.client.calling import ApiError
from remit.model.kinds import Workload
from remit.model.problems import escaped
from remit.model.quantity import format_duration, parse_duration
from remit.model.records import Decision, Phase, Replica
from remit.world.clock import BootClock

if TYPE_CHECKING:
    from rich.console import Console

    from remit.client.api import Api

PAUSE_MS: Final = 200
PAUSE_MS_MAX: Final = 2_000
LINES_MAX: Final = 20


class Standing(NamedTuple):
    """How one goal stands: reached or not, in words for one line; `failed` says that it never will be, `cure` what to do then.

    `placed` is false while work of it has no place: who gives up then says so by another code than for anything else.
    `limit` is what keeps it from being reached.
    """

    reached: bool
    words: str
    placed: bool = True
    failed: str = ""
    limit: str = ""
    cure: str = ""

    @property
    def line(self) -> str:
        return f"{self.words}; limited by {self.limit}" if self.limit else self.words


DELETED: Final = Standing(False, "is gone", failed="it was deleted meanwhile", cure="apply it again, and wait anew")


class Goal(Protocol):
    """Something to wait for."""

    name: str

    async def look(self, api: Api) -> Standing: ...


async def until(api: Api, goals: Sequence[Goal], timeout_ms: int) -> None:
    """Returns once all are reached. Raises if one cannot be any more, or time is up, saying where each stands."""
    clock = BootClock()
    end_ms, pause_ms = clock.now_ms() + timeout_ms, PAUSE_MS
    with Shown(console(stderr=True)) as shown:
        while True:
            stands = {goal.name: await goal.look(api) for goal in goals}
            shown.update(stands)
            failed = {name: one for name, one in stands.items() if one.failed}
            if failed:
                raise _never(failed)
            if all(one.reached for one in stands.values()):
                return
            left_ms = end_ms - clock.now_ms()
            if left_ms <= 0:
                raise _late(stands, timeout_ms)
            await clock.sleep_ms(min(pause_ms, left_ms))
            pause_ms = min(PAUSE_MS_MAX, pause_ms * 5 // 4)


def _never(failed: dict[str, Standing]) -> Failure:
    name, first = next(iter(failed.items()))
    lines = [escaped(f"{name}: {one.failed}") for name, one in list(failed.items())[:LINES_MAX]]
    return Failure("\n  ".join(lines), escaped(first.cure or f"look closer: remit describe {name}"))


def _late(stands: dict[str, Standing], timeout_ms: int) -> Failure:
    late = {name: one for name, one in stands.items() if not one.reached}
    unplaced = [name for name, one in late.items() if not one.placed]
    lines = [escaped(f"{name}: {one.line}") for name, one in list(late.items())[:LINES_MAX]]
    what = f"not reached within {format_duration(timeout_ms)}\n  " + "\n  ".join(lines)
    if unplaced:
        return NotPlaced(what, f"ask why: remit explain {unplaced[0]}")
    return Failure(what, f"look closer: remit describe {next(iter(late))}")


class Shown:
    """Live lines on a terminal, which stay at the end; elsewhere a line whenever something has changed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said: dict[str, str] = {}
        self._live: Any = None

    def __enter__(self) -> Shown:
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.transient = error[0] is not None  # what went wrong says where each stands
            self._live.__exit__(None, None, None)

    def update(self, stands: dict[str, Standing]) -> None:
        if self._live is not None:
            self._live.update(_lines(stands), refresh=True)
            return
        for name, one in stands.items():
            if self._said.get(name) != one.line and (name in self._said or not one.reached):
                self._said[name] = one.line
                click.echo(escaped(f"{name}: {one.line}"), err=True)


def _lines(stands: dict[str, Standing]) -> Any:
    from rich.text import Text

    text = Text(no_wrap=True, overflow="ellipsis")
    ordered = sorted(stands.items(), key=lambda pair: pair[1].reached)
    width = max(len(name) for name in stands)
    for number, (name, one) in enumerate(ordered[:LINES_MAX]):
        style = GOOD if one.reached else BAD if one.failed or not one.placed else UNSURE
        text.append("\n" if number else "")
        text.append("✓ " if one.reached else "· ", style=style)
        text.append(f"{escaped(name):<{width}}  ", style="bold")
        text.append(escaped(one.failed or one.words))
        if one.limit and not one.failed:
            text.append(f"\n  {'':<{width}}  limited by {escaped(one.limit)}", style=style)
    if len(ordered) > LINES_MAX:
        text.append(f"\n  and {len(ordered) - LINES_MAX} more")
    return text


def timeout_of(text: str) -> int:
    """Milliseconds; for an option."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise click.BadParameter(f"{escaped(text)}: {error}", param_hint="--timeout") from error


# -- a workload ----------------------------------------------------------------------------------------------------------------


class Arrived:
    """A workload is where it should be: a service is rolled out and ready, a job runs or is done."""

    def __init__(self, name: str, tenant: str, *, shown: str = "", done: bool = False) -> None:
        self._workload, self._tenant, self._done = name, tenant, done
        self.name = shown or f"workload/{name}"

    async def look(self, api: Api) -> Standing:
        try:
            workload = await api.get(Workload, self._workload, tenant=self._tenant)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            return DELETED
        fields = f"spec.workload={self._workload}"
        replicas = list((await api.list(Replica, tenant=self._tenant, fields=fields)).items)
        decisions: Sequence[Decision] = ()
        if any(one.status.phase is Phase.PENDING for one in replicas):
            decisions = (await api.list(Decision, tenant=self._tenant, fields="spec.verdict!=bound")).items
        found = progress(workload, replicas, why_pending(decisions))
        return standing(workload, replicas, found, done=self._done)


def standing(workload: Workload, replicas: Sequence[Replica], found: Progress, *, done: bool = False) -> Standing:
    """How it stands; `done`: only a job that has ended well counts as there."""
    spec = workload.spec
    words = f"{funnel_words(funnel(replicas, found.wanted, spec.type))} of {found.wanted:,}"
    if workload.metadata.deleting:  # of which nothing is wanted any more: that all of that stands says nothing
        return Standing(False, words, failed="it is being deleted", cure=DELETED.cure)
    failed = condition_of(workload.status.conditions, "Failed")
    if failed is not None and failed.status == "True" and failed.observed_generation == workload.metadata.generation:
        return Standing(False, words, failed=f"it failed: {failed.reason} {failed.message}".rstrip())
    if spec.type == "job":
        runs = sum(one.status.phase in (Phase.RUNNING, Phase.READY, Phase.SERVING, Phase.FINISHED) for one in replicas)
        complete = bool(found.wanted) and found.done >= found.wanted
        there = complete or (not done and runs + found.done >= min(spec.replicas, found.wanted))
    else:
        there = is_rolled_out(workload) and found.arrived >= found.wanted
    standing_now = sum(one.status.phase is not Phase.RELEASED for one in replicas) + (found.done if spec.type == "job" else 0)
    waits = any(one.status.phase in (Phase.PENDING, Phase.RESERVED) for one in replicas)
    short = standing_now < (min(spec.replicas, found.wanted) if spec.type == "job" else found.wanted)
    if there:
        return Standing(True, words)
    limit = found.limit + (f": {found.detail}" if found.detail else "") if found.limit else ""
    if not limit and spec.type != "job" and not is_rolled_out(workload):
        limit = "controllers, which do not say yet that this generation is out"
    died = found.limit == "rollout"  # those that are short had a place, and have died there
    return Standing(False, words, placed=not waits and (died or not short), limit=limit)
