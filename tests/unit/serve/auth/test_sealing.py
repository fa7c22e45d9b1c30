"""Does a sealed value open where it was sealed, and nowhere else? Changed, moved, under other keys; and the file of keys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remit.model import secrets
from remit.model.kinds import Config, DataSpec, Secret, SecretSpec
from remit.model.metadata import Metadata
from remit.serve.auth.secrets import KEYS_MAX, ClientSealedValue, Keyring, SealingKey, SealingKeys, UnsealError
from remit.world.files.disk import FileDisk
from remit.world.interfaces import AccessDenied, DiskError
from remit.world.randomness import RandomIds

OLD, NEW = SealingKey.of(bytes(64)), SealingKey.of(bytes(range(64)))
HERE = "secret/acme/db"


def secret(**data: str) -> Secret:
    return Secret(metadata=Metadata(name="db", tenant="acme"), spec=SecretSpec(data=data))


@given(st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=200))
def test_what_was_sealed_opens_again_and_is_the_same_text_each_time(value: str) -> None:
    seals = SealingKeys([NEW, OLD])
    text = seals.seal(HERE, "password", value)
    assert text == seals.seal(HERE, "password", value), "a request that is sent again has the same payload"
    assert seals.unseal(HERE, "password", text) == value
    assert secrets.is_sealed(text) and secrets.plain_bytes(text) == len(value.encode())
    assert len(value) < 4 or value not in text.rpartition(":")[2], "its head is the same for all"


@pytest.mark.parametrize("name, field", [("secret/acme/other", "password"), ("secret/evil/db", "password"), (HERE, "user")])
def test_a_value_that_was_moved_to_another_object_or_field_does_not_open(name: str, field: str) -> None:
    seals = SealingKeys([NEW])
    text = seals.seal(HERE, "password", "hunter2")
    with pytest.raises(UnsealError, match="another object or field") as told:
        seals.unseal(name, field, text)
    assert "hunter2" not in str(told.value)


def test_a_value_that_was_tampered_with_does_not_open() -> None:
    seals = SealingKeys([NEW])
    text = seals.seal(HERE, "password", "hunter2")
    head, _, body = text.rpartition(":")
    signs = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    for at in range(len(body)):
        for sign in signs.replace(body[at], ""):
            with pytest.raises(UnsealError):
                seals.unseal(HERE, "password", f"{head}:{body[:at]}{sign}{body[at + 1 :]}")


def test_another_key_does_not_open_it_and_says_which_one_would() -> None:
    text = SealingKeys([OLD]).seal(HERE, "password", "hunter2")
    with pytest.raises(UnsealError, match=OLD.id) as told:
        SealingKeys([NEW]).unseal(HERE, "password", text)
    assert "restore that key" in told.value.cure
    assert SealingKeys([NEW, OLD]).unseal(HERE, "password", text) == "hunter2"
    forged = text.replace(OLD.id, NEW.id)
    with pytest.raises(UnsealError):
        SealingKeys([NEW, OLD]).unseal(HERE, "password", forged)


def test_keys_tell_nothing_of_themselves() -> None:
    assert OLD.material.hex() not in repr(OLD) and repr(bytes(64)) not in repr(OLD)


def test_a_whole_secret_is_sealed_and_anything_else_is_left_as_it_is() -> None:
    seals = SealingKeys([NEW])
    config = Config(metadata=Metadata(name="c", tenant="acme"), spec=DataSpec(data={"a": "b"}))
    assert seals.seal_object(config) is config
    stored = seals.seal_object(secret(a="1", b=""))
    assert all(map(secrets.is_sealed, stored.spec.data.values()))
    assert seals.unseal_object(stored) == secret(a="1", b="")
    assert not seals.needs_resealing(stored) and SealingKeys([OLD, NEW]).needs_resealing(stored)


def test_a_value_that_came_sealed_is_refused_unless_it_stands_there_already() -> None:
    seals = SealingKeys([NEW])
    mine = seals.seal(HERE, "password", "hunter2")
    for pasted in (mine, "remit:sealed:", "remit:sealed:1:zz:??", "remit:sealed:9:whatever"):
        with pytest.raises(ClientSealedValue) as told:
            seals.seal_object(secret(password=pasted))
        assert told.value.field == "spec.data.password"
    assert seals.seal_object(secret(password=mine), already_sealed={"password": mine}).spec.data == {"password": mine}
    with pytest.raises(ClientSealedValue):
        seals.seal_object(secret(user=mine), already_sealed={"password": mine})


def test_what_a_store_held_before_anything_was_sealed_is_read_and_counts_as_behind() -> None:
    seals = SealingKeys([NEW])
    assert seals.unseal(HERE, "password", "from before") == "from before"
    assert seals.needs_resealing(secret(password="from before"))


# -- the file of keys ------------------------------------------------------------------------------------------------------


def ring(path: Path) -> Keyring:
    return Keyring(FileDisk(), RandomIds(), path)


def test_keys_are_made_once_for_their_owner_alone_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "seal.keys"
    first = ring(path).sealing_keys.primary_id
    assert path.stat().st_mode & 0o777 == 0o600
    assert ring(path).sealing_keys.primary_id == first
    assert ring(tmp_path / "other.keys").sealing_keys.primary_id != first


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_keys_that_others_may_read_are_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "seal.keys"
    assert ring(path).sealing_keys.primary_id
    path.chmod(mode)
    with pytest.raises(AccessDenied, match="readable by other users"):
        assert ring(path).sealing_keys.primary_id


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_keys_of_another_user_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "seal.keys"
    assert ring(path).sealing_keys.primary_id
    os.chown(path, 65534, 65534)
    with pytest.raises(AccessDenied, match="another user"):
        assert ring(path).sealing_keys.primary_id


@pytest.mark.parametrize("text", ["", "short\n", "QUJD\n", "not base 64 at all!\n"])
def test_a_file_without_keys_is_refused_and_never_written_over(tmp_path: Path, text: str) -> None:
    path = tmp_path / "seal.keys"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(DiskError, match="does not consist of 64-byte keys"):
        assert ring(path).sealing_keys.primary_id
    assert path.read_text() == text, "a new key in its place would leave every secret unread"


def test_a_new_key_comes_first_and_old_ones_still_open(tmp_path: Path) -> None:
    keys = ring(tmp_path / "seal.keys")
    text = keys.sealing_keys.seal(HERE, "password", "hunter2")
    first = keys.sealing_keys.primary_id
    assert keys.add_key().primary_id != first
    found = ring(tmp_path / "seal.keys").sealing_keys
    assert found.primary_id == keys.sealing_keys.primary_id and found.unseal(HERE, "password", text) == "hunter2"
    keys.forget_old_keys()
    with pytest.raises(UnsealError):
        ring(tmp_path / "seal.keys").sealing_keys.unseal(HERE, "password", text)


def test_there_are_only_so_many_keys(tmp_path: Path) -> None:
    keys = ring(tmp_path / "seal.keys")
    for _ in range(KEYS_MAX - 1):
        keys.add_key()
    with pytest.raises(ValueError, match="already"):
        keys.add_key()
    assert len(ring(tmp_path / "seal.keys").sealing_keys.keys) == KEYS_MAX
