"""Sealed values: open only in the object and field where they were sealed and under known keys; and the key file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remit.model import secrets
from remit.model.metadata import Metadata
from remit.model.secrets import Config, DataSpec, Secret, SecretSpec
from remit.serve.auth.secrets import KEYS_MAX, ClientSealedValue, Keyring, SealingKey, SealingKeys, UnsealError
from remit.world.files.disk import FileDisk
from remit.world.interfaces import AccessDenied, DiskError
from remit.world.randomness import RandomIds

OLD, NEW = SealingKey.of(bytes(64)), SealingKey.of(bytes(range(64)))
OBJECT = "secret/acme/db"


def secret(**data: str) -> Secret:
    return Secret(metadata=Metadata(name="db", tenant="acme"), spec=SecretSpec(data=data))


@given(st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=200))
def test_sealed_value_opens_again_and_sealing_is_deterministic(value: str) -> None:
    seals = SealingKeys([NEW, OLD])
    text = seals.seal(OBJECT, "password", value)
    assert text == seals.seal(OBJECT, "password", value), "a retried request has the same payload"
    assert seals.unseal(OBJECT, "password", text) == value
    assert secrets.is_sealed(text) and secrets.plain_bytes(text) == len(value.encode())
    assert len(value) < 4 or value not in text.rpartition(":")[2], "short values may occur in the ciphertext by chance"


@pytest.mark.parametrize("name, field", [("secret/acme/other", "password"), ("secret/evil/db", "password"), (OBJECT, "user")])
def test_value_moved_to_other_object_or_field_does_not_open(name: str, field: str) -> None:
    seals = SealingKeys([NEW])
    text = seals.seal(OBJECT, "password", "hunter2")
    with pytest.raises(UnsealError, match="another object or field") as error:
        seals.unseal(name, field, text)
    assert "hunter2" not in str(error.value)


def test_tampered_value_does_not_open() -> None:
    seals = SealingKeys([NEW])
    text = seals.seal(OBJECT, "password", "hunter2")
    head, _, body = text.rpartition(":")
    signs = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    for at in range(len(body)):
        for sign in signs.replace(body[at], ""):
            with pytest.raises(UnsealError):
                seals.unseal(OBJECT, "password", f"{head}:{body[:at]}{sign}{body[at + 1 :]}")


def test_unknown_key_is_named_in_error() -> None:
    text = SealingKeys([OLD]).seal(OBJECT, "password", "hunter2")
    with pytest.raises(UnsealError, match=OLD.id) as error:
        SealingKeys([NEW]).unseal(OBJECT, "password", text)
    assert "restore that key" in error.value.cure
    assert SealingKeys([NEW, OLD]).unseal(OBJECT, "password", text) == "hunter2"
    forged = text.replace(OLD.id, NEW.id)
    with pytest.raises(UnsealError):
        SealingKeys([NEW, OLD]).unseal(OBJECT, "password", forged)


def test_repr_of_key_does_not_show_material() -> None:
    assert OLD.material.hex() not in repr(OLD) and repr(bytes(64)) not in repr(OLD)


def test_only_secrets_are_sealed_and_old_keys_need_resealing() -> None:
    seals = SealingKeys([NEW])
    config = Config(metadata=Metadata(name="c", tenant="acme"), spec=DataSpec(data={"a": "b"}))
    assert seals.seal_object(config) is config
    stored = seals.seal_object(secret(a="1", b=""))
    assert all(map(secrets.is_sealed, stored.spec.data.values()))
    assert seals.unseal_object(stored) == secret(a="1", b="")
    assert not seals.needs_resealing(stored) and SealingKeys([OLD, NEW]).needs_resealing(stored)


def test_client_sealed_value_is_refused_unless_already_stored() -> None:
    seals = SealingKeys([NEW])
    mine = seals.seal(OBJECT, "password", "hunter2")
    for supplied in (mine, "remit:sealed:", "remit:sealed:1:zz:??", "remit:sealed:9:whatever"):
        with pytest.raises(ClientSealedValue) as error:
            seals.seal_object(secret(password=supplied))
        assert error.value.field == "spec.data.password"
    assert seals.seal_object(secret(password=mine), already_sealed={"password": mine}).spec.data == {"password": mine}
    with pytest.raises(ClientSealedValue):
        seals.seal_object(secret(user=mine), already_sealed={"password": mine})


def test_unsealed_value_from_before_sealing_is_read_and_needs_resealing() -> None:
    seals = SealingKeys([NEW])
    assert seals.unseal(OBJECT, "password", "from before") == "from before"
    assert seals.needs_resealing(secret(password="from before"))


# -- key file --------------------------------------------------------------------------------------------------------------


def keyring(path: Path) -> Keyring:
    return Keyring(FileDisk(), RandomIds(), path)


def test_key_file_is_created_once_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "new" / "seal.keys"
    first = keyring(path).sealing_keys.primary_id
    assert path.stat().st_mode & 0o777 == 0o600
    assert keyring(path).sealing_keys.primary_id == first
    assert keyring(tmp_path / "other.keys").sealing_keys.primary_id != first


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_key_file_readable_by_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "seal.keys"
    assert keyring(path).sealing_keys.primary_id
    path.chmod(mode)
    with pytest.raises(AccessDenied, match="readable by other users"):
        assert keyring(path).sealing_keys.primary_id


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_key_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "seal.keys"
    assert keyring(path).sealing_keys.primary_id
    os.chown(path, 65534, 65534)
    with pytest.raises(AccessDenied, match="another user"):
        assert keyring(path).sealing_keys.primary_id


@pytest.mark.parametrize("text", ["", "short\n", "QUJD\n", "not base 64 at all!\n"])
def test_key_file_without_keys_is_refused_and_not_overwritten(tmp_path: Path, text: str) -> None:
    path = tmp_path / "seal.keys"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(DiskError, match="does not consist of 64-byte keys"):
        assert keyring(path).sealing_keys.primary_id
    assert path.read_text() == text, "replacing the file would make every secret unreadable"


def test_added_key_becomes_primary_and_old_keys_still_open(tmp_path: Path) -> None:
    keys = keyring(tmp_path / "seal.keys")
    text = keys.sealing_keys.seal(OBJECT, "password", "hunter2")
    first = keys.sealing_keys.primary_id
    assert keys.add_key().primary_id != first
    found = keyring(tmp_path / "seal.keys").sealing_keys
    assert found.primary_id == keys.sealing_keys.primary_id and found.unseal(OBJECT, "password", text) == "hunter2"
    keys.forget_old_keys()
    with pytest.raises(UnsealError):
        keyring(tmp_path / "seal.keys").sealing_keys.unseal(OBJECT, "password", text)


def test_number_of_keys_is_limited(tmp_path: Path) -> None:
    keys = keyring(tmp_path / "seal.keys")
    for _ in range(KEYS_MAX - 1):
        keys.add_key()
    with pytest.raises(ValueError, match="already"):
        keys.add_key()
    assert len(keyring(tmp_path / "seal.keys").sealing_keys.keys) == KEYS_MAX
