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

from remit.client.endpoint import Endpoint, EndpointError
from remit.law.authorization import material_denial_reason
from remit.model import secrets
from remit.model.claims import Role
from remit.model.kinds import Mount, Template
from remit.model.objects import AnyObject, decode, key, key_of
from remit.model.records import Generation, Replica
from remit.model.secrets import Config, Secret
from remit.model.wire.agent_messages import SecretMaterial, SecretMaterialRequest
from remit.store.protocol import Store, StoreError
from remit.world.interfaces import Disk, DiskError, Forbidden, Ids, Missing

KEY_BYTES: Final = 64
KEYS_MAX: Final = 16

FINGERPRINT_BYTES: Final = 8

_SEAL_CONTEXT: Final = b"remit secret 1"
_FINGERPRINT_CONTEXT: Final = b"remit mark 1"

T = TypeVar("T", bound=AnyObject)


class ClientSealedValue(Exception):
    """A value came sealed, from somebody who does not seal. `field` is its path."""

    def __init__(self, field: str) -> None:
        self.field = field
        super().__init__(f"{field}: begins like a value that a server has sealed; send the plain value")


class UnsealError(Exception):
    """A stored value does not open: by none of these keys, or not in this place."""

    def __init__(self, where: str, reason: str, cure: str) -> None:
        self.cure = cure
        super().__init__(f"{where} {reason}")


class SealingKey(NamedTuple):
    """`id` stands in what it seals, and tells nothing of it."""

    id: str
    material: bytes

    def __repr__(self) -> str:
        return f"Key({self.id})"

    @classmethod
    def of(cls, data: bytes) -> SealingKey:
        if len(data) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes")
        return cls(hashlib.sha256(b"remit key id" + data).hexdigest()[:12], data)


class SealingKeys:
    """Some keys, of which the first one seals."""

    def __init__(self, keys: Sequence[SealingKey]) -> None:
        if not 1 <= len(keys) <= KEYS_MAX or len({key.id for key in keys}) != len(keys):
            raise ValueError(f"1 to {KEYS_MAX} keys, each once")
        self.keys = tuple(keys)
        self._ciphers = {key.id: AESSIV(key.material) for key in keys}

    @property
    def primary_id(self) -> str:
        """The id of the key that seals."""
        return self.keys[0].id

    def seal(self, name: str, field: str, value: str) -> str:
        """`name` is the key of the object that `field` is of."""
        return secrets.format_sealed(self.primary_id, _base64_text(self._ciphers[self.primary_id].encrypt(value.encode(), _associated_data(name, field))))

    def unseal(self, name: str, field: str, value: str) -> str:
        """Raises `UnsealError`. What a store held before anything was sealed is as it is."""
        where = f"{name} {field}"
        if not value.startswith(secrets.SEALED_PREFIX):
            return value
        parts = secrets.parse_sealed(value)
        cipher = None if parts is None else self._ciphers.get(parts[0])
        if parts is None or cipher is None:
            which = "in a form that this version does not know" if parts is None else f"by key {parts[0]}, which is not here"
            raise UnsealError(where, f"was sealed {which}", "put that key back among this server's, or write the value anew")
        try:
            data = base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4))
            if _base64_text(data) != parts[1]:  # a sign may have bits to spare: of one value there is one text
                raise InvalidTag
            return cipher.decrypt(data, _associated_data(name, field)).decode()
        except (InvalidTag, ValueError) as error:
            raise UnsealError(where, "does not open here: it was sealed for another place, or damaged", "write it anew") from error

    def fingerprint(self, values: Sequence[str]) -> str:
        """The same for the same words, as long as the first key is; and without it nobody can try which words they were."""
        message = b"".join(len(value.encode()).to_bytes(8, "big") + value.encode() for value in values)
        return hmac.digest(self.keys[0].material, _FINGERPRINT_CONTEXT + message, "sha256")[:FINGERPRINT_BYTES].hex()

    # -- whole objects ---------------------------------------------------------------------------------------------------

    def seal_object(self, obj: T, already_sealed: Mapping[str, str] | None = None) -> T:
        """A secret as it is stored; anything else as it is. Values that stand in `kept` stay sealed as they are there.

        Raises `ClientSealedValue`.
        """
        if not isinstance(obj, Secret):
            return obj
        name, sealed = key(obj), already_sealed or {}
        data = {}
        for field, value in obj.spec.data.items():
            if value.startswith(secrets.SEALED_PREFIX):
                if sealed.get(field) != value:
                    raise ClientSealedValue(f"spec.data.{field}")
                data[field] = value
            else:
                data[field] = self.seal(name, field, value)
        return replace(obj, spec=replace(obj.spec, data=data))

    def unseal_object(self, secret: Secret) -> Secret:
        """As it was written. What does not open stays sealed."""
        name, data = key(secret), {}
        for field, value in secret.spec.data.items():
            try:
                data[field] = self.unseal(name, field, value)
            except UnsealError:
                data[field] = value
        return replace(secret, spec=replace(secret.spec, data=data))

    def sealed_by_older_keys(self, secret: Secret) -> Iterator[Secret]:
        """As each of the other keys would have sealed the whole of it, when that was the first."""
        plain = self.unseal_object(secret)
        for key in self.keys[1:]:
            yield SealingKeys([key]).seal_object(plain)

    def needs_resealing(self, secret: Secret) -> bool:
        """Is any of it not sealed by the first key?"""
        return any((secrets.parse_sealed(value) or ("",))[0] != self.primary_id for value in secret.spec.data.values())


