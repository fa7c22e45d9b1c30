"""Rate limits of API requests: token buckets, request cost, and fair queuing per tenant (deficit round robin).

Every request belongs to a **flow**: the tenant of the caller, or the caller itself if it has no tenant. Three limits protect
other flows from one that sends too much. Each answers 429 with Retry-After:

- *Token bucket*: writes and expensive reads of a tenant are limited to the rate and burst of its `spec.limits`. The check comes
  before the body is validated, which costs far more.
- *Queue*: each flow has a queue, and all queues together have a limit. Flows take turns, each by a deficit of cost, so that a
  flow that requests long lists gets no more CPU than one that requests short ones. When the queues are full together, only
  flows that use more than their share are rejected.
- *Seats*: a bounded number of requests runs at once, and no flow gets all seats, so that slow requests of one flow do not keep
  others out. A request that computes rather than waits, such as a long list, takes several seats.

Traffic that a scope depends on (heartbeats, leases, assignments, claims of schedulers and controllers) is never queued.

Each flow has its own queue; there is no shuffle sharding, which is for systems with more flows than queues. A server has a
few thousand tenants at most and an idle flow costs nothing, so a flood only ever delays its own tenant.

Request bodies are not read here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from remit.model.identity import Principal
from remit.model.kinds import Tenant, TenantLimits, Workload
from remit.model.kinds.registry import AnyObject
from remit.model.objects import key_of
from remit.observation.watch_cache import WatchCache
from remit.serve.http.replies import ApiProblem
from remit.serve.http.request_checks import Headers
from remit.serve.http.routes import TRIAL_COST, Route
from remit.world.interfaces import Clock

SEATS: Final = 256
"""Seats in all: as many small requests run at once, enough to fill a batch of the authority."""
FLOW_SEATS_MAX: Final = 192
"""Seats that one flow may hold."""
PASSED_OVER_MAX: Final = 64
"""How often a request that needs more seats than are free can be passed over by smaller ones. After that, freed seats are kept
for it.
"""
WAITING_MAX: Final = 1_000
FLOW_WAITING_MAX: Final = 256
QUANTUM: Final = 8
"""Cost that a flow may spend in one round."""
COST_MAX: Final = 64
METERED_READ_COST: Final = 5
"""Reads of at least this cost take tokens from the bucket, like writes."""
FLOWS_MAX: Final = 4_096
RETRY_MS_MIN: Final = 1_000
RETRY_MS_MAX: Final = 60_000
PACE_WEIGHT: Final = 0.2
"""Weight of the latest interval in the moving average of the time between two answers of a flow."""


class Rate(NamedTuple):
    """Refill rate and size of a token bucket."""

    per_second: int
    burst: int


class QueuedRequest(NamedTuple):
    """A request waiting in its flow's queue. `granted` is resolved when it gets its seats."""

    cost: int
    seats: int
    granted: asyncio.Future[None]


class Flow:
    """State of one flow: its queue, the seats it holds, and its token bucket."""

    __slots__ = (
        "answered_ms",
        "debt",
        "deficit",
        "name",
        "pace_ms",
        "passed_over",
        "refilled_ms",
        "seats",
        "tokens",
        "waiting",
    )

    def __init__(self, name: str, now_ms: int) -> None:
        self.name = name
        self.waiting: deque[QueuedRequest] = deque()
        self.deficit = 0
        self.seats = 0
        self.passed_over = 0
        """How often others passed the request at the head of the queue because too few seats were free."""
        self.tokens: float | None = None
        """None: nothing taken yet, so the bucket is full. Negative: requests cost more than was known in advance."""
        self.debt = 0.0
        """Cost of recently rejected requests. They are retried too, so Retry-After spreads them out."""
        self.refilled_ms = now_ms
        self.answered_ms = now_ms
        self.pace_ms = 10.0

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.seats

    def take_tokens(self, cost: int, rate: Rate, now_ms: int) -> int:
        """Take `cost` tokens. Return 0 if there were enough, else the time in milliseconds until there will be."""
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
        """Take tokens for cost found after admission, down to minus one burst. Later requests wait for it."""
        tokens = float(rate.burst) if self.tokens is None else self.tokens
        self.tokens = max(tokens - cost, float(-rate.burst))

    def record_answer(self, now_ms: int) -> None:
        """Record that a request was answered. The time between answers predicts how fast the queue moves."""
        self.pace_ms += PACE_WEIGHT * (now_ms - self.answered_ms - self.pace_ms)
        self.answered_ms = now_ms


