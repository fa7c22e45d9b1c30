"""Secret sealing (AES-SIV), key file, delivery to nodes.

Values are sealed before they are claimed and unsealed only for the node that runs the replica. AES-SIV (RFC 5297) with a
512-bit key needs no nonce: the same value in the same place gives the same sealed text, so a retried request has the same
payload, and an unchanged value is recognised. The key of the object and the name of the field are authenticated with each
value, so a sealed value cannot be moved elsewhere. There may be several keys: the first (primary) one seals, and each
unseals what it has sealed.

The key file is next to the store: one key per line, in base64, the primary key first. The server creates it at its first
start. It is not part of the store or of backups: whoever has both can read every secret, and without the key file no secret
can be read.

`SecretDelivery` checks the store and the authority, never a cache: the replica's row names the node that it is bound to, and
the node's lease names its agent. The rule is in law/authorization.py.
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
from remit.model.kinds import Config, Mount, Secret, Template
from remit.model.kinds.registry import AnyObject
from remit.model.objects import decode, key, key_of
from remit.model.records import Generation, Replica
from remit.model.roles import Role
from remit.model.wire.agent_messages import SecretMaterial, SecretMaterialRequest
from remit.store.protocol import Store, StoreError
from remit.world.interfaces import AccessDenied, Disk, DiskError, FileMissing, Ids

KEY_BYTES: Final = 64
KEYS_MAX: Final = 16

FINGERPRINT_BYTES: Final = 8

_SEAL_CONTEXT: Final = b"remit secret 1"
_FINGERPRINT_CONTEXT: Final = b"remit mark 1"

T = TypeVar("T", bound=AnyObject)


class ClientSealedValue(Exception):
    """A client sent a value that looks sealed. `field` is its path."""

    def __init__(self, field: str) -> None:
        self.field = field
        super().__init__(f"{field}: has the prefix of a sealed value; send the plain value")


class UnsealError(Exception):
    """A stored value cannot be unsealed: its key is missing, or it was sealed for another object or field."""

    def __init__(self, where: str, reason: str, cure: str) -> None:
        self.cure = cure
        super().__init__(f"{where} {reason}")


class SealingKey(NamedTuple):
    """A key. `id` is part of every value sealed with it, and reveals nothing about the key."""

    id: str
    material: bytes

    def __repr__(self) -> str:
        return f"Key({self.id})"

    @classmethod
    def of(cls, data: bytes) -> SealingKey:
        if len(data) != KEY_BYTES:
            raise ValueError(f"a sealing key has {KEY_BYTES} bytes, not {len(data)}")
        return cls(hashlib.sha256(b"remit key id" + data).hexdigest()[:12], data)


class SealingKeys:
    """A set of keys; the first one seals."""

    def __init__(self, keys: Sequence[SealingKey]) -> None:
        if not 1 <= len(keys) <= KEYS_MAX or len({key.id for key in keys}) != len(keys):
            raise ValueError(f"expected 1 to {KEYS_MAX} different keys, got {len(keys)}")
        self.keys = tuple(keys)
        self._ciphers = {key.id: AESSIV(key.material) for key in keys}

    @property
    def primary_id(self) -> str:
        """Id of the key that new values are sealed with."""
        return self.keys[0].id

    def seal(self, name: str, field: str, value: str) -> str:
        """Seal `value` of `field` in the object with key `name`."""
        return secrets.format_sealed(
            self.primary_id, _base64_text(self._ciphers[self.primary_id].encrypt(value.encode(), _associated_data(name, field)))
        )

    def unseal(self, name: str, field: str, value: str) -> str:
        """Unseal a value. Raises `UnsealError`. A value without the prefix was stored before sealing was introduced, and is
        returned as it is.
        """
        where = f"{name} {field}"
        if not value.startswith(secrets.SEALED_PREFIX):
            return value
        parts = secrets.parse_sealed(value)
        cipher = None if parts is None else self._ciphers.get(parts[0])
        if parts is None or cipher is None:
            which = (
                "in a format that this version does not support"
                if parts is None
                else f"with key {parts[0]}, which is not in the key file"
            )
            raise UnsealError(where, f"was sealed {which}", "restore that key in the key file, or write the value again")
        try:
            data = base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4))
            if _base64_text(data) != parts[1]:  # base64 has spare bits: accept only the canonical encoding
                raise InvalidTag
            return cipher.decrypt(data, _associated_data(name, field)).decode()
        except (InvalidTag, ValueError) as error:
            raise UnsealError(
                where, "cannot be unsealed: it was sealed for another object or field, or is damaged", "write the value again"
            ) from error

    def fingerprint(self, values: Sequence[str]) -> str:
        """Return a keyed digest of a list of strings. Equal lists have equal digests while the primary key is the same; without
        the key nobody can test guesses.
        """
        message = b"".join(len(value.encode()).to_bytes(8, "big") + value.encode() for value in values)
        return hmac.digest(self.keys[0].material, _FINGERPRINT_CONTEXT + message, "sha256")[:FINGERPRINT_BYTES].hex()

    # -- objects -----------------------------------------------------------------------------------------------------------

    def seal_object(self, obj: T, already_sealed: Mapping[str, str] | None = None) -> T:
        """Return a secret with its values sealed; other objects are returned as they are. Sealed values that are in
        `already_sealed` are kept.

        Raises `ClientSealedValue` for any other value that looks sealed.
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
        """Return a secret with plain values. A value that cannot be unsealed stays sealed."""
        name, data = key(secret), {}
        for field, value in secret.spec.data.items():
            try:
                data[field] = self.unseal(name, field, value)
            except UnsealError:
                data[field] = value
        return replace(secret, spec=replace(secret.spec, data=data))

    def sealed_by_older_keys(self, secret: Secret) -> Iterator[Secret]:
        """Yield the secret as it would have been sealed when each of the older keys was the primary one."""
        plain = self.unseal_object(secret)
        for older_key in self.keys[1:]:
            yield SealingKeys([older_key]).seal_object(plain)

    def needs_resealing(self, secret: Secret) -> bool:
        """Return whether any value is not sealed with the primary key."""
        return any((secrets.parse_sealed(value) or ("",))[0] != self.primary_id for value in secret.spec.data.values())


