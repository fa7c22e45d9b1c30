"""How are the answers of the HTTP API read? A decoder for each shape, and one for any kind. Nothing is asked here."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

import msgspec

from remit.model.answers import (
    AccountItem,
    ApplyAnswer,
    AuditItem,
    DeleteAnswer,
    EndpointItem,
    ListOf,
    NodeTop,
    PlanAnswer,
    ReplicaTop,
    RotateAnswer,
)
from remit.model.claims import Verdict
from remit.model.objects import AnyObject, dec_hook

O = TypeVar("O", bound=AnyObject)  # noqa: E741 - it stands for an object


class Items(msgspec.Struct):
    """Many that were listed without a revision of their own."""


class NodeTops(Items):
    items: list[NodeTop]


class ReplicaTops(Items):
    items: list[ReplicaTop]


class Accounts(Items):
    items: list[AccountItem]


class Audits(Items):
    items: list[AuditItem]


class Verdicts(msgspec.Struct):
    verdicts: list[Verdict]


deleted: msgspec.json.Decoder[DeleteAnswer] = msgspec.json.Decoder(DeleteAnswer)
applied: msgspec.json.Decoder[ApplyAnswer] = msgspec.json.Decoder(ApplyAnswer)
planned: msgspec.json.Decoder[PlanAnswer] = msgspec.json.Decoder(PlanAnswer)
rotated: msgspec.json.Decoder[RotateAnswer] = msgspec.json.Decoder(RotateAnswer)
judged: msgspec.json.Decoder[Verdicts] = msgspec.json.Decoder(Verdicts)
plain: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])
node_tops: msgspec.json.Decoder[NodeTops] = msgspec.json.Decoder(NodeTops)
replica_tops: msgspec.json.Decoder[ReplicaTops] = msgspec.json.Decoder(ReplicaTops)
accounts: msgspec.json.Decoder[Accounts] = msgspec.json.Decoder(Accounts)
audits: msgspec.json.Decoder[Audits] = msgspec.json.Decoder(Audits)
endpoint_ones: msgspec.json.Decoder[EndpointItem] = msgspec.json.Decoder(EndpointItem)
endpoint_lists: msgspec.json.Decoder[ListOf[EndpointItem]] = msgspec.json.Decoder(ListOf[EndpointItem])


@cache
def _decoder(of: Any) -> Any:
    return msgspec.json.Decoder(of, dec_hook=dec_hook)


def ones(kind: type[O]) -> msgspec.json.Decoder[O]:
    of: Any = kind
    decoder: msgspec.json.Decoder[O] = _decoder(of)
    return decoder


def lists(kind: type[O]) -> msgspec.json.Decoder[ListOf[O]]:
    generic: Any = ListOf
    decoder: msgspec.json.Decoder[ListOf[O]] = _decoder(generic[kind])
    return decoder
