"""May whoever asks come in here? Who they are, at which door, and for what: law/access.py decides, this finds what to ask it.

For somebody of one tenant the others' objects are not there: 404, and not 403, which would tell that they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from remit.client.remote import Call
from remit.client.rows import RangeOf, RowsFrom
from remit.law import access
from remit.model.identity import Principal
from remit.model.material import MaterialOf
from remit.model.objects import TENANTED, AnyObject
from remit.model.orders import OrdersOf
from remit.model.problems import an, shown
from remit.serve.failures import Failure
from remit.serve.identities import unknown
from remit.serve.routes import Route

_DOORS: Final = {"user": "people", "agent": "agents", "component": "schedulers and controllers", "join": "joining, once"}


def enter(route: Route, principal: Principal, path: Mapping[str, str]) -> None:
    """Raises `Failure`."""
    if principal.audience not in route.audience:
        detail = f"the token {principal.token} is for {_DOORS[principal.audience]}, and is not taken here"
        raise unknown(detail, "use a token that was made for this: `remit token create --role ROLE`")
    if principal.audience != "user":
        return
    tenant = path.get("name" if route.kind == "Tenant" else "tenant", "")
    if tenant and principal.tenant not in ("", tenant):
        raise Failure(404, "not_found", f"there is no tenant {shown(tenant)}", field="tenant", cure="use the one you belong to")
    if not route.reading and not access.may_write(principal):
        raise forbidden(f"{principal.subject} is a viewer, and may not change anything", "ask an admin for a token of a member")
    if not principal.tenant:
        return
    if route.kind in TENANTED:
        return
    if route.kind and not (route.reading and access.sees(principal, route.kind, "", path.get("name", ""))):
        cure = f"read your own: /v1/tenants/{principal.tenant}" if route.kind == "Tenant" else "let an admin ask"
        raise forbidden(f"{an(route.kind)} belongs to no tenant, and {principal.subject} to {principal.tenant}", cure)
    if not route.kind and not route.tenants:
        raise forbidden(
            f"this is not for somebody of one tenant, as {principal.subject} is of {principal.tenant}", "let an admin ask"
        )


def check_declared(principal: Principal, things: tuple[AnyObject, ...]) -> None:
    """May this person speak of all of these? Raises `Failure`, before anything is compared with what is there."""
    for thing in things:
        meta, kind = thing.metadata, type(thing).__name__
        if principal.tenant and (kind not in TENANTED or meta.tenant != principal.tenant):
            detail = f"{kind} {shown(meta.name)}: {principal.subject} acts in tenant {principal.tenant} alone"
            raise Failure(
                403, "tenant", detail, field="metadata.tenant", cure="declare it in your own tenant, or let an admin do it"
            )


def check_asked(principal: Principal, asked: Call | RangeOf | MaterialOf) -> None:
    """May this component ask this? Raises `Failure`."""
    if isinstance(asked, RangeOf):
        _check_rows(principal)
    elif isinstance(asked, MaterialOf):
        _check(access.may_act(principal, asked.actor))
    elif asked.operations is not None:
        _check(next((wrong for one in asked.operations if (wrong := access.may_claim(principal, one))), ""))
    elif asked.renew is not None:
        _check(access.may_act(principal, asked.renew))
    elif asked.beats is not None:
        _check(access.may_beat(principal, asked.beats))
    elif asked.heard or asked.states is not None:
        _check_rows(principal)


def check_followed(principal: Principal, asked: OrdersOf | RowsFrom) -> None:
    if isinstance(asked, RowsFrom):
        _check_rows(principal)
    else:
        _check(access.may_follow(principal, asked.nodes))


def _check_rows(principal: Principal) -> None:
    if principal.audience != "component":
        raise forbidden(f"the rows of a scope are not told to {principal.role}s", "ask for the orders of your own nodes")


def _check(wrong: str) -> None:
    if wrong:
        raise forbidden(wrong, "ask only for what is yours")


def forbidden(detail: str, cure: str) -> Failure:
    return Failure(403, "not_owner", detail, cure=cure)