def _base64_text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _associated_data(name: str, field: str) -> list[bytes]:
    return [_SEAL_CONTEXT, name.encode(), field.encode()]


KEY_FILE_NAME: Final = "seal.keys"
_KEY_FILE_BYTES_MAX: Final = 64 << 10
_NONCES_PER_KEY: Final = 8
"""80 bits each, 640 in all: more than the 512 bits of a key."""


class Keyring:
    """The keys of a server. `sealing_keys` are the current ones, loaded from `path` at first use. Without a `path` they exist
    only in memory, as in a simulation.

    Blocks. Raises `DiskError`.
    """

    def __init__(self, disk: Disk, ids: Ids, path: Path | None = None) -> None:
        self._disk, self._ids, self._path = disk, ids, path
        self._sealing_keys: SealingKeys | None = None
        self._writes_by_key: Counter[str] = Counter()
        self.newest_key_operation = ""
        """Operation id of the request that added the newest key, if this process added it."""

    @contextmanager
    def track_write(self) -> Iterator[None]:
        """Track a write from the sealing of its values to its answer, so that a rotation can wait for writes that use older
        keys.
        """
        key_id = self.sealing_keys.primary_id
        self._writes_by_key[key_id] += 1
        try:
            yield
        finally:
            self._writes_by_key[key_id] -= 1

    @property
    def old_keys_unused(self) -> bool:
        """Whether no write under way was sealed with an older key."""
        return not any(count for key, count in self._writes_by_key.items() if key != self.sealing_keys.primary_id)

    @property
    def sealing_keys(self) -> SealingKeys:
        if self._sealing_keys is None:
            self._sealing_keys = SealingKeys(self._read() or self._write([self._generate_key()]))
        return self._sealing_keys

    def add_key(self) -> SealingKeys:
        """Add a new primary key. It is on disk before it seals anything. Raises ValueError if there are too many."""
        if len(self.sealing_keys.keys) >= KEYS_MAX:
            raise ValueError(f"the key file already has {KEYS_MAX} keys")
        self._sealing_keys = SealingKeys(self._write([self._generate_key(), *self.sealing_keys.keys]))
        return self._sealing_keys

    def forget_old_keys(self) -> SealingKeys:
        """Delete all keys but the primary one."""
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
        """Return the keys of the file; empty if there is none."""
        if self._path is None:
            return []
        try:
            data = self._disk.read(self._path, bytes_max=_KEY_FILE_BYTES_MAX)
        except FileMissing:
            return []
        _check_private(self._path)
        try:
            keys = [SealingKey.of(base64.b64decode(line, validate=True)) for line in data.split()]
            return list(SealingKeys(keys).keys)
        except (binascii.Error, ValueError) as error:
            cure = "restore the original file: without its keys no stored secret can be read"
            raise DiskError(
                f"{self._path} does not consist of {KEY_BYTES}-byte keys in base64, one per line ({error})", cure
            ) from None


