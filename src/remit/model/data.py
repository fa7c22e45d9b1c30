"""What do people write down for replicas to read? Secrets and configs: texts by name; frozen structs, as in kinds.py."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from remit.model.fields import FileName, Metadata, Object, Record
from remit.model.limits import limited
from remit.model.sealed import PLAIN_SIGNS_MAX, SEALED_SIGNS_MAX, PlainLength


class DataSpec(Record, frozen=True):
    data: Annotated[dict[FileName, Annotated[str, Meta(max_length=PLAIN_SIGNS_MAX)]], Meta(max_length=256)] = field(
        default_factory=dict
    )


class SecretSpec(Record, frozen=True):
    """What is stored of each value is sealed (sealed.py); nobody is shown it, and it goes only to the nodes that need it."""

    data: Annotated[
        dict[FileName, Annotated[str, limited(PlainLength(), max_length=SEALED_SIGNS_MAX)]], Meta(max_length=256)
    ] = field(default_factory=dict)


class SecretStatus(Record, frozen=True):
    """Told of it, and never stored: how many bytes each value has."""

    sizes: dict[str, int] = field(default_factory=dict)


class Secret(Object, tag="Secret", frozen=True, kw_only=True):
    metadata: Metadata
    spec: SecretSpec
    status: SecretStatus = SecretStatus()


class Config(Object, tag="Config", frozen=True, kw_only=True):
    metadata: Metadata
    spec: DataSpec
