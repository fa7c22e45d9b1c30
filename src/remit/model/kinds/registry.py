"""Registry of all kinds, in the order in which objects refer to each other.

A kind comes after the kinds that its objects refer to. Objects are applied in this order, and rows are loaded and listed in
it.
"""

from __future__ import annotations

from typing import Final

from remit.model.kinds.allotment import ALLOTMENT, Allotment
from remit.model.kinds.config import CONFIG, Config
from remit.model.kinds.definition import KindDefinition
from remit.model.kinds.node import NODE, Node
from remit.model.kinds.node_pool import NODE_POOL, NodePool
from remit.model.kinds.override import OVERRIDE, Override
from remit.model.kinds.policy import POLICY, Policy
from remit.model.kinds.priority_class import PRIORITY_CLASS, PriorityClass
from remit.model.kinds.region import REGION, Region
from remit.model.kinds.secret import SECRET, Secret
from remit.model.kinds.tenant import TENANT, Tenant
from remit.model.kinds.token import TOKEN, Token
from remit.model.kinds.workload import WORKLOAD, Workload
from remit.model.records import (
    DECISION,
    EVENT,
    GENERATION,
    GRANT,
    LEASE,
    PEER,
    POLICY_REVISION,
    REPLICA,
    SUMMARY,
    Decision,
    Event,
    Generation,
    Grant,
    Lease,
    Peer,
    PolicyRevision,
    Replica,
    Summary,
)

AnyObject = (
    Region | NodePool | Node | PriorityClass | Tenant | Policy | PolicyRevision | Config | Secret | Workload | Generation
    | Grant | Replica | Allotment | Override | Token | Peer | Lease | Summary | Decision | Event
)  # fmt: skip

DEFINITIONS: Final[tuple[KindDefinition, ...]] = (
    REGION, NODE_POOL, NODE, PRIORITY_CLASS, TENANT, POLICY, POLICY_REVISION, CONFIG, SECRET, WORKLOAD, GENERATION, GRANT,
    REPLICA, ALLOTMENT, OVERRIDE, TOKEN, PEER, LEASE, SUMMARY, DECISION, EVENT,
)  # fmt: skip

BY_KIND: Final = {definition.kind: definition for definition in DEFINITIONS}
BY_STRUCT: Final = {definition.struct: definition for definition in DEFINITIONS}
BY_PREFIX: Final = {definition.prefix: definition for definition in DEFINITIONS}
"""By the first part of the keys."""
