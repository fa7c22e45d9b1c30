"""Gets one object by reference, and suggests similar names if it does not exist."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

from remit.cli.session.kind_names import ENDPOINTS, ObjectRef, is_tenant_scoped, plural_name
from remit.cli.session.server_call import CommandError
from remit.client.api_caller import ApiError
from remit.model.objects import KINDS
from remit.model.problems import escaped, one_of, quoted

if TYPE_CHECKING:
    from remit.cli.session.server_call import CommandContext
    from remit.client.api import Api

NOT_FOUND: Final = 404
NAMES_COMPARED_MAX: Final = 10_000
_NUMEROUS_KINDS: Final = ("Replica", "Generation", "Decision", "Event")
"""Kinds with too many objects to list them only for a suggestion."""


def class_of(kind: str) -> Any:
    """Return the struct class of a kind. The result is untyped because the kind is known only at run time."""
    return KINDS[kind]


def tenant_of(context: CommandContext, ref: ObjectRef) -> str:
    """Return the tenant of the reference, or else that of the command; empty for kinds without tenants."""
    return (ref.tenant or context.address.tenant) if is_tenant_scoped(ref.kind) else ""


def display_name(context: CommandContext, kind: str, name: str, tenant: str = "") -> str:
    """Format an object so that it can be used as an argument: with the tenant, unless that is the default tenant."""
    prefix = (
        f"{tenant}/" if tenant and (context.all_tenants or context.tenant_given or tenant != context.address.tenant) else ""
    )
    return f"{kind.lower()}/{prefix}{name}"


def display_name_of(context: CommandContext, ref: ObjectRef) -> str:
    return display_name(context, ref.kind, ref.name, tenant_of(context, ref))


async def get_object(api: Api, context: CommandContext, ref: ObjectRef) -> Any:
    if ref.kind == ENDPOINTS:
        listed = await api.endpoints(tenant=tenant_of(context, ref))
        for item in listed.items:
            if ref.name in (item.replica, item.service):
                return item
        raise CommandError(f"no endpoint {quoted(ref.name)}", "`remit get endpoints` lists all endpoints")
    try:
        return await api.get(class_of(ref.kind), ref.name, tenant=tenant_of(context, ref))
    except ApiError as error:
        if error.status != NOT_FOUND:
            raise
        raise await not_found_error(api, context, ref) from error


async def not_found_error(api: Api, context: CommandContext, ref: ObjectRef) -> CommandError:
    """Return an error that suggests an object of the same name in another tenant, or one with a similar name."""
    tenant = tenant_of(context, ref)
    location = f" in tenant {tenant}" if tenant else ""
    message = f"{ref.kind.lower()} {quoted(ref.name)} not found{escaped(location)}"
    list_hint = f"`remit get {plural_name(ref.kind)}{' -A' if tenant else ''}` lists them"
    try:
        same_name = await api.list(class_of(ref.kind), tenant="", fields=f"metadata.name={ref.name}") if tenant else None
        same_kind = await api.list(class_of(ref.kind), tenant=tenant) if ref.kind not in _NUMEROUS_KINDS else None
    except ApiError:
        return CommandError(message, list_hint)
    owners = sorted(item.metadata.tenant for item in same_name.items) if same_name is not None else []
    if owners:
        return CommandError(message, escaped(f"tenant {one_of(owners)} has one; use -t {owners[0]}"))
    names = sorted({item.metadata.name for item in same_kind.items}) if same_kind is not None else []
    close = get_close_matches(ref.name, names[:NAMES_COMPARED_MAX], n=3, cutoff=0.6)
    return CommandError(message, escaped(f"did you mean {one_of(close)}?") if close else list_hint)
