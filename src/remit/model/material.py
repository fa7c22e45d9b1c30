"""What does a node ask for a copy that is to read secrets or configs, and what is it given? Words only; who may have it: law/.

What stands here in the open was sealed until now, so neither of these is ever written down, logged or shown.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from remit.model.claims import Actor, Short
from remit.model.fields import Natural


class MaterialOf(Struct, frozen=True, tag="material"):
    """Give me what one copy of a replica reads: I run its node, as `actor` says, and it is bound there in this attempt."""

    actor: Actor
    key: Short
    uid: Short
    attempt: Natural


class Material(Struct, frozen=True, omit_defaults=True):
    """Texts by name, of each secret and config that its template names. Without them, why not: nobody is told of what is not
    his (`refused`), what it names is not there yet (`missing`), or cannot be had just now (`later`).
    """

    secrets: dict[str, dict[str, str]] = {}
    configs: dict[str, dict[str, str]] = {}
    failed: Literal["", "refused", "missing", "later"] = ""
    why: str = ""
    cure: str = ""

    def __repr__(self) -> str:
        """Names only: an object may end up in a message that nobody thought of."""
        names = {"secrets": list(self.secrets), "configs": list(self.configs)}
        return f"Material({names}, failed={self.failed!r})"


_materials: msgspec.json.Decoder[Material] = msgspec.json.Decoder(Material)


def decode_material(body: bytes) -> Material:
    """Raises msgspec.DecodeError, without a word of what was read."""
    try:
        return _materials.decode(body)
    except (msgspec.DecodeError, ValueError) as error:
        raise msgspec.DecodeError(f"no material ({type(error).__name__})") from None
