"""Kind Region: a place with zones, its own authority and its own store."""

from __future__ import annotations

from typing import Annotated, Final

from remit.model.constraints import DistinctItems, constrained
from remit.model.kinds.definition import KindDefinition, ListColumn, sample
from remit.model.metadata import Metadata, Name, Object, ObjectStatus, Record, Text
from remit.model.roles import OPERATORS

PlaceNames = Annotated[tuple[Name, ...], constrained(DistinctItems(), max_length=64)]


class RegionSpec(Record, frozen=True):
    zones: PlaceNames = ()
    description: Text = ""


class Region(Object, tag="Region", frozen=True, kw_only=True):
    metadata: Metadata
    spec: RegionSpec = RegionSpec()
    status: ObjectStatus = ObjectStatus()


REGION: Final = KindDefinition(
    struct=Region,
    summary="a place with zones, its own authority and its own store",
    plural="regions",
    aliases=("rg",),
    declared_by=OPERATORS,
    tenant_readable=True,
    sample=sample("eu-central", {"zones": ["eu-central-a", "eu-central-b"]}),
    columns=(ListColumn("ZONES", "spec.zones", "names"), ListColumn("DESCRIPTION", "spec.description", fluid=True)),
)
