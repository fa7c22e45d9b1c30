"""Fair queuing of API requests per tenant (deficit round robin), request cost, token buckets.

Tenants in turn, by what each request costs. What a request means is nobody's affair here.

Every request belongs to a **flow**: the tenant of whoever asks; somebody of no tenant is a flow alone. Three bounds stand
between a flow that floods and all the others, each told to the flooder with when to come back:

- *A bucket*: a tenant's writes, and its expensive reads, come at the rate and in the bursts of its `spec.limits`. A request
  beyond it is refused before its body is judged, which would cost far more.
- *A queue a flow, and one bound for all*: those who wait are taken in turn, flow after flow, each by a deficit of costs, so
  that one who asks for long lists gets no more of the processor than one who asks for short ones. When all queues together are
  full, only flows that have more than their share in them are refused.
- *Seats*: so many requests are under way at once, and no flow has all of them: who holds slow ones keeps nobody out. What works
  rather than waits, a long list say, takes as many seats as it keeps others waiting.

What keeps a scope alive (beats, leases, orders, the claims of schedulers and controllers) has no part in this: it never waits.

There is one queue a flow, and no shuffle-sharding: that is for when flows must share fewer queues than there are flows, so that
a hash decides whom a flood hurts. A server has some thousands of tenants at most and an idle flow costs it nothing, so each has
a queue of its own, and a flood hurts nobody but its own tenant.

No body is read here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from remit.model.identity import Principal
from remit.model.kinds import Tenant, Workload
from remit.model.objects import AnyObject, key_of
from remit.model.policies import TenantLimits
from remit.serve.http.replies import ApiProblem
from remit.serve.http.request_context import Headers
from remit.serve.http.routes import TRIAL_COST, Route
from remit.serve.server_context import ServerContext
from remit.world.interfaces import Clock

SEATS: Final = 256
"""So many seats there are: as many small requests are answered at once, enough to fill a batch of the authority."""
FLOW_SEATS_MAX: Final = 192
"""So many of them are one flow's."""
PASSED_OVER_MAX: Final = 64
"""So often those who need fewer seats go before one for whom there are not enough; then the seats that become free are kept."""
WAITING_MAX: Final = 1_000
FLOW_WAITING_MAX: Final = 256
QUANTUM: Final = 8
"""What a flow may spend in one turn."""
COST_MAX: Final = 64
METERED_READ_COST: Final = 5
"""A read of such a cost draws on the bucket as well."""
FLOWS_MAX: Final = 4_096
RETRY_MS_MIN: Final = 1_000
RETRY_MS_MAX: Final = 60_000
PACE_WEIGHT: Final = 0.2
"""How much the last answer says about how long a flow's answers take, against those before."""


class Rate(NamedTuple):
    """What a flow may spend: so much each second, and so much at once after a rest."""

    per_second: int
    burst: int


class QueuedRequest(NamedTuple):
    """One that waits for its turn: what it costs, how many seats it takes, and who is told."""

    cost: int
    seats: int
    granted: asyncio.Future[None]


class Flow:
    """One who asks: who of it waits, what it has under way, and what is left in its bucket."""

    __slots__ = ("refilled_ms", "debt", "deficit", "answered_ms", "name", "pace_ms", "passed_over", "seats", "tokens", "waiting")

    def __init__(self, name: str, now_ms: int) -> None:
        self.name = name
        self.waiting: deque[QueuedRequest] = deque()
        self.deficit = 0
        self.seats = 0
        self.passed_over = 0
        """How often others went before the first that waits, since there were not enough seats for it."""
        self.tokens: float | None = None
        """It has never drawn, so the bucket is full. Below nothing: more was taken than was announced."""
        self.debt = 0.0
        """What was refused of late: those come back too, one after another."""
        self.refilled_ms = now_ms
        self.answered_ms = now_ms
        self.pace_ms = 10.0

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.seats

    def take_tokens(self, cost: int, rate: Rate, now_ms: int) -> int:
        """0 if the bucket has that much, which is then taken; else in how many milliseconds it will."""
        cost = min(cost, rate.burst)
        gained = (now_ms - self.refilled_ms) * rate.per_second / 1_000
        self.refilled_ms = now_ms
        self.tokens = float(rate.burst) if self.tokens is None else min(float(rate.burst), self.tokens + gained)
        self.debt = max(0.0, self.debt - gained)
        if self.tokens >= cost:
            self.tokens -= cost
            return 0
        self.debt = min(self.debt + cost, rate.per_second * RETRY_MS_MAX / 1_000)
        return max(1, int((cost - self.tokens + self.debt) * 1_000 / rate.per_second))

    def charge(self, cost: int, rate: Rate) -> None:
        """It has cost so much more than it said: what comes next waits for that, up to a whole burst."""
        tokens = float(rate.burst) if self.tokens is None else self.tokens
        self.tokens = max(tokens - cost, float(-rate.burst))

    def record_answer(self, now_ms: int) -> None:
        """One more was. How far they are apart says when a queue will have moved on."""
        self.pace_ms += PACE_WEIGHT * (now_ms - self.answered_ms - self.pace_ms)
        self.answered_ms = now_ms


