"""Which flow does a request belong to, what does it cost, and how much may its tenant spend? No body is read here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from remit.model.identity import Principal
from remit.model.kinds import Tenant, Workload
from remit.model.objects import AnyObject, key_of
from remit.model.policies import TenantLimits
from remit.serve.desk import Desk
from remit.serve.heads import Headers
from remit.serve.routes import DEAR, Route
from remit.serve.turns import EXPENSIVE, Rate

COST_BYTES: Final = 4 << 10
"""Of a body: judging so many costs about as much as one more request."""
SELECTING: Final = 4
"""What a selector adds: every object of the kind is looked at."""
SCANNED_SEATS: Final = 48
"""Of what looks at every object of a kind: a few at a time, for each works for long."""
SEAT_ITEMS: Final = 25
SEAT_BYTES: Final = 16 << 10
"""So many items of a list, or bytes of a body, take one seat more."""
DEAR_SEATS: Final = 16
REPLICAS_COST: Final = 10
"""To make so many replicas costs as much as one request: it is paid for by what comes next."""
_ORDINARY: Final = TenantLimits()


class Spending(NamedTuple):
    """`cost` in turns, with so many `seats`; `drawn` of it on the bucket of the flow, which fills at `rate`."""

    flow: str
    cost: int
    seats: int
    drawn: int
    rate: Rate | None


def spending(route: Route, asker: Principal, query: Mapping[str, Any], headers: Headers, desk: Desk) -> Spending:
    flow, tenant = flow_of(asker)
    cost, seats = cost_of(route, query, headers), seats_of(route, query, headers)
    if not tenant:
        return Spending(flow, cost, seats, 0, None)
    drawn = cost if route.method != "GET" or cost >= EXPENSIVE else 0
    return Spending(flow, cost, seats, drawn, rate_of(desk, tenant))


def flow_of(asker: Principal) -> tuple[str, str]:
    """Whose turn it takes, and the tenant whose bucket it draws on: none for those who answer for no tenant."""
    return (f"tenant {asker.tenant}", asker.tenant) if asker.tenant else (f"person {asker.subject}", "")


def cost_of(route: Route, query: Mapping[str, Any], headers: Headers) -> int:
    cost = route.cost
    if route.method == "GET":
        return cost + (SELECTING if _selects(query) else 0)
    announced = headers.get("content-length", "")
    return cost + sized(int(announced[:12]) if announced.isdigit() else 0)


def seats_of(route: Route, query: Mapping[str, Any], headers: Headers) -> int:
    """How many seats it takes: as many as small requests could be answered meanwhile, roughly."""
    least = DEAR_SEATS if route.cost >= DEAR else 1
    if route.method != "GET":
        announced = headers.get("content-length", "")
        return least + min(SCANNED_SEATS, (int(announced[:12]) if announced.isdigit() else 0) // SEAT_BYTES)
    if query.get("watch"):
        return least
    if _selects(query):
        return SCANNED_SEATS
    return least + (query.get("limit") or 0) // SEAT_ITEMS


def _selects(query: Mapping[str, Any]) -> bool:
    return bool(query.get("labelSelector") or query.get("fieldSelector"))


def sized(size: int) -> int:
    """What a body of so many bytes costs."""
    return size // COST_BYTES


def rate_of(desk: Desk, tenant: str) -> Rate:
    found = desk.board.get(key_of("Tenant", tenant))
    limits = found.spec.limits if isinstance(found, Tenant) else _ORDINARY
    return Rate(limits.requests_per_second, limits.requests_burst)


def replicas_cost(things: Iterable[AnyObject]) -> int:
    """What the replicas cost that are made for these."""
    return sum(thing.spec.replicas or 0 for thing in things if isinstance(thing, Workload)) // REPLICAS_COST
