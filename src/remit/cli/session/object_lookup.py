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


def tenant_of(asked: CommandContext, thing: ObjectRef) -> str:
    """Whose it is: as was said with it, else as everything else."""
    return (thing.tenant or asked.reach.tenant) if is_tenant_scoped(thing.kind) else ""


def display_name(asked: CommandContext, kind: str, name: str, tenant: str = "") -> str:
    """As it may be named again without a flag: with the tenant, unless that is the one that is meant anyway."""
    whose = f"{tenant}/" if tenant and (asked.everyone or asked.tenant_said or tenant != asked.reach.tenant) else ""
    return f"{kind.lower()}/{whose}{name}"


def display_name_of(asked: CommandContext, thing: ObjectRef) -> str:
    return display_name(asked, thing.kind, thing.name, tenant_of(asked, thing))


async def get_object(api: Api, asked: CommandContext, thing: ObjectRef) -> Any:
    if thing.kind == ENDPOINTS:
        listed = await api.endpoints(tenant=tenant_of(asked, thing))
        for item in listed.items:
            if thing.name in (item.replica, item.service):
                return item
        raise CommandError(f"nothing serves as {quoted(thing.name)}", "`remit get endpoints` lists what does")
    try:
        return await api.get(class_of(thing.kind), thing.name, tenant=tenant_of(asked, thing))
    except ApiError as error:
        if error.status != NOT_FOUND:
            raise
        raise await not_found_error(api, asked, thing) from error


async def not_found_error(api: Api, asked: CommandContext, thing: ObjectRef) -> CommandError:
    """That it is not there, and what may have been meant: one of another tenant, or of a like name."""
    tenant = tenant_of(asked, thing)
    whose = f" in tenant {tenant}" if tenant else ""
    what = f"there is no {thing.kind.lower()} {quoted(thing.name)}{escaped(whose)}"
    lists = f"`remit get {plural_name(thing.kind)}{' -A' if tenant else ''}` lists them"
    try:
        same = await api.list(class_of(thing.kind), tenant="", fields=f"metadata.name={thing.name}") if tenant else None
        like = await api.list(class_of(thing.kind), tenant=tenant) if thing.kind not in _NUMEROUS_KINDS else None
    except ApiError:
        return CommandError(what, lists)
    owners = sorted(item.metadata.tenant for item in same.items) if same is not None else []
    if owners:
        return CommandError(what, escaped(f"tenant {one_of(owners)} has one: say -t {owners[0]}"))
    names = sorted({item.metadata.name for item in like.items}) if like is not None else []
    close = get_close_matches(thing.name, names[:NAMES_COMPARED_MAX], n=3, cutoff=0.6)
    return CommandError(what, escaped(f"did you mean {one_of(close)}?") if close else lists)
