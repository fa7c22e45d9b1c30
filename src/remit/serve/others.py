"""What is told of others' things to somebody of one tenant? That there are so many, and no names. Who asks is known elsewhere.

Who must go for a replica may be another tenant's: how many they are, and of which priority, says why it has to wait; what they
are called is theirs.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

VICTIMS: Final = "victims"
_MARK: Final = b'"victims":'
_NAMELESS: Final = "another-tenants/"
_NAMED: Final = ("replica", "workload")


def nameless(value: bytes, tenant: str) -> bytes:
    """JSON, in which those who must go have names only if they are of this tenant."""
    if _MARK not in value:
        return value
    return msgspec.json.encode(_walked(msgspec.json.decode(value), tenant))


def _walked(value: Any, tenant: str) -> Any:
    if isinstance(value, list):
        return [_walked(one, tenant) for one in value]
    if isinstance(value, dict):
        return {name: _veiled(one, tenant) if name == VICTIMS else _walked(one, tenant) for name, one in value.items()}
    return value


def _veiled(victims: Any, tenant: str) -> Any:
    """They are told as names, by their names, or as parts of which one is the name."""
    if isinstance(victims, dict):
        return {_name(name, tenant, at): told for at, (name, told) in enumerate(victims.items(), 1)}
    if not isinstance(victims, list):
        return victims  # how many there are
    return [_one(one, tenant, at) for at, one in enumerate(victims, 1)]


def _one(victim: Any, tenant: str, at: int) -> Any:
    if isinstance(victim, str):
        return _name(victim, tenant, at)
    if not isinstance(victim, dict) or _is_own(victim.get("replica", ""), tenant):
        return victim
    return {**victim, **dict.fromkeys(_NAMED, f"{_NAMELESS}{at}")}


def _name(name: str, tenant: str, at: int) -> str:
    if _is_own(name, tenant):
        return name
    return ("replica/" if name.startswith("replica/") else "") + f"{_NAMELESS}{at}"


def _is_own(name: str, tenant: str) -> bool:
    return name.removeprefix("replica/").startswith(f"{tenant}/")
