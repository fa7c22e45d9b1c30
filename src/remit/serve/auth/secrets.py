"""Secret sealing (AES-SIV), key file, delivery to nodes.

Sealed before it is claimed, opened for its node. No I/O here.

AES-SIV (RFC 5297) under a key of 512 bits. It needs no nonce: the same value in the same place is the same sealed text, so a
request that is sent again has the same payload, and what stands so already is known as unchanged. Sealed along with each value
are the key of its object in the store and the name of its field: moved anywhere else it does not open.

Several keys may be had. The first seals; any opens what it has sealed.

In one file beside the store, for the server's eyes alone; what they do is sealing.py's.

A line a key, in base 64; the first one seals. It is made when a server first starts. It is no part of the store nor of its
backups: whoever has both can read every secret, and whoever has lost it can read none.

What is stored, as of now, for that one copy alone.

Whose it is, is asked of the store and of the authority, never of a memory: the replica's row says to which node it is bound,
and the node's lease who speaks for that. `law/authorization.py` has the rule.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV
from msgspec.structs import replace

from remit.client.endpoint import Endpoint, NoVerdict
from remit.law.authorization import why_not
from remit.model import secrets
from remit.model.claims import Role
from remit.model.kinds import Mount, Template
from remit.model.objects import AnyObject, decode, key, key_of
from remit.model.records import Generation, Replica
from remit.model.secrets import Config, Secret
from remit.model.wire.agent_messages import Material, MaterialOf
from remit.store.protocol import Store, StoreError
from remit.world.interfaces import Disk, DiskError, Forbidden, Ids, Missing

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
        return secrets.written(self.first, _text(self._ciphers[self.first].encrypt(value.encode(), _about(name, field))))

    def open(self, name: str, field: str, value: str) -> str:
        """Raises `Unopened`. What a store held before anything was sealed is as it is."""
        where = f"{name} {field}"
        if not value.startswith(secrets.PREFIX):
            return value
        found = secrets.parts(value)
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
            if value.startswith(secrets.PREFIX):
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
        return any((secrets.parts(value) or ("",))[0] != self.first for value in thing.spec.data.values())


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _about(name: str, field: str) -> list[bytes]:
    return [_ABOUT, name.encode(), field.encode()]


NAME: Final = "seal.keys"
_BYTES_MAX: Final = 64 << 10
_NONCES: Final = 8
"""80 bits each: more than any key of these can be attacked by."""


class Keyring:
    """`seals` are the keys as they are now, read when they are first asked for. Without a `path` they live as long as this
    does, as in a simulated world.

    It blocks. Raises `DiskError`.
    """

    def __init__(self, disk: Disk, ids: Ids, path: Path | None = None) -> None:
        self._disk, self._ids, self._path = disk, ids, path
        self._seals: Seals | None = None
        self._writing: Counter[str] = Counter()
        self.made_by = ""
        """Which request made the newest, if it was one of this server's since it began."""

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around all that happens between the sealing of a value and the answer to whoever sent it."""
        first = self.seals.first
        self._writing[first] += 1
        try:
            yield
        finally:
            self._writing[first] -= 1

    @property
    def is_settled(self) -> bool:
        """Is nothing under way that may be sealed by another key than the first?"""
        return not any(many for key, many in self._writing.items() if key != self.seals.first)

    @property
    def seals(self) -> Seals:
        if self._seals is None:
            self._seals = Seals(self._read() or self._written([self._new()]))
        return self._seals

    def add(self) -> Seals:
        """A new key comes first. It is on disk before anything is sealed with it. Raises ValueError if there are too many."""
        if len(self.seals.keys) >= KEYS_MAX:
            raise ValueError(f"there are {KEYS_MAX} keys already")
        self._seals = Seals(self._written([self._new(), *self.seals.keys]))
        return self._seals

    def forget(self) -> Seals:
        """All but the first."""
        self._seals = Seals(self._written(list(self.seals.keys[:1])))
        return self._seals

    def _new(self) -> Key:
        drawn = "".join(self._ids.nonce() for _ in range(_NONCES))
        return Key.of(hashlib.sha512(b"remit key" + drawn.encode()).digest())

    def _written(self, keys: list[Key]) -> list[Key]:
        if self._path is not None:
            self._disk.make_directory(self._path.parent)
            self._disk.write_atomically(self._path, b"".join(base64.b64encode(one.material) + b"\n" for one in keys))
        return keys

    def _read(self) -> list[Key]:
        """None at all if there is no such file."""
        if self._path is None:
            return []
        try:
            data = self._disk.read(self._path, bytes_max=_BYTES_MAX)
        except Missing:
            return []
        _check_private(self._path)
        try:
            keys = [Key.of(base64.b64decode(line, validate=True)) for line in data.split()]
            return list(Seals(keys).keys)
        except (binascii.Error, ValueError) as error:
            cure = "put the file back as it was: without its keys no secret that is stored can be read"
            raise DiskError(f"{self._path} holds no keys of {KEY_BYTES} bytes, one a line ({error})", cure) from None


def _check_private(path: Path) -> None:
    """A key that others may read is none: it is not used, so that somebody notices."""
    found = path.stat()
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise Forbidden(
            f"{path} may be read by others than its owner", f"chmod 600 {path}, and turn the key: remit secrets rotate"
        )
    if found.st_uid != os.geteuid():
        raise Forbidden(
            f"{path} belongs to another user", f"chown it to the user whom the server runs as, and chmod 600 {path}"
        )


encode: Final = msgspec.json.Encoder().encode
_NOT_YOURS: Final = "run the copy on the node that it is bound to, and ask while that node's lease is held"


class Materials:
    """For every agent of a scope."""

    def __init__(self, endpoint: Endpoint, store: Store, keyring: Keyring) -> None:
        self._endpoint, self._store, self._keyring = endpoint, store, keyring

    async def of(self, asked: MaterialOf) -> Material:
        try:
            return await self._of(asked)
        except (NoVerdict, StoreError) as error:
            return Material(failed="later", why=str(error), cure="nothing to do: it is asked again")

    async def _of(self, asked: MaterialOf) -> Material:
        if asked.actor.role is not Role.AGENT or not asked.actor.lease.startswith(f"{Role.AGENT}/"):
            return Material(failed="refused", why=f"{asked.actor.role} runs nothing", cure=_NOT_YOURS)
        if not asked.key.startswith("replica/"):
            return Material(failed="refused", why="only a replica reads anything", cure=_NOT_YOURS)
        if not await self._endpoint.renew(asked.actor):
            return Material(failed="refused", why=f"{asked.actor.lease} is not held by who asks", cure=_NOT_YOURS)
        # After that: what was bound there while the lease was another's is bound there no more.
        replica = await self._get(asked.key)
        why = why_not(asked, replica if isinstance(replica, Replica) else None)
        if why or not isinstance(replica, Replica):
            return Material(failed="refused", why=why, cure=_NOT_YOURS)
        tenant, spec = replica.metadata.tenant, replica.spec
        generation = await self._get(key_of("Generation", f"{spec.workload}/{spec.generation:08d}", tenant))
        if not isinstance(generation, Generation):
            return Material(failed="missing", why=f"generation {spec.generation} of {spec.workload} is not there", cure="")
        return await self._read(tenant, generation.spec.spec.template)

    async def _read(self, tenant: str, template: Template) -> Material:
        found: dict[str, dict[str, dict[str, str]]] = {"Secret": {}, "Config": {}}
        absent: list[str] = []
        for kind, mounts in (("Secret", template.secrets), ("Config", template.configs)):
            for mount in mounts:
                data = await self._data(kind, mount.name, tenant)
                if isinstance(data, Material):
                    return data
                lacks = [] if data is None else [one for one in mount.keys if one not in data]
                if data is None:
                    absent.append(f"{kind.lower()} {mount.name}")
                elif lacks:
                    absent.append(f"key {lacks[0]} of {kind.lower()} {mount.name}")
                else:
                    found[kind][mount.name] = _picked(data, mount)
        if absent:
            return _absent(absent)
        return Material(secrets=found["Secret"], configs=found["Config"])

    async def _data(self, kind: str, name: str, tenant: str) -> dict[str, str] | Material | None:
        where = key_of(kind, name, tenant)
        thing = await self._get(where)
        if isinstance(thing, Config):
            return dict(thing.spec.data)
        if not isinstance(thing, Secret):
            return None
        try:
            return {field: self._keyring.seals.open(where, field, value) for field, value in thing.spec.data.items()}
        except Unopened as error:
            return Material(failed="missing", why=str(error), cure=error.cure)

    async def _get(self, name: str) -> object:
        row = await self._store.get(name)
        return None if row is None else decode(row.value)


def _picked(data: dict[str, str], mount: Mount) -> dict[str, str]:
    return {name: data[name] for name in mount.keys} if mount.keys else data


def _absent(names: Sequence[str]) -> Material:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    first = names[0].split(" of ")[-1].split(" ")
    return Material(
        failed="missing",
        why=f"there is no {names[0]}{more}",
        cure=f"create it: remit create {first[0]} {first[1]} --from-literal KEY=VALUE",
    )
