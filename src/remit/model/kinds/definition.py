"""Definition of a kind: everything about a kind that is data.

Every table of kinds is derived from the definitions (registry.py): keys and paths, JSON schemas, the order of apply and of
loading, the roles that may declare a kind, the columns of `remit get`, the names that commands accept. Behaviour that needs
more than data is in the package concerned, in one table by kind: rules between fields in manifests/field_rules.py, admission
and deletion in commitment/rulings/kind_rules.py, computed cells in cli/output/object_columns.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct, field

from remit.model.metadata import API_VERSION, Object, ObjectStatus
from remit.model.roles import Role

CellFormat = Literal["text", "count", "names", "yes-no"]
"""How a column shows its value: as text, by its number of items, by the first of its names, or as `yes` or `no`."""


class ListColumn(NamedTuple):
    """A column of `remit get`. `path` leads from the object to the value, such as `spec.region`; the cells of a column without
    a path are computed by the command line. `wide` columns are shown with `-o wide`; a `fluid` column is cut to fit the
    terminal; `least` is the minimum width.
    """

    heading: str
    path: str = ""
    format: CellFormat = "text"
    wide: bool = False
    right: bool = False
    fluid: bool = False
    least: int = 0


class Reference(NamedTuple):
    """A field with the name of an object of another kind, which cannot be deleted while it is referred to. `path` leads to the
    field. If both kinds belong to tenants, the object is one of the same tenant.
    """

    path: str
    kind: str


class KindDefinition(Struct, frozen=True, kw_only=True):
    """One kind of objects."""

    struct: type[Object]
    plural: str
    """As in API paths and on the command line."""
    summary: str = ""
    """One line for schemas, the API description and the documentation. Required for declared kinds."""
    aliases: tuple[str, ...] = ()
    """Short names on the command line; the first is the one that help shows."""
    foreign_names: tuple[str, ...] = ()
    """Names of its counterparts in other systems, for hints."""
    declared_by: frozenset[Role] = frozenset()
    """Roles that may declare objects of this kind. Empty for records, which only the authority writes."""
    deleted_by: frozenset[Role] = frozenset()
    """Roles that may also delete them."""
    tenanted: bool = False
    """Names are unique only within a tenant."""
    tenant_readable: bool = False
    """Readable by users of any tenant, because workloads refer to it. Users of a tenant read only their own Tenant object."""
    tenant_limit: str = ""
    """Field of `TenantLimits` that limits the number of objects. Their size then counts against `bytes`."""
    references: tuple[Reference, ...] = ()
    sample: Mapping[str, Any] = field(default_factory=dict)
    """A valid manifest without `apiVersion` and `kind`, for the API description. Required for declared kinds."""
    columns: tuple[ListColumn, ...] = ()
    """Columns of `remit get` besides the tenant, the name and the common ones."""
    scheduler_view: bool = False
    """Schedulers observe it: observation/cluster_objects.py has a method that applies its rows."""
    note: bool = False
    """For people only: no decision depends on it, the oldest are deleted when there are too many, and caches leave it out."""
    composed_name: bool = False
    """Names consist of parts with `/` in between."""

    @property
    def kind(self) -> str:
        return str(self.struct.__struct_config__.tag)

    @property
    def prefix(self) -> str:
        """First part of the keys of this kind."""
        return self.kind.lower()

    @property
    def is_declared(self) -> bool:
        return bool(self.declared_by)

    @property
    def example(self) -> dict[str, Any]:
        return {"apiVersion": API_VERSION, "kind": self.kind, **self.sample}

    @property
    def initial_status(self) -> Struct | None:
        """Status of a new object; None for a kind without status."""
        fields = {field.name: field for field in msgspec.structs.fields(self.struct)}
        default = fields["status"].default if "status" in fields else None
        # The encoder leaves out the default itself and writes an equal status as {}. Rows of kinds without other observations
        # have no status until a condition is set.
        return default if default is None or isinstance(default, ObjectStatus) else type(default)()


def sample(name: str, spec: dict[str, Any], tenant: str = "") -> dict[str, Any]:
    """Returns a sample manifest for a definition."""
    return {"metadata": {"name": name, "tenant": tenant} if tenant else {"name": name}, "spec": spec}