class FairQueue:
    """The queues of one server. `admit` is called before the body is read, `acquire` when it is complete: a request whose body
    is still being received holds no seats.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._flows: dict[str, Flow] = {}
        self._ring: deque[Flow] = deque()
        """Flows with waiting requests, in the order of their turns."""
        self._free_seats = SEATS
        self.waiting = 0

    def admit(self, name: str, cost: int, rate: Rate | None) -> Flow:
        """Return the flow after taking `cost` tokens. Raises `ApiProblem` if its bucket is empty or its queue is full."""
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
            detail = f"{_flow_label(flow.name)} has {flow_waiting} requests waiting, the maximum is {FLOW_WAITING_MAX}"
            raise _too_many("throttled", detail, flow_waiting * flow.pace_ms)
        if self.waiting >= WAITING_MAX:
            flows = len(self._ring) + (not flow_waiting)
            if flow_waiting >= max(1, WAITING_MAX // flows) or self.waiting >= 2 * WAITING_MAX:
                detail = f"{self.waiting} requests are waiting, {flow_waiting} of them of {_flow_label(flow.name)}"
                raise _too_many("overloaded", detail, max(flow_waiting, 1) * flow.pace_ms)

    def release(self, flow: Flow, seats: int) -> None:
        """Return the seats of a request and assign them to waiting ones."""
        self._free_seats += seats
        flow.seats -= seats
        flow.record_answer(self._clock.now_ms())
        if self._ring:
            self._assign_seats()

    async def acquire(self, flow: Flow, cost: int, seats: int = 1) -> _Seats:
        """Wait for seats. Use it as `with await queue.acquire(flow, cost):`, which returns them."""
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
                self.release(flow, seats)  # seats were granted in the same moment: return them
            raise
        return _Seats(self, flow, seats)

    def _assign_seats(self) -> None:
        """Assign free seats to waiting requests by deficit round robin."""
        skipped = 0
        while self._free_seats and skipped < len(self._ring):
            flow = self._ring[0]
            while flow.waiting and flow.waiting[0].granted.done():
                _ = self._dequeue(flow)  # its waiter was cancelled
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
                    return  # keep the free seats for it
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
        """Drop flows that have been idle long enough for their buckets to be full, or nearly."""
        for name, flow in list(self._flows.items()):
            if flow.is_idle and now_ms - max(flow.refilled_ms, flow.answered_ms) > RETRY_MS_MAX:
                del self._flows[name]


class _Seats:
    """The seats of one request, returned at the end of the context."""

    __slots__ = ("_flow", "_queue", "_seats")

    def __init__(self, queue: FairQueue, flow: Flow, seats: int) -> None:
        self._queue, self._flow, self._seats = queue, flow, seats

    def __enter__(self) -> None:
        return

    def __exit__(self, *raised: object) -> None:
        self._queue.release(self._flow, self._seats)


def _flow_label(name: str) -> str:
    return name or "the caller"


def _rate_exceeded(name: str, rate: Rate, wait_ms: int) -> ApiProblem:
    detail = f"{_flow_label(name)} exceeds {rate.per_second} requests per second (burst {rate.burst})"
    cure = "nothing was done; wait as long as Retry-After says, batch writes with /v1/apply, or ask an operator to raise "
    cure += "spec.limits.requestsPerSecond of the tenant"
    return _too_many("throttled", detail, wait_ms, cure)


def _too_many(
    code: str, detail: str, wait_ms: float, cure: str = "nothing was done; retry after the time in Retry-After"
) -> ApiProblem:
    wait_ms = min(max(int(wait_ms), RETRY_MS_MIN), RETRY_MS_MAX)
    return ApiProblem(429, code, detail, cure=cure, retry_after_ms=wait_ms)


BYTES_PER_COST: Final = 4 << 10
"""Validating this many bytes of a body costs about as much as one small request."""
SELECTOR_COST: Final = 4
"""Added for a selector: every object of the kind is examined."""
SCAN_SEATS: Final = 48
"""Seats of a request that examines every object of a kind: it computes for long, so only a few run at once."""
ITEMS_PER_SEAT: Final = 25
BYTES_PER_SEAT: Final = 16 << 10
"""One more seat for this many items of a list, or bytes of a body."""
TRIAL_SEATS: Final = 16
REPLICAS_PER_COST: Final = 10
"""Creating this many replicas costs as much as one request. It is charged after the write, and delays later requests."""
_DEFAULT_LIMITS: Final = TenantLimits()


class RequestCost(NamedTuple):
    """Cost of a request: `cost` and `seats` in the queue, and `tokens` taken from the bucket of the flow, which refills at
    `rate`.
    """

    flow: str
    cost: int
    seats: int
    tokens: int
    rate: Rate | None


def request_cost(
    route: Route, principal: Principal, query: Mapping[str, Any], headers: Headers, watch_cache: WatchCache
) -> RequestCost:
    flow, tenant = flow_of(principal)
    cost, seats = queue_cost(route, query, headers), seats_needed(route, query, headers)
    if not tenant:
        return RequestCost(flow, cost, seats, 0, None)
    drawn = cost if route.method != "GET" or cost >= METERED_READ_COST else 0
    return RequestCost(flow, cost, seats, drawn, tenant_rate(watch_cache, tenant))


def flow_of(principal: Principal) -> tuple[str, str]:
    """Return the flow of a caller, and the tenant whose bucket it uses: none for callers without a tenant."""
    return (f"tenant {principal.tenant}", principal.tenant) if principal.tenant else (f"user {principal.subject}", "")


def queue_cost(route: Route, query: Mapping[str, Any], headers: Headers) -> int:
    cost = route.cost
    if route.method == "GET":
        return cost + (SELECTOR_COST if _has_selector(query) else 0)
    content_length = headers.get("content-length", "")
    return cost + body_cost(int(content_length[:12]) if content_length.isdigit() else 0)


def seats_needed(route: Route, query: Mapping[str, Any], headers: Headers) -> int:
    """Return how many seats a request takes: roughly how many small requests could run in the same time."""
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
    """Return the cost of a body of `size` bytes."""
    return size // BYTES_PER_COST


def tenant_rate(watch_cache: WatchCache, tenant: str) -> Rate:
    stored = watch_cache.get(key_of("Tenant", tenant))
    limits = stored.spec.limits if isinstance(stored, Tenant) else _DEFAULT_LIMITS
    return Rate(limits.requests_per_second, limits.requests_burst)


def replica_creation_cost(objects: Iterable[AnyObject]) -> int:
    """Return the cost of creating the replicas of these objects."""
    return sum(obj.spec.replicas or 0 for obj in objects if isinstance(obj, Workload)) // REPLICAS_PER_COST
