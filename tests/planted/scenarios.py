"""Scenarios in which planted bugs are tried: short rough ones, and built-in ones. Each is clean without a bug."""

from __future__ import annotations

from typing import Final

import pytest
from msgspec.structs import replace

from remit.commitment import authority, outcomes
from remit.model.kinds import Tenant
from remit.model.policies import TenantLimits
from remit.simulate.actors import policy_publishers, users
from remit.simulate.scenarios import Scenario, load, parse
from remit.simulate.world.runner import SimProgram

_BUSY: Final = """
[load]
per_minute = 30.0
standing_max = 14
kinds = ["job", "job", "service", "gang", "urgent", "device"]
fence = "10s"
"""

TEXTS: Final[dict[str, str]] = {
    # No faults: only heavy load, and claims that must be refused.
    "crowd": """
summary = "few nodes, much work, and a meddler"
duration = "3m"
heal = "0s"
[cluster]
nodes = 3
agents = 3
meddlers = 1
"""
    + _BUSY,
    "meddlers": """
summary = "several meddlers with invalid claims, a little work, and no scheduler that is faster"
duration = "4m"
heal = "0s"
[cluster]
nodes = 4
agents = 2
meddlers = 4
schedulers = 0
guessers = 1
[load]
per_minute = 10.0
[holds]
liveness = false
""",
    "errands": """
summary = "the same for longer: a repeated requeue must be faster than every transition that ends it, which is rare"
duration = "8m"
heal = "0s"
[cluster]
nodes = 4
agents = 2
meddlers = 4
schedulers = 0
guessers = 1
[load]
per_minute = 10.0
[holds]
liveness = false
""",
    "one-node": """
summary = "work with anti-affinity, one node, and a scheduler that guesses"
duration = "2m"
heal = "0s"
[cluster]
nodes = 1
agents = 1
guessers = 1
[load]
per_minute = 20.0
kinds = ["spread"]
""",
    "six-nodes": """
summary = "work with topology spread, more nodes than zones, and a scheduler that guesses"
duration = "2m"
heal = "0s"
[cluster]
guessers = 1
[load]
per_minute = 30.0
kinds = ["spread"]
""",
    # Contention for the same few resources.
    "contest": """
summary = "work with devices, gangs and preemption, and a scheduler that guesses nodes"
duration = "3m"
heal = "0s"
[cluster]
nodes = 3
agents = 3
guessers = 1
[load]
per_minute = 40.0
standing_max = 30
kinds = ["device", "urgent", "gang", "spread", "job"]
size = 3
""",
    "guesses": """
summary = "only a scheduler that guesses, and uses every grant it is offered"
duration = "3m"
heal = "0s"
[cluster]
nodes = 3
agents = 3
schedulers = 0
guessers = 1
[load]
per_minute = 40.0
standing_max = 30
kinds = ["device", "urgent", "gang", "spread", "job"]
size = 3
[holds]
liveness = false
""",
    "unplaceable": """
summary = "work that fits nowhere, and a little that does"
duration = "2m"
heal = "1m"
[cluster]
nodes = 2
agents = 1
[load]
per_minute = 20.0
standing_max = 30
kinds = ["impossible", "impossible", "job"]
size = 2
quota = 10000
deletes = 0
operations = 0
""",
    "takeovers": """
summary = "authorities that crash, freeze and resume, over fast links with repeats and losses"
duration = "3m"
heal = "0s"
[cluster]
servers = 3
controllers = 2
schedulers = 2
beat = "500ms"
[[faults]]
kind = "kill-leader"
every = "20s"
lasts = "5s"
[[faults]]
kind = "freeze-leader"
every = "25s"
lasts = "8s"
[[faults]]
kind = "freeze"
every = "15s"
lasts = "12s"
[[faults]]
kind = "loss"
every = "30s"
lasts = "15s"
size = 0.2
"""
    + _BUSY,
    "lost-answers": """
summary = "a store that applies commits without an answer, at once or late"
duration = "3m"
heal = "0s"
[[faults]]
kind = "answers-lost"
every = "15s"
lasts = "10s"
size = 0.5
[[faults]]
kind = "applied-late"
every = "15s"
lasts = "10s"
size = 0.5
[[faults]]
kind = "repeats"
every = "30s"
lasts = "20s"
size = 0.4
[[faults]]
kind = "loss"
every = "30s"
lasts = "20s"
size = 0.2
"""
    + _BUSY,
    "cut-nodes": """
summary = "nodes partitioned for longer than the fence, also while no authority leads"
duration = "4m"
heal = "0s"
[cluster]
nodes = 6
agents = 6
servers = 3
[[faults]]
kind = "cut-node"
every = "20s"
lasts = "45s"
[[faults]]
kind = "slow-links"
every = "15s"
lasts = "25s"
size = 5.0
[[faults]]
kind = "kill-leader"
every = "60s"
lasts = "5s"
[[faults]]
kind = "kill-agent"
every = "30s"
lasts = "5s"
[[faults]]
kind = "cut-store"
every = "60s"
lasts = "40s"
"""
    + _BUSY,
    "late-renewals": """
summary = "renewals answered almost too late, on nodes that are then partitioned"
duration = "4m"
heal = "0s"
[cluster]
nodes = 9
agents = 9
beat = "1s"
[load]
per_minute = 30.0
standing_max = 20
kinds = ["job", "service"]
fence = "12s"
operations = 0
[[faults]]
kind = "slow-links"
every = "2s"
lasts = "10s"
size = 2.6
[[faults]]
kind = "cut-node"
every = "10s"
lasts = "24s"
""",
    "restores": """
summary = "restores of old backups while work is being placed"
duration = "150s"
heal = "0s"
[cluster]
controllers = 2
beat = "1s"
[[faults]]
kind = "backup"
every = "20s"
[[faults]]
kind = "restore"
every = "50s"
[[faults]]
kind = "kill-controllers"
every = "12s"
lasts = "12s"
[[faults]]
kind = "kill-agent"
every = "5s"
lasts = "2s"
[[faults]]
kind = "cut-node"
every = "40s"
lasts = "40s"
"""
    + _BUSY,
    "stale-observers": """
summary = "observers that crash and return to a lagging store member"
duration = "3m"
heal = "0s"
[[faults]]
kind = "stale-reads"
every = "20s"
lasts = "20s"
size = 15.0
[[faults]]
kind = "events-lost"
every = "30s"
lasts = "20s"
[[faults]]
kind = "kill-scheduler"
every = "20s"
lasts = "3s"
[[faults]]
kind = "kill-controllers"
every = "20s"
lasts = "3s"
[[faults]]
kind = "kill-agent"
every = "20s"
lasts = "3s"
"""
    + _BUSY,
    "unheard": """
summary = "claims or answers of a scheduler are lost until the end; then no more faults"
duration = "100s"
heal = "100s"
[cluster]
nodes = 6
[load]
per_minute = 40.0
standing_max = 30
kinds = ["job", "service"]
deletes = 5
operations = 0
[[faults]]
kind = "unanswered"
every = "25s"
lasts = "13s"
[[faults]]
kind = "unanswered"
at = "86s"
lasts = "13s"
""",
    "unwell": """
summary = "services that become unhealthy after a while, and agents that are killed once"
duration = "4m"
heal = "0s"
[cluster]
nodes = 12
agents = 2
[load]
per_minute = 40.0
standing_max = 40
size = 1
kinds = ["service"]
deletes = 0
operations = 0
[[faults]]
kind = "kill-agent"
at = "120s"
lasts = "3s"
[[faults]]
kind = "kill-agent"
at = "150s"
lasts = "3s"
""",
    "deleted-unseen": """
summary = "workloads deleted while their controller is away, which schedulers see late"
duration = "3m"
heal = "0s"
[[faults]]
kind = "events-late"
every = "10s"
lasts = "15s"
size = 0.9
[[faults]]
kind = "stale-reads"
every = "20s"
lasts = "20s"
size = 15.0
[[faults]]
kind = "kill-scheduler"
every = "15s"
lasts = "2s"
[[faults]]
kind = "kill-controllers"
every = "12s"
lasts = "12s"
"""
    + _BUSY
    + "deletes = 55\n",
    "recovery": """
summary = "partitioned nodes, lost events, crashing authorities; then no faults, and work must progress"
duration = "2m"
heal = "4m"
[cluster]
nodes = 4
agents = 4
[load]
per_minute = 20.0
standing_max = 10
kinds = ["job", "job", "gang", "urgent", "device"]
fence = "10s"
[[faults]]
kind = "cut-node"
every = "30s"
lasts = "40s"
[[faults]]
kind = "events-lost"
every = "20s"
lasts = "20s"
[[faults]]
kind = "kill-leader"
every = "40s"
lasts = "5s"
""",
    "full-house": """
summary = "more work than capacity, and urgent work that preempts; then nothing new"
duration = "90s"
heal = "3m"
[cluster]
nodes = 2
agents = 2
[load]
per_minute = 40.0
standing_max = 14
kinds = ["job", "job", "urgent"]
size = 3
operations = 0
""",
    "poor": """
summary = "tenants that request far more than their quota; then nothing new"
duration = "30s"
heal = "95s"
[cluster]
nodes = 4
[load]
per_minute = 30.0
kinds = ["job", "service"]
quota = 5
deletes = 0
operations = 0
""",
    "much-is-asked": """
summary = "ample capacity and much work: most of it waits only for the scheduler"
duration = "5m"
heal = "0s"
[cluster]
nodes = 10
agents = 5
[load]
per_minute = 20.0
standing_max = 30
size = 3
kinds = ["job", "job", "service"]
operations = 0
""",
    "left-behind": """
summary = "nodes partitioned until their replicas are lost, which then return"
duration = "100s"
heal = "150s"
[cluster]
nodes = 4
agents = 4
[load]
per_minute = 20.0
standing_max = 8
kinds = ["service"]
operations = 0
[[faults]]
kind = "cut-node"
every = "15s"
lasts = "60s"
""",
    "the-leader-dies": """
summary = "the active authority crashes once and is back soon"
duration = "40s"
heal = "1m"
[cluster]
nodes = 2
agents = 1
[load]
per_minute = 6.0
[[faults]]
kind = "kill-leader"
at = "35s"
lasts = "3s"
""",
    "services": """
summary = "a few services without faults"
duration = "30s"
heal = "95s"
[cluster]
nodes = 3
agents = 3
[load]
per_minute = 10.0
standing_max = 4
kinds = ["service"]
size = 1
operations = 0
""",
    "drains": """
summary = "services that allow one disruption, on nodes that are drained and uncordoned, during rollouts"
duration = "3m"
heal = "0s"
[cluster]
nodes = 6
agents = 6
[load]
per_minute = 30.0
standing_max = 10
kinds = ["steadfast"]
deletes = 5
operations = 50
""",
    "a-core-is-left": """
summary = "one server and one node stay away for good"
duration = "2m"
heal = "3m"
[cluster]
nodes = 4
agents = 4
servers = 3
[load]
per_minute = 20.0
standing_max = 10
kinds = ["job", "job", "gang", "urgent"]
fence = "10s"
[holds]
core = true
""",
    "all-silent": """
summary = "every node falls silent at once, and comes back"
duration = "3m"
heal = "0s"
[[faults]]
kind = "all-silent"
at = "60s"
lasts = "60s"
[[faults]]
kind = "all-silent"
at = "120s"
lasts = "60s"
"""
    + _BUSY,
    "short-windows": """
summary = "outcomes expire after a few seconds, and messages are repeated later"
duration = "3m"
heal = "0s"
[[faults]]
kind = "repeats"
every = "15s"
lasts = "15s"
size = 0.5
[[faults]]
kind = "delays"
every = "15s"
lasts = "15s"
size = 8.0
"""
    + _BUSY,
    "small-batches": """
summary = "batches of three on a slow store: the next is decided while one is being written"
duration = "2m"
heal = "0s"
[cluster]
nodes = 4
batch = 3
people = 2
schedulers = 2
controllers = 2
rivals = true
[[faults]]
kind = "slow-store"
every = "15s"
lasts = "20s"
size = 0.4
[[faults]]
kind = "repeats"
every = "20s"
lasts = "15s"
size = 0.4
"""
    + _BUSY,
    "two-scopes": """
summary = "a region with quota and policies from a parent scope, partitioned from it now and then"
duration = "6m"
heal = "0s"
[cluster]
scopes = ["planet", "west"]
nodes = 4
agents = 2
[[faults]]
kind = "cut-scopes"
every = "90s"
lasts = "60s"
"""
    + _BUSY,
    "lapsed-policies": """
summary = "a region partitioned from its parent scope for longer than a policy lease"
duration = "6m"
heal = "0s"
[cluster]
scopes = ["planet", "west"]
nodes = 4
agents = 2
[[faults]]
kind = "cut-scopes"
at = "60s"
lasts = "240s"
"""
    + _BUSY,
    "lapsed-grants": """
summary = "a region partitioned from its parent scope for longer than its grants"
duration = "5m"
heal = "0s"
[cluster]
scopes = ["planet", "west"]
nodes = 4
agents = 2
beat = "1s"
[[faults]]
kind = "cut-scopes"
at = "100s"
lasts = "180s"
"""
    + _BUSY,
    "two-scopes-restored": """
summary = "a region and its parent scope, each restored from a backup now and then"
duration = "4m"
heal = "0s"
[cluster]
scopes = ["planet", "west"]
nodes = 4
agents = 2
beat = "500ms"
[[faults]]
kind = "backup"
every = "15s"
[[faults]]
kind = "restore"
every = "50s"
[load]
per_minute = 15.0
standing_max = 8
""",
    "admitted": """
summary = "tenants at their limits, and policies that permit less than is requested"
duration = "90s"
heal = "60s"
[cluster]
nodes = 6
agents = 3
beat = "1s"
[load]
per_minute = 120
standing_max = 30
quota = 10000
kinds = ["urgent", "urgent", "job", "service"]
operations = 0
deletes = 10
""",
}


