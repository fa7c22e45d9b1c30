"""What do files and words come to, and what is said when they come to nothing? Never a value."""

from __future__ import annotations

import io
from pathlib import Path

import click
import pytest

from remit.cli.commands.create import data_of
from remit.cli.session.server_call import CommandError

CANARY = "canary-4711"


def test_keys_are_said_or_the_names_of_files(tmp_path: Path) -> None:
    (tmp_path / "tls.crt").write_text("a certificate\n")
    (tmp_path / "word").write_text(CANARY)
    found = data_of((str(tmp_path / "tls.crt"), f"password={tmp_path / 'word'}"), ("user=ann", "equation=a=b", "empty="))
    assert found == {"tls.crt": "a certificate\n", "password": CANARY, "user": "ann", "equation": "a=b", "empty": ""}


def test_one_value_may_come_through_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(CANARY.encode())))
    assert data_of(("password=-",), ()) == {"password": CANARY}


@pytest.mark.parametrize(
    ("files", "words", "told"),
    [
        ((), (), "it would hold nothing"),
        ((), (CANARY,), "one of them has no ="),
        ((), (f"a={CANARY}", f"a={CANARY}"), "the key a is said twice"),
        ((), (f"../a={CANARY}",), '"../a" is no key'),
        ((), (f"a={CANARY}" + "x" * 65_536,), "65536 are the most"),
        (("a=-", "b=-"), (), "only one value"),
        (("-",), (), "needs a key"),
        (("a=/does/not/exist",), (), "No such file"),
    ],
)
def test_what_is_wrong_names_the_key_and_never_the_value(files: tuple[str, ...], words: tuple[str, ...], told: str) -> None:
    with pytest.raises(click.UsageError) as error:
        data_of(files, words)
    assert told in error.value.message and CANARY not in error.value.message


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a\0b"])
def test_what_is_no_text_is_refused_with_a_cure(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(CommandError, match="not text") as error:
        data_of((str(tmp_path / "key"),), ())
    assert "base64" in error.value.message