def _check_private(path: Path) -> None:
    """Refuse a key file that other users can read, so that the operator notices and rotates the key."""
    status = path.stat()
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise AccessDenied(f"{path} is readable by other users", f"chmod 600 {path}, then rotate the key: remit secrets rotate")
    if status.st_uid != os.geteuid():
        raise AccessDenied(f"{path} is owned by another user", f"chown it to the user of the server, and chmod 600 {path}")


encode_material: Final = msgspec.json.Encoder().encode
_REFUSED_CURE: Final = "run the attempt on the node it is bound to, and retry while the node's lease is held"


class SecretDelivery:
    """Delivers secrets and configs to the agents of a scope."""

    def __init__(self, endpoint: Endpoint, store: Store, keyring: Keyring) -> None:
        self._endpoint, self._store, self._keyring = endpoint, store, keyring

    async def material_for(self, request: SecretMaterialRequest) -> SecretMaterial:
        try:
            return await self._material_for(request)
        except (EndpointError, StoreError) as error:
            return SecretMaterial(failed="later", why=str(error), cure="nothing: the agent retries")

    async def _material_for(self, request: SecretMaterialRequest) -> SecretMaterial:
        if request.actor.role is not Role.AGENT or not request.actor.lease.startswith(f"{Role.AGENT}/"):
            return SecretMaterial(failed="refused", why=f"{request.actor.role} does not run replicas", cure=_REFUSED_CURE)
        if not request.key.startswith("replica/"):
            return SecretMaterial(failed="refused", why="secrets are delivered to replicas only", cure=_REFUSED_CURE)
        if not await self._endpoint.renew(request.actor):
            return SecretMaterial(
                failed="refused", why=f"lease {request.actor.lease} is not held by the caller", cure=_REFUSED_CURE
            )
        # Read the replica after the renewal: a binding made while another agent held the lease is visible by now.
        replica = await self._get(request.key)
        reason = material_denial_reason(request, replica if isinstance(replica, Replica) else None)
        if reason or not isinstance(replica, Replica):
            return SecretMaterial(failed="refused", why=reason, cure=_REFUSED_CURE)
        tenant, spec = replica.metadata.tenant, replica.spec
        generation = await self._get(key_of("Generation", f"{spec.workload}/{spec.generation:08d}", tenant))
        if not isinstance(generation, Generation):
            return SecretMaterial(
                failed="missing", why=f"generation {spec.generation} of {spec.workload} does not exist", cure=""
            )
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
            return {
                field: self._keyring.sealing_keys.unseal(object_key, field, value) for field, value in obj.spec.data.items()
            }
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
