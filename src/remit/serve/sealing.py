"""How is a secret kept from whoever reads the store? Sealed before it is claimed, opened for its node. No I/O here.

AES-SIV (RFC 5297) under a key of 512 bits. It needs no nonce: the same value in the same place is the same sealed text, so a
request that is sent again has the same payload, and what stands so already is known as unchanged. Sealed along with each value
are the key of its object in the store and the name of its field: moved anywhere else it does not open.

Several keys may be had. The first seals; any opens what it has sealed.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV
from msgspec.structs import replace

from remit.model import sealed
from remit.model.data import Secret
from remit.model.objects import AnyObject, key

KEY_BYTES: Final = 64
KEYS_MAX: Final = 16

MARK_BYTES: Final = 8

_ABOUT: Final = b"remit secret 1"
_MARKED: Final = b"remit mark 1"

T = TypeVar("T", bound=AnyObject)


class Pasted(Exception):
    """A value came sealed, from somebody who does not seal. `field` is its path."""

    def __init__(self, field: str) -> None:
        self.field = field
        super().__init__(f"{field}: begins like a value that a server has sealed; send the plain value")


class Unopened(Exception):
    """A stored value does not open: by none of these keys, or not in this place."""

    def __init__(self, where: str, why: str, cure: str) -> None:
        self.cure = cure
        super().__init__(f"{where} {why}")


class Key(NamedTuple):
    """`id` stands in what it seals, and tells nothing of it."""

    id: str
    material: bytes

    def __repr__(self) -> str:
        return f"Key({self.id})"

    @classmethod
    def of(cls, data: bytes) -> Key:
        if len(data) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes")
        return cls(hashlib.sha256(b"remit key id" + data).hexdigest()[:12], data)


class Seals:
    """Some keys, of which the first one seals."""

    def __init__(self, keys: Sequence[Key]) -> None:
        if not 1 <= len(keys) <= KEYS_MAX or len({one.id for one in keys}) != len(keys):
            raise ValueError(f"1 to {KEYS_MAX} keys, each once")
        self.keys = tuple(keys)
        self._ciphers = {one.id: AESSIV(one.material) for one in keys}

    @property
    def first(self) -> str:
        """The id of the key that seals."""
        return self.keys[0].id

    def seal(self, name: str, field: str, value: str) -> str:
        """`name` is the key of the object that `field` is of."""
        return sealed.written(self.first, _text(self._ciphers[self.first].encrypt(value.encode(), _about(name, field))))

    def open(self, name: str, field: str, value: str) -> str:
        """Raises `Unopened`. What a store held before anything was sealed is as it is."""
        where = f"{name} {field}"
        if not value.startswith(sealed.PREFIX):
            return value
        found = sealed.parts(value)
        cipher = None if found is None else self._ciphers.get(found[0])
        if found is None or cipher is None:
            which = "in a form that this version does not know" if found is None else f"by key {found[0]}, which is not here"
            raise Unopened(where, f"was sealed {which}", "put that key back among this server's, or write the value anew")
        try:
            data = base64.urlsafe_b64decode(found[1] + "=" * (-len(found[1]) % 4))
            if _text(data) != found[1]:  # a sign may have bits to spare: of one value there is one text
                raise InvalidTag
            return cipher.decrypt(data, _about(name, field)).decode()
        except (InvalidTag, ValueError) as error:
            raise Unopened(where, "does not open here: it was sealed for another place, or damaged", "write it anew") from error

    def mark(self, words: Sequence[str]) -> str:
        """The same for the same words, as long as the first key is; and without it nobody can try which words they were."""
        said = b"".join(len(word.encode()).to_bytes(8, "big") + word.encode() for word in words)
        return hmac.digest(self.keys[0].material, _MARKED + said, "sha256")[:MARK_BYTES].hex()

    # -- whole objects ---------------------------------------------------------------------------------------------------

    def sealing(self, thing: T, kept: Mapping[str, str] | None = None) -> T:
        """A secret as it is stored; anything else as it is. Values that stand in `kept` stay sealed as they are there.

        Raises `Pasted`.
        """
        if not isinstance(thing, Secret):
            return thing
        name, known = key(thing), kept or {}
        data = {}
        for field, value in thing.spec.data.items():
            if value.startswith(sealed.PREFIX):
                if known.get(field) != value:
                    raise Pasted(f"spec.data.{field}")
                data[field] = value
            else:
                data[field] = self.seal(name, field, value)
        return replace(thing, spec=replace(thing.spec, data=data))

    def opening(self, thing: Secret) -> Secret:
        """As it was written. What does not open stays sealed."""
        name, data = key(thing), {}
        for field, value in thing.spec.data.items():
            try:
                data[field] = self.open(name, field, value)
            except Unopened:
                data[field] = value
        return replace(thing, spec=replace(thing.spec, data=data))

    def formerly(self, thing: Secret) -> Iterator[Secret]:
        """As each of the other keys would have sealed the whole of it, when that was the first."""
        plain = self.opening(thing)
        for one in self.keys[1:]:
            yield Seals([one]).sealing(plain)

    def is_behind(self, thing: Secret) -> bool:
        """Is any of it not sealed by the first key?"""
        return any((sealed.parts(value) or ("",))[0] != self.first for value in thing.spec.data.values())


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _about(name: str, field: str) -> list[bytes]:
    return [_ABOUT, name.encode(), field.encode()]
