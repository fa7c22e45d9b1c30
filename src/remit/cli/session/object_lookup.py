"""Gets one object or suggests similar names.

Gets one object; if there is none, says which ones are like it.
"""

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
"""Of these there may be very many: they are not all asked for only to guess a name."""


def class_of(kind: str) -> Any:
    """The struct of a kind: which one it is, is known only at run time."""
    return KINDS[kind]


def tenant_of(context: CommandContext, ref: ObjectRef) -> str:
    """Whose it is: as was said with it, else as everything else."""
    return (ref.tenant or context.address.tenant) if is_tenant_scoped(ref.kind) else ""


def display_name(context: CommandContext, kind: str, name: str, tenant: str = "") -> str:
    """As it may be named again without a flag: with the tenant, unless that is the one that is meant anyway."""
    whose = f"{tenant}/" if tenant and (context.all_tenants or context.tenant_given or tenant != context.address.tenant) else ""
    return f"{kind.lower()}/{whose}{name}"


def display_name_of(context: CommandContext, ref: ObjectRef) -> str:
    return display_name(context, ref.kind, ref.name, tenant_of(context, ref))


async def get_object(api: Api, context: CommandContext, ref: ObjectRef) -> Any:
    if ref.kind == ENDPOINTS:
        listed = await api.endpoints(tenant=tenant_of(context, ref))
        for item in listed.items:
            if ref.name in (item.replica, item.service):
                return item
        raise CommandError(f"nothing serves as {quoted(ref.name)}", "`remit get endpoints` lists what does")
    try:
        return await api.get(class_of(ref.kind), ref.name, tenant=tenant_of(context, ref))
    except ApiError as error:
        if error.status != NOT_FOUND:
            raise
        raise await not_found_error(api, context, ref) from error


async def not_found_error(api: Api, context: CommandContext, ref: ObjectRef) -> CommandError:
    """That it is not there, and what may have been meant: one of another tenant, or of a like name."""
    tenant = tenant_of(context, ref)
    whose = f" in tenant {tenant}" if tenant else ""
    what = f"there is no {ref.kind.lower()} {quoted(ref.name)}{escaped(whose)}"
    lists = f"`remit get {plural_name(ref.kind)}{' -A' if tenant else ''}` lists them"
    try:
        same = await api.list(class_of(ref.kind), tenant="", fields=f"metadata.name={ref.name}") if tenant else None
        like = await api.list(class_of(ref.kind), tenant=tenant) if ref.kind not in _NUMEROUS_KINDS else None
    except ApiError:
        return CommandError(what, lists)
    owners = sorted(item.metadata.tenant for item in same.items) if same is not None else []
    if owners:
        return CommandError(what, escaped(f"tenant {one_of(owners)} has one: say -t {owners[0]}"))
    names = sorted({item.metadata.name for item in like.items}) if like is not None else []
    close = get_close_matches(ref.name, names[:NAMES_COMPARED_MAX], n=3, cutoff=0.6)
    return CommandError(what, escaped(f"did you mean {one_of(close)}?") if close else lists)