def _base64_text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _associated_data(name: str, field: str) -> list[bytes]:
    return [_SEAL_CONTEXT, name.encode(), field.encode()]


KEY_FILE_NAME: Final = "seal.keys"
_KEY_FILE_BYTES_MAX: Final = 64 << 10
_NONCES_PER_KEY: Final = 8
"""80 bits each: more than any key of these can be attacked by."""


class Keyring:
    """`seals` are the keys as they are now, read when they are first asked for. Without a `path` they live as long as this
    does, as in a simulated world.

    It blocks. Raises `DiskError`.
    """

    def __init__(self, disk: Disk, ids: Ids, path: Path | None = None) -> None:
        self._disk, self._ids, self._path = disk, ids, path
        self._sealing_keys: SealingKeys | None = None
        self._writes_by_key: Counter[str] = Counter()
        self.newest_key_operation = ""
        """Which request made the newest, if it was one of this server's since it began."""

    @contextmanager
    def track_write(self) -> Iterator[None]:
        """Around all that happens between the sealing of a value and the answer to whoever sent it."""
        key_id = self.sealing_keys.primary_id
        self._writes_by_key[key_id] += 1
        try:
            yield
        finally:
            self._writes_by_key[key_id] -= 1

    @property
    def old_keys_unused(self) -> bool:
        """Is nothing under way that may be sealed by another key than the first?"""
        return not any(count for key, count in self._writes_by_key.items() if key != self.sealing_keys.primary_id)

    @property
    def sealing_keys(self) -> SealingKeys:
        if self._sealing_keys is None:
            self._sealing_keys = SealingKeys(self._read() or self._write([self._generate_key()]))
        return self._sealing_keys

    def add_key(self) -> SealingKeys:
        """A new key comes first. It is on disk before anything is sealed with it. Raises ValueError if there are too many."""
        if len(self.sealing_keys.keys) >= KEYS_MAX:
            raise ValueError(f"there are {KEYS_MAX} keys already")
        self._sealing_keys = SealingKeys(self._write([self._generate_key(), *self.sealing_keys.keys]))
        return self._sealing_keys

    def forget_old_keys(self) -> SealingKeys:
        """All but the first."""
        self._sealing_keys = SealingKeys(self._write(list(self.sealing_keys.keys[:1])))
        return self._sealing_keys

    def _generate_key(self) -> SealingKey:
        drawn = "".join(self._ids.nonce() for _ in range(_NONCES_PER_KEY))
        return SealingKey.of(hashlib.sha512(b"remit key" + drawn.encode()).digest())

    def _write(self, keys: list[SealingKey]) -> list[SealingKey]:
        if self._path is not None:
            self._disk.make_directory(self._path.parent)
            self._disk.write_atomically(self._path, b"".join(base64.b64encode(key.material) + b"\n" for key in keys))
        return keys

    def _read(self) -> list[SealingKey]:
        """None at all if there is no such file."""
        if self._path is None:
            return []
        try:
            data = self._disk.read(self._path, bytes_max=_KEY_FILE_BYTES_MAX)
        except Missing:
            return []
        _check_private(self._path)
        try:
            keys = [SealingKey.of(base64.b64decode(line, validate=True)) for line in data.split()]
            return list(SealingKeys(keys).keys)
        except (binascii.Error, ValueError) as error:
            cure = "put the file back as it was: without its keys no secret that is stored can be read"
            raise DiskError(f"{self._path} holds no keys of {KEY_BYTES} bytes, one a line ({error})", cure) from None


