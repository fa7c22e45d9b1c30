"""Coverage of the state machines: counts of codes, transitions and claims for the soak's record, without judgement."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

from remit.simulate.checkers.judge import Judge


class Tallies:
    """Counters, appended as one JSON object to the file named by REMIT_SOAK_COUNTERS, if set."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.counted: Counter[str] = Counter()

    def count(self, what: str) -> None:
        self.counted[what] += 1

    def add(self, judge: Judge) -> None:
        self.counted["commits"] += sum(history.commits for history in judge.histories.values())
        for (was, now, _), n in judge.edges_seen.items():
            self.counted[f"{was or 'nothing'}->{now or 'nothing'}"] += n

    def write(self) -> None:
        place = os.environ.get("REMIT_SOAK_COUNTERS", "")
        if place:
            with Path(place).open("a") as file:
                file.write(json.dumps({f"{self.name} {what}": n for what, n in sorted(self.counted.items())}) + "\n")
        self.counted.clear()
