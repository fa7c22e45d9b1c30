"""Fuzzing of the manifest reader: it always answers, quickly, and agrees with the decoder."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remit.model import metadata, objects
from remit.model.manifests.reader import Manifests, read
from remit.model.problems import PROBLEMS_MAX

EXAMPLES = sorted((Path(__file__).parents[4] / "examples").glob("*.*"))
GOOD = [path.read_bytes() for path in EXAMPLES]
NAMES = st.sampled_from(["f.yaml", "f.json", "-"])
LETTERS = st.sampled_from(list("{}[]:,-?&*!|>'\"%@`#\n\t \\~<=.0123456789aeinotu_/$\r\x00é\u202e"))


def check_answer(manifests: Manifests, data: bytes) -> None:
    """Objects or problems, never both, never neither; each problem within the file and on one line."""
    assert bool(manifests.objects) != bool(manifests.problems)
    lines = data.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for problem in manifests.problems:
        assert 1 <= problem.line <= len(lines)
        assert 1 <= problem.column <= len(lines[problem.line - 1]) + 1
        assert problem.message
        assert str(problem).isprintable()


@given(st.binary(max_size=200), NAMES)
def test_arbitrary_bytes_are_answered(data: bytes, name: str) -> None:
    check_answer(read(data, name), data)


@given(st.lists(LETTERS, max_size=60), NAMES)
def test_arbitrary_punctuation_is_answered(letters: list[str], name: str) -> None:
    data = "".join(letters).encode()
    check_answer(read(data, name), data)


@given(st.sampled_from(GOOD), st.data())
def test_damaged_good_file_is_answered(good: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(good)))
    cut = data.draw(st.integers(0, 12))
    put = "".join(data.draw(st.lists(LETTERS, max_size=4))).encode()
    damaged = good[:at] + put + good[at + cut :]
    check_answer(read(damaged, data.draw(NAMES)), damaged)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_prefix_of_good_file_is_answered(path: Path) -> None:
    good = path.read_bytes()
    for end in range(0, len(good), 1 if len(good) < 1200 else 7):
        check_answer(read(good[:end], path.name), good[:end])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(GOOD), st.data())
def test_replaced_value_is_refused_by_reader_whenever_decoder_refuses(good: bytes, data: st.DataObject) -> None:
    """It looks for values that the schema accepts and the decoder does not, and for exceptions."""
    declared = read(good, "f.yaml" if not good.startswith(b"[") else "f.json").objects
    written = msgspec.json.decode(objects.encode(data.draw(st.sampled_from(declared))))
    written["apiVersion"] = metadata.API_VERSION
    here = written
    while True:
        key = data.draw(st.sampled_from(sorted(here))) if isinstance(here, dict) else data.draw(st.integers(0, len(here) - 1))
        if not isinstance(here[key], (dict, list)) or not here[key] or data.draw(st.booleans()):
            break
        here = here[key]
    here[key] = data.draw(VALUES)
    manifests = read(msgspec.json.encode(written), "f.json", system=True)
    assert not any("remit schema" in problem.cure for problem in manifests.problems), manifests.problems
    for obj in manifests.objects:
        assert objects.decode(objects.encode(obj)) == obj


def test_file_full_of_mistakes_is_truncated_and_quick() -> None:
    data = b"apiVersion: remit/v1\nkind: Region\nmetadata: {name: a}\nspec:\n" + b"".join(
        b"  zon%d: 1\n" % n for n in range(4900)
    )
    start = time.perf_counter()
    manifests = read(data, "f.yaml")
    assert len(manifests.problems) == PROBLEMS_MAX + 1
    assert "3900 more" in manifests.problems[-1].message
    assert time.perf_counter() - start < 20


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 8192,
        b"[a," * 2700,
        b"- " * 4096,
        b"{" * 8192,
        b"? " * 4096,
        b"a: " * 2700,
        b'"' * 8192,
        b"'" * 8191,
        b"&a " * 2700,
        b"*a " * 2700,
        b"!a " * 2700,
        b"|\n" * 4096,
        b"%" * 8192,
        b"\n" * 8192,
        b"#\n" * 4096,
        b"a: b\n" * 1600,
        b"--- \n" * 1600,
        b"\\" * 8192,
        b'"' + b"\\u" * 4000,
        b'{"a":' * 1600,
        b"[" + b"1," * 4000 + b"1]",
    ],
    ids=lambda data: repr(data[:6]),
)
def test_eight_kilobytes_of_anything_are_answered_quickly(data: bytes) -> None:
    read(b"a: 1", "f.yaml")  # loads the parser
    start = time.perf_counter()
    check_answer(read(data, "f.yaml"), data)
    assert time.perf_counter() - start < 5


HEAD = '{"apiVersion": "remit/v1", "kind": "Workload", "metadata": {"name": "a", "tenant": "b"}, "spec": {"type": "service", '


def _large(what: str) -> tuple[str, str]:
    """A file near the size limit that costs quadratic time if every prefix is tried, and its name."""
    if what == "an unclosed quote full of escapes":
        return 'a: "' + '\\"' * 125_000, "f.yaml"
    if what == "an argument full of half-written ports":
        return HEAD + f'"template": {{"command": ["{"$(PORT_" * 145_000}"]}}}}}}', "f.json"
    if what == "very many ports":
        ports = ",".join(f'{{"name": "a-port-{n}"}}' for n in range(12_000))
        words = ",".join(f'"$(PORT_no-port-{n})"' for n in range(12_000))
        return HEAD + f'"template": {{"command": [{words}], "ports": [{ports}]}}}}}}', "f.json"
    if what == "very many keys beside the tenant":
        keys = ",".join(f'"tenan-{n}": 1' for n in range(24_000))
        return f'{{"apiVersion": "remit/v1", "kind": "Workload", "metadata": {{{keys}}}}}', "f.json"
    if what == "a long tag":
        return "a: !" + "x" * 250_000 + " b", "f.yaml"
    if what == "a long escaped tag":
        return "a: !" + "%41" * 80_000 + " b", "f.yaml"
    return 'a: "\n"\n' + "".join(f"k{n}: v\n" for n in range(20_000)), "f.yaml"


@pytest.mark.parametrize(
    "what",
    [
        "an unclosed quote full of escapes",
        "an argument full of half-written ports",
        "very many ports",
        "very many keys beside the tenant",
        "a long tag",
        "a long escaped tag",
        "a quote of two lines and then very many keys",
    ],
)
def test_largest_files_are_answered_quickly(what: str) -> None:
    read(b"a: 1", "f.yaml")  # loads the parser
    text, name = _large(what)
    assert 150_000 < len(text) <= 1 << 20
    start = time.process_time()
    manifests = read(text.encode(), name)
    assert time.process_time() - start < 10
    check_answer(manifests, text.encode())