def _check_private(path: Path) -> None:
    """A key that others may read is none: it is not used, so that somebody notices."""
    status = path.stat()
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise Forbidden(
            f"{path} may be read by others than its owner", f"chmod 600 {path}, and turn the key: remit secrets rotate"
        )
    if status.st_uid != os.geteuid():
        raise Forbidden(
            f"{path} belongs to another user", f"chown it to the user whom the server runs as, and chmod 600 {path}"
        )


encode_material: Final = msgspec.json.Encoder().encode
_REFUSED_CURE: Final = "run the copy on the node that it is bound to, and ask while that node's lease is held"


class SecretDelivery:
    """For every agent of a scope."""

    def __init__(self, endpoint: Endpoint, store: Store, keyring: Keyring) -> None:
        self._endpoint, self._store, self._keyring = endpoint, store, keyring

    async def material_for(self, request: SecretMaterialRequest) -> SecretMaterial:
        try:
            return await self._material_for(request)
        except (EndpointError, StoreError) as error:
            return SecretMaterial(failed="later", why=str(error), cure="nothing to do: it is asked again")

    async def _material_for(self, request: SecretMaterialRequest) -> SecretMaterial:
        if request.actor.role is not Role.AGENT or not request.actor.lease.startswith(f"{Role.AGENT}/"):
            return SecretMaterial(failed="refused", why=f"{request.actor.role} runs nothing", cure=_REFUSED_CURE)
        if not request.key.startswith("replica/"):
            return SecretMaterial(failed="refused", why="only a replica reads anything", cure=_REFUSED_CURE)
        if not await self._endpoint.renew(request.actor):
            return SecretMaterial(failed="refused", why=f"{request.actor.lease} is not held by who asks", cure=_REFUSED_CURE)
        # After that: what was bound there while the lease was another's is bound there no more.
        replica = await self._get(request.key)
        reason = material_denial_reason(request, replica if isinstance(replica, Replica) else None)
        if reason or not isinstance(replica, Replica):
            return SecretMaterial(failed="refused", why=reason, cure=_REFUSED_CURE)
        tenant, spec = replica.metadata.tenant, replica.spec
        generation = await self._get(key_of("Generation", f"{spec.workload}/{spec.generation:08d}", tenant))
        if not isinstance(generation, Generation):
            return SecretMaterial(failed="missing", why=f"generation {spec.generation} of {spec.workload} is not there", cure="")
        return await self._read_mounts(tenant, generation.spec.spec.template)

    async def _read_mounts(self, tenant: str, template: Template) -> SecretMaterial:
        data_by_kind: dict[str, dict[str, dict[str, str]]] = {"Secret": {}, "Config": {}}
        missing: list[str] = []
        for kind, mounts in (("Secret", template.secrets), ("Config", template.configs)):
            for mount in mounts:
                data = await self._read_data(kind, mount.name, tenant)
                if isinstance(data, SecretMaterial):
                    return data
                missing_keys = [] if data is None else [name for name in mount.keys if name not in data]
                if data is None:
                    missing.append(f"{kind.lower()} {mount.name}")
                elif missing_keys:
                    missing.append(f"key {missing_keys[0]} of {kind.lower()} {mount.name}")
                else:
                    data_by_kind[kind][mount.name] = _selected_keys(data, mount)
        if missing:
            return _missing(missing)
        return SecretMaterial(secrets=data_by_kind["Secret"], configs=data_by_kind["Config"])

    async def _read_data(self, kind: str, name: str, tenant: str) -> dict[str, str] | SecretMaterial | None:
        object_key = key_of(kind, name, tenant)
        obj = await self._get(object_key)
        if isinstance(obj, Config):
            return dict(obj.spec.data)
        if not isinstance(obj, Secret):
            return None
        try:
            return {field: self._keyring.sealing_keys.unseal(object_key, field, value) for field, value in obj.spec.data.items()}
        except UnsealError as error:
            return SecretMaterial(failed="missing", why=str(error), cure=error.cure)

    async def _get(self, name: str) -> object:
        row = await self._store.get(name)
        return None if row is None else decode(row.value)


def _selected_keys(data: dict[str, str], mount: Mount) -> dict[str, str]:
    return {name: data[name] for name in mount.keys} if mount.keys else data


def _missing(names: Sequence[str]) -> SecretMaterial:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    first = names[0].split(" of ")[-1].split(" ")
    return SecretMaterial(
        failed="missing",
        why=f"there is no {names[0]}{more}",
        cure=f"create it: remit create {first[0]} {first[1]} --from-literal KEY=VALUE",
    )
