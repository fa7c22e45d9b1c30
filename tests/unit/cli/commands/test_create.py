"""Tests of reading secret and config data. Errors never contain a value."""

from __future__ import annotations

import io
from pathlib import Path

import click
import pytest

from remit.cli.commands.create import data_of
from remit.cli.session.server_call import CommandError

CANARY = "canary-4711"


def test_keys_come_from_options_or_file_names(tmp_path: Path) -> None:
    (tmp_path / "tls.crt").write_text("a certificate\n")
    (tmp_path / "password").write_text(CANARY)
    data = data_of((str(tmp_path / "tls.crt"), f"password={tmp_path / 'password'}"), ("user=ann", "equation=a=b", "empty="))
    assert data == {"tls.crt": "a certificate\n", "password": CANARY, "user": "ann", "equation": "a=b", "empty": ""}


def test_one_value_is_read_from_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(CANARY.encode())))
    assert data_of(("password=-",), ()) == {"password": CANARY}


@pytest.mark.parametrize(
    ("files", "literals", "message"),
    [
        ((), (), "no data given"),
        ((), (CANARY,), "one value has no ="),
        ((), (f"a={CANARY}", f"a={CANARY}"), "key a is given twice"),
        ((), (f"../a={CANARY}",), '"../a" is not a valid key'),
        ((), (f"a={CANARY}" + "x" * 65_536,), "the limit is 65536"),
        (("a=-", "b=-"), (), "only one --from-file"),
        (("-",), (), "needs a key"),
        (("a=/does/not/exist",), (), "No such file"),
    ],
)
def test_invalid_data_is_refused_without_printing_the_value(
    files: tuple[str, ...], literals: tuple[str, ...], message: str
) -> None:
    with pytest.raises(click.UsageError) as error:
        data_of(files, literals)
    assert message in error.value.message and CANARY not in error.value.message


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a\0b"])
def test_binary_value_is_refused_with_a_fix(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(CommandError, match="not UTF-8 text") as error:
        data_of((str(tmp_path / "key"),), ())
    assert "base64" in error.value.message
