"""Kind Secret: values that only the replicas which mount them can read.

Values are stored sealed; the format is in model/secrets.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final

from msgspec import Meta, field

from remit.model.constraints import ConstraintViolation, FieldConstraint, constrained, text_of
from remit.model.kinds.definition import KindDefinition, ListColumn, sample
from remit.model.manifests.documents import DocumentNode
from remit.model.metadata import Condition, FileName, Metadata, Object, Record
from remit.model.problems import Path
from remit.model.roles import PEOPLE
from remit.model.secrets import PLAIN_CHARS_MAX, SEALED_CHARS_MAX, is_sealed


class PlainLengthMax(FieldConstraint):
    """Limits the length of a plain value. A sealed value is longer; its length was checked before it was sealed."""

    def violations(self, node: DocumentNode, path: Path) -> Iterator[ConstraintViolation]:
        text = text_of(node)
        if text is not None and len(text) > PLAIN_CHARS_MAX and not is_sealed(text):
            yield ConstraintViolation(
                node.position, path, f"{len(text)} characters are too many", f"use at most {PLAIN_CHARS_MAX}"
            )

    def schema(self) -> dict[str, Any]:
        return {}  # the schema is for manifests and cannot recognise sealed values


class SecretSpec(Record, frozen=True):
    """Values by key. Each value is stored sealed, is never shown, and is sent only to the nodes whose replicas need it."""

    data: Annotated[
        dict[FileName, Annotated[str, constrained(PlainLengthMax(), max_length=SEALED_CHARS_MAX)]], Meta(max_length=256)
    ] = field(default_factory=dict)


class SecretStatus(Record, frozen=True):
    """`sizes`, the size of each value in bytes, is computed for API responses and never stored."""

    sizes: dict[str, int] = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()


class Secret(Object, tag="Secret", frozen=True, kw_only=True):
    metadata: Metadata
    spec: SecretSpec
    status: SecretStatus = SecretStatus()


SECRET: Final = KindDefinition(
    struct=Secret,
    summary="values that only the replicas which mount them can read",
    plural="secrets",
    aliases=("sec",),
    declared_by=PEOPLE,
    tenanted=True,
    tenant_limit="secrets",
    sample=sample("risk-db", {"data": {"password": "correct horse battery staple"}}, "risk"),
    columns=(ListColumn("DATA", "spec.data", "count", right=True), ListColumn("KEYS", fluid=True)),
)
