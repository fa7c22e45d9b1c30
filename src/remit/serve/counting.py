"""How many requests were answered, how, and how quickly? Counted on the way; the names of routes are the only names kept.

Nothing that an asker writes becomes the name of a count: a path that leads nowhere counts under `none`, and a method or a code
that is not in the table of its kind under `other`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from remit.model.tallies import OTHER, SECONDS, Buckets, Counts
from remit.serve.routes import Route
from remit.world.clock import stopwatch_ns

NOWHERE: Final = "none"
METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"))
CLASSES: Final = ("1xx", "2xx", "3xx", "4xx", "5xx")
TOO_MANY: Final = 429
_TENANT: Final = "{tenant}"
GONE: Final = "gone"
"""Of an asker who left before it was answered."""


class Requests:
    """Of one server. One request costs two readings of a clock and three additions."""

    def __init__(self, now_ns: Callable[[], int] = stopwatch_ns) -> None:
        self.now_ns = now_ns
        self.under_way = 0
        self.counts: dict[tuple[str, str, str], int] = {}
        """By route, method and class of status."""
        self.took: dict[str, Buckets] = {}
        """By route; of what streams, nothing: it lasts for as long as the asker listens."""
        self.problems = Counts()
        self.throttled = Counts()
        """By flow: who was told to come back later."""

    def refused(self, code: str, status: int, route: Route | None) -> None:
        """It is answered with a problem."""
        self.problems.add(code)
        if status == TOO_MANY and route is not None:
            self.throttled.add("first" if route.first else "tenants" if _TENANT in route.path else "scope")

    def began(self) -> int:
        self.under_way += 1
        return self.now_ns()

    def ended(self, began_ns: int, route: str, method: str, status: int, *, streams: bool = False) -> float:
        """Answers how many seconds it took. `status` 0: nobody was there to be answered."""
        self.under_way -= 1
        took_s = (self.now_ns() - began_ns) / 1e9
        kind = CLASSES[status // 100 - 1] if 100 <= status < 600 else GONE
        key = route, method if method in METHODS else OTHER, kind
        self.counts[key] = self.counts.get(key, 0) + 1
        if not streams:
            spread = self.took.get(route)
            if spread is None:
                spread = self.took[route] = Buckets(SECONDS)
            spread.add(took_s)
        return took_s