class FairQueue:
    """The flows of one server. `admit` is asked before a body is read, `turn` once it is whole: what has not come yet holds no
    seat.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._flows: dict[str, Flow] = {}
        self._ring: deque[Flow] = deque()
        """Flows of which somebody waits, in the order of their turns."""
        self._free_seats = SEATS
        self.waiting = 0

    def admit(self, name: str, cost: int, rate: Rate | None) -> Flow:
        """The flow that it belongs to. Raises `ApiProblem` if the flow has spent what it may, or waits for too much already."""
        now_ms = self._clock.now_ms()
        flow = self._flows.get(name)
        if flow is None:
            flow = self._flows[name] = Flow(name, now_ms)
            if len(self._flows) > FLOWS_MAX:
                self._drop_idle_flows(now_ms)
        self._check_queue(flow)
        wait_ms = flow.take_tokens(cost, rate, now_ms) if rate is not None and cost else 0
        if rate is not None and wait_ms:
            raise _rate_exceeded(name, rate, wait_ms)
        return flow

    def _check_queue(self, flow: Flow) -> None:
        flow_waiting = len(flow.waiting)
        if flow_waiting >= FLOW_WAITING_MAX:
            detail = f"{flow_waiting} requests of {_flow_label(flow.name)} wait for their turn already, {FLOW_WAITING_MAX} at most"
            raise _too_many("throttled", detail, flow_waiting * flow.pace_ms)
        if self.waiting >= WAITING_MAX:
            flows = len(self._ring) + (not flow_waiting)
            if flow_waiting >= max(1, WAITING_MAX // flows) or self.waiting >= 2 * WAITING_MAX:
                detail = f"{self.waiting} requests wait for their turn already, {flow_waiting} of them of {_flow_label(flow.name)}"
                raise _too_many("overloaded", detail, max(flow_waiting, 1) * flow.pace_ms)

    def release(self, flow: Flow, seats: int) -> None:
        """Its seats are free again."""
        self._free_seats += seats
        flow.seats -= seats
        flow.record_answer(self._clock.now_ms())
        if self._ring:
            self._assign_seats()

    async def acquire(self, flow: Flow, cost: int, seats: int = 1) -> _Seats:
        """Wait for as many seats. To be left again: `with await turns.turn(flow, cost):`"""
        seats = max(1, min(seats, SEATS, FLOW_SEATS_MAX))
        if self._free_seats >= seats and not flow.waiting and flow.seats + seats <= FLOW_SEATS_MAX and not self._ring:
            self._free_seats -= seats
            flow.seats += seats
            return _Seats(self, flow, seats)
        self._check_queue(flow)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not flow.waiting:
            self._ring.append(flow)
        flow.waiting.append(QueuedRequest(min(max(cost, 1), COST_MAX), seats, granted))
        self.waiting += 1
        self._assign_seats()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.release(flow, seats)  # it was given them as it left
            raise
        return _Seats(self, flow, seats)

    def _assign_seats(self) -> None:
        """Give the free seats to those whose turn it is."""
        skipped = 0
        while self._free_seats and skipped < len(self._ring):
            flow = self._ring[0]
            while flow.waiting and flow.waiting[0].granted.done():
                _ = self._dequeue(flow)  # it did not wait for its turn
            if not flow.waiting:
                flow.deficit = 0
                self._ring.popleft()
                continue
            first = flow.waiting[0]
            if flow.seats + first.seats > FLOW_SEATS_MAX:
                self._ring.rotate(-1)
                skipped += 1
            elif flow.deficit < first.cost:
                flow.deficit += QUANTUM
                self._ring.rotate(-1)
                skipped = 0
            elif self._free_seats < first.seats:
                if flow.passed_over >= PASSED_OVER_MAX:
                    return  # whoever is done next makes room for it
                flow.passed_over += 1
                self._ring.rotate(-1)
                skipped += 1
            else:
                flow.deficit -= first.cost
                flow.passed_over = 0
                self._free_seats -= first.seats
                flow.seats += first.seats
                self._dequeue(flow).set_result(None)
                skipped = 0

    def _dequeue(self, flow: Flow) -> asyncio.Future[None]:
        self.waiting -= 1
        return flow.waiting.popleft().granted

    def _drop_idle_flows(self, now_ms: int) -> None:
        """Flows that have rested for so long that their buckets are full again, or nearly."""
        for name, flow in list(self._flows.items()):
            if flow.is_idle and now_ms - max(flow.refilled_ms, flow.answered_ms) > RETRY_MS_MAX:
                del self._flows[name]


class _Seats:
    """One request, until it is answered."""

    __slots__ = ("_flow", "_seats", "_queue")

    def __init__(self, queue: FairQueue, flow: Flow, seats: int) -> None:
        self._queue, self._flow, self._seats = queue, flow, seats

    def __enter__(self) -> None:
        return

    def __exit__(self, *raised: object) -> None:
        self._queue.release(self._flow, self._seats)


def _flow_label(name: str) -> str:
    return name or "those without a tenant"


def _rate_exceeded(name: str, rate: Rate, wait_ms: int) -> ApiProblem:
    detail = f"{_flow_label(name)} asks for more than {rate.per_second} writes a second (after a burst of {rate.burst})"
    cure = "nothing was done; wait as long as Retry-After says, send many at once to /v1/apply, or ask an operator for more "
    cure += "(spec.limits.requestsPerSecond of the tenant)"
    return _too_many("throttled", detail, wait_ms, cure)


def _too_many(
    code: str, detail: str, wait_ms: float, cure: str = "nothing was done; ask again after the time named"
) -> ApiProblem:
    wait_ms = min(max(int(wait_ms), RETRY_MS_MIN), RETRY_MS_MAX)
    return ApiProblem(429, code, detail, cure=cure, retry_after_ms=wait_ms)


BYTES_PER_COST: Final = 4 << 10
"""Of a body: judging so many costs about as much as one more request."""
SELECTOR_COST: Final = 4
"""What a selector adds: every object of the kind is looked at."""
SCAN_SEATS: Final = 48
"""Of what looks at every object of a kind: a few at a time, for each works for long."""
ITEMS_PER_SEAT: Final = 25
BYTES_PER_SEAT: Final = 16 << 10
"""So many items of a list, or bytes of a body, take one seat more."""
TRIAL_SEATS: Final = 16
REPLICAS_PER_COST: Final = 10
"""To make so many replicas costs as much as one request: it is paid for by what comes next."""
_DEFAULT_LIMITS: Final = TenantLimits()


class RequestCost(NamedTuple):
    """`cost` in turns, with so many `seats`; `drawn` of it on the bucket of the flow, which fills at `rate`."""

    flow: str
    cost: int
    seats: int
    tokens: int
    rate: Rate | None


def request_cost(route: Route, principal: Principal, query: Mapping[str, Any], headers: Headers, server: ServerContext) -> RequestCost:
    flow, tenant = flow_of(principal)
    cost, seats = queue_cost(route, query, headers), seats_needed(route, query, headers)
    if not tenant:
        return RequestCost(flow, cost, seats, 0, None)
    drawn = cost if route.method != "GET" or cost >= METERED_READ_COST else 0
    return RequestCost(flow, cost, seats, drawn, tenant_rate(server, tenant))


def flow_of(principal: Principal) -> tuple[str, str]:
    """Whose turn it takes, and the tenant whose bucket it draws on: none for those who answer for no tenant."""
    return (f"tenant {principal.tenant}", principal.tenant) if principal.tenant else (f"person {principal.subject}", "")


def queue_cost(route: Route, query: Mapping[str, Any], headers: Headers) -> int:
    cost = route.cost
    if route.method == "GET":
        return cost + (SELECTOR_COST if _has_selector(query) else 0)
    content_length = headers.get("content-length", "")
    return cost + body_cost(int(content_length[:12]) if content_length.isdigit() else 0)


def seats_needed(route: Route, query: Mapping[str, Any], headers: Headers) -> int:
    """How many seats it takes: as many as small requests could be answered meanwhile, roughly."""
    seats = TRIAL_SEATS if route.cost >= TRIAL_COST else 1
    if route.method != "GET":
        content_length = headers.get("content-length", "")
        return seats + min(SCAN_SEATS, (int(content_length[:12]) if content_length.isdigit() else 0) // BYTES_PER_SEAT)
    if query.get("watch"):
        return seats
    if _has_selector(query):
        return SCAN_SEATS
    return seats + (query.get("limit") or 0) // ITEMS_PER_SEAT


def _has_selector(query: Mapping[str, Any]) -> bool:
    return bool(query.get("labelSelector") or query.get("fieldSelector"))


def body_cost(size: int) -> int:
    """What a body of so many bytes costs."""
    return size // BYTES_PER_COST


def tenant_rate(server: ServerContext, tenant: str) -> Rate:
    stored = server.watch_cache.get(key_of("Tenant", tenant))
    limits = stored.spec.limits if isinstance(stored, Tenant) else _DEFAULT_LIMITS
    return Rate(limits.requests_per_second, limits.requests_burst)


def replica_creation_cost(objects: Iterable[AnyObject]) -> int:
    """What the replicas cost that are made for these."""
    return sum(obj.spec.replicas or 0 for obj in objects if isinstance(obj, Workload)) // REPLICAS_PER_COST
