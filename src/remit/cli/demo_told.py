"""What does the live demo look like, and what did it check? Prints as things happen, and adds up at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from rich.console import Console
from rich.text import Text

from remit.cli.explain_shown import show
from remit.model.answers import EndpointItem
from remit.model.objects import dec_hook
from remit.proposal.explained import WorkloadTold
from remit.world.promises import Clock

NAME_WIDTH: Final = 26


class Checked(NamedTuple):
    name: str
    holds: bool
    found: str


class Told:
    def __init__(self, console: Console, clock: Clock) -> None:
        self._console, self._clock = console, clock
        self._began_ms = clock.now_ms()
        self._acts = 0
        self.checked: list[Checked] = []

    @property
    def holds(self) -> bool:
        return bool(self.checked) and all(one.holds for one in self.checked)

    def head(self, title: str) -> None:
        self._acts += 1
        passed_s = (self._clock.now_ms() - self._began_ms) / 1000
        number, passed = (f"{self._acts}  ", "bold cyan"), (f"   {passed_s:.0f} s", "dim")
        self._console.print(Text.assemble("\n", number, (title, "bold"), passed))

    def command(self, words: str) -> None:
        self.line(Text(f"$ {words}", style="cyan"))

    def line(self, text: str | Text) -> None:
        self._console.print(Text.assemble("   ", text), soft_wrap=True)

    def said(self, text: str) -> None:
        for line in text.splitlines():
            self.line(Text(line, style="dim"))

    def endpoints(self, found: Sequence[EndpointItem]) -> None:
        for one in found:
            where = ", ".join(f"{one.host}:{port}" for port in one.ports.values())
            self.line(f"{one.replica:<10} {one.node:<12} {where}")

    def explanation(self, told: Mapping[str, Any]) -> None:
        with self._console.capture() as captured:
            show(self._console, msgspec.convert(told, WorkloadTold, dec_hook=dec_hook), verbose=False, wall=self._clock.wall())
        for line in captured.get().splitlines():
            self.line(Text.from_ansi(line))

    def held(self, name: str, found: str) -> None:
        self.check(name, True, found)

    def check(self, name: str, holds: bool, found: str) -> None:
        self.checked.append(Checked(name, holds, found))
        mark = ("✓", "bold green") if holds else ("✗", "bold red")
        self._console.print(Text.assemble("   ", mark, " ", (f"{name:<{NAME_WIDTH}}", "bold"), found), soft_wrap=True)

    def end(self) -> None:
        passed_s = (self._clock.now_ms() - self._began_ms) / 1000
        wrong = [one for one in self.checked if not one.holds]
        if wrong:
            told = (f"{len(wrong)} of {len(self.checked)} do not hold: {', '.join(one.name for one in wrong)}.", "bold red")
        else:
            told = (f"{len(self.checked)} of {len(self.checked)} checks hold.", "bold green")
        self._console.print(Text.assemble("\n", told, f" {passed_s:.0f} s."))