def world(name: str, patch: pytest.MonkeyPatch) -> Scenario:
    """The scenario, with its patches of the product, the same with and without a bug."""
    if name == "short-windows":
        # A retention of ten minutes becomes a few seconds, so that ids expire within a run.
        patch.setattr(authority, "WINDOW_MS", 1_000)
        patch.setattr(outcomes, "WINDOWS_RETAINED", 4)
    if name == "late-renewals":
        # Programs ignore SIGTERM: past its deadline a process runs until it is killed.
        patch.setattr(users, "SimProgram", lambda runs_ms, code, stop_ms: SimProgram(runs_ms, code, None))
    if name == "admitted":
        # Tenants have low limits, and policies forbid urgent work while it would preempt.
        tenant = users.Users._tenant

        def limited(self: users.Users, name: str, percent: int) -> Tenant:
            made = tenant(self, name, percent)
            return replace(made, spec=replace(made.spec, limits=TenantLimits(workloads=4, replicas=12)))

        patch.setattr(users.Users, "_tenant", limited)
    if name == "lapsed-grants":
        # Policy leases would expire first, and then nothing is placed at all.
        patch.setattr(policy_publishers, "TTL_BEATS", 3_600)
    return parse(name, TEXTS[name]) if name in TEXTS else load(name)
