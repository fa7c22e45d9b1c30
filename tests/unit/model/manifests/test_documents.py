"""Parsing of YAML 1.2 and JSON into nodes with positions, and the features of them that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from remit.model.manifests.documents import DocumentNode, read_documents
from remit.model.problems import Problems


def plain(node: DocumentNode) -> Any:
    if node.type == "mapping":
        return {key: plain(entry.value) for key, entry in node.fields.items()}
    return [plain(item) for item in node.items] if node.type == "list" else node.scalar


def documents(text: str | bytes, name: str = "f.yaml") -> tuple[list[Any], list[str]]:
    problems = Problems(name)
    data = text.encode() if isinstance(text, str) else text
    found = [plain(node) for node in read_documents(data, name, problems)]
    return found, [str(problem).removeprefix(f"{name}:") for problem in problems.sorted_problems()]


def parse(text: str | bytes, name: str = "f.yaml") -> list[Any]:
    found, problems = documents(text, name)
    assert not problems
    return found


def only_problem(text: str | bytes, name: str = "f.yaml") -> str:
    _, problems = documents(text, name)
    assert len(problems) == 1, problems
    return problems[0]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("+3", 3),
        ("-3", -3),
        ("1.5", 1.5),
        (".5", 0.5),
        ("1e3", 1000.0),
        ("on", "on"),
        ("yes", "yes"),
        ("No", "No"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("null", None),
        ("2026-11-15", "2026-11-15"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("NaN", "NaN"),
        ("'7'", "7"),
        ('"\\u00e9"', "é"),
        ("!!str 7", "7"),
        ("! 7", "7"),
        ("!!int 7", 7),
        ("!!float 7", 7),
        ("|\n  a\n  b\n", "a\nb\n"),
        (">-\n  a\n  b\n", "a b"),
    ],
)
def test_scalars_follow_yaml_1_2_core_schema(written: str, value: object) -> None:
    (document,) = parse(f"key: {written}")
    assert document == {"key": value}
    assert type(document["key"]) is type(value)


def test_keys_are_text_whatever_their_syntax() -> None:
    assert parse("on: 1\n8080: 2\ntrue: 3\n") == [{"on": 1, "8080": 2, "true": 3}]


def test_alias_repeats_its_anchor() -> None:
    assert parse("a: &x {b: [1]}\nc: *x\n") == [{"a": {"b": [1]}, "c": {"b": [1]}}]


def test_documents_are_separated_by_dashes_and_dots() -> None:
    text = "%YAML 1.2\n---\na: 1\n--- {b: 2}\n# only a comment\n---\n---\nc: |\n  x\n...\n# later\n---\nd: 4\n...\n"
    assert parse(text) == [{"a": 1}, {"b": 2}, {"c": "x\n"}, {"d": 4}]


def test_unreadable_document_does_not_hide_others() -> None:
    found, problems = documents('a: "open\n---\nb: 1\n---\nc: [1\n---\nd: 1\n')
    assert found == [{"b": 1}, {"d": 1}]
    assert [problem.split(": ")[0] for problem in problems] == ["1:4", "5:4"]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_every_line_ending_counts_as_one_line(end: str) -> None:
    assert only_problem(end.join(["a: 1", "b: 2", "---", "a: 1", "a: 2"])).startswith("5:1: a: ")


def test_byte_order_mark_is_ignored() -> None:
    assert parse("\ufeffa: 1") == [{"a": 1}]


def test_columns_count_characters_not_bytes() -> None:
    assert only_problem("a: [é, é, .nan]").startswith("1:11: a[2]: ")


def test_block_scalar_does_not_count_as_values() -> None:
    text = "a: |\n" + "  key: [a, b, c]\n" * 11_000
    assert len(parse(text)[0]["a"]) == 11_000 * 15


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("key%d: v\n" * 0 + "".join(f"key{n}: v\n" for n in range(12_000)), "f.yaml", "more than 10000 values"),
        ("a: [" + "x," * 90_000 + "]", "f.yaml", "more than 10000 values"),
        ('a: "\n"\nb: [' + "x, " * 11_000 + "]", "f.yaml", "more than 10000 values"),
        ("a: " + "x" * 300_000, "f.yaml", "the limit is 262144"),
        ('{"a": "' + "x" * (2 << 20) + '"}', "f.json", "more than 1048576 bytes"),
        ("[" + "1," * 200_000 + "1]", "f.json", "more than 50000 values"),
        ("--- a\n" * 2000, "f.yaml", "more than 1000 documents"),
        ("[" * 100_000, "f.yaml", "more than 64 "),
        ("- " * 4_000, "f.yaml", "more than 64 levels"),
        ("{a: " * 4_000, "f.yaml", "more than 64 brackets"),
        ("[" * 100_000, "f.json", "more than 64 levels"),
        ('{"a":' * 100_000, "f.json", "more than 64 levels"),
    ],
)
def test_document_over_limit_is_refused(text: str, name: str, message: str) -> None:
    assert message in only_problem(text, name)


def test_aliases_cannot_exceed_depth_limit() -> None:
    chain = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [[[[*a{n - 1}]]]]\n" for n in range(1, 40))
    assert "64 levels" in only_problem(chain)


def test_unused_anchors_count_against_limit() -> None:
    assert "more than 64 anchors" in only_problem("".join(f"a{n}: &a{n} x\n" for n in range(70)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a: \x00", "U+0000"),
        (b"\x00\x01\x02", "UTF-16"),
        ("a: 1".encode("utf-16-be"), "UTF-16"),
        ("a: 1".encode("utf-32"), "UTF-16"),
        (b"a: \xff", "not UTF-8"),
        ("a: \x85b".encode(), "U+0085"),
        ("a: \u2028b".encode(), "U+2028"),
        (b'a: "\\ud800"', "surrogate"),
        (b'a: "\\U00110000"', "cannot be read"),
        (b"%TAG ! tag:x,2000:\n---\na: 1", "directive"),
        (b"[a]: 1", "a key must be plain text"),
        (b"? {a: 1}\n: 1", "a key must be plain text"),
        (b"&k a: 1", "a key must be plain text"),
        (b"a: !!set {b}", "tag"),
        (b"a: !!int x", "tag"),
        (b"a: !!timestamp 2026-11-15", "tag"),
        (b"a: @b", "quotes"),
        (b"a: -.INF", "finite"),
    ],
)
def test_unsupported_yaml_feature_is_refused(data: bytes, message: str) -> None:
    assert message in only_problem(data)


def test_json_is_read_as_object_array_or_sequence() -> None:
    assert parse('{"a": [1, -2.5e1, "x\\u00e9", true, null, {}, []]}', "f.json") == [
        {"a": [1, -25.0, "xé", True, None, {}, []]}
    ]
    assert parse('[{"a": 1}, {"b": 2}]', "f.json") == [{"a": 1}, {"b": 2}]
    assert parse('{"a": 1}\n{"b": 2}{"c": 3}', "f.json") == [{"a": 1}, {"b": 2}, {"c": 3}]


def test_flow_text_that_is_not_json_is_read_as_yaml() -> None:
    assert parse("{a: 1, b: [x]}", "-") == [{"a": 1, "b": ["x"]}]
    assert parse('{"a": 1, b: 2}', "-") == [{"a": 1, "b": 2}]
    assert parse('{"a": 1,}', "f.yaml") == [{"a": 1}]
    assert "an extra comma" in only_problem('{"a": 1,}', "-")
    assert "double quotes" in only_problem("{a: 1}", "f.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 01}', '1:7: a: "01"'),
        ('{"a": .5}', "1:7"),
        ('{"a": +1}', "1:7"),
        ('{"a": 1 "b": 2}', '1:9: "\\""'[:5]),
        ('{"a": -Infinity}', "not a finite number"),
        ('{"a": 1e999}', "too large"),
        ('{"a": "tab\there"}', "not closed"),
        ('{"a": "\\x"}', "backslash"),
        ('{"a": "\\udc00"}', "surrogate"),
        ("{'a': 1}", "double quotes"),
        ('{"a": [1, 2}', '"," or "]"'),
        ('{"a": 1]', '"," or "}"'),
        ('{"a"', "incomplete"),
        ('{"a": 1} trailing', "1:10"),
        ("[]", "empty"),
    ],
)
def test_invalid_json_is_refused_at_position(text: str, message: str) -> None:
    assert message in only_problem(text, "f.json")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 1\t\nb: 2 \t \n", {"a": 1, "b": 2}),
        ("a: 1\t# it's one\nb: 'x'\t# \"\n", {"a": 1, "b": "x"}),
        ("a:\t1\nb: \tx\n", {"a": 1, "b": "x"}),
        ("a: 1\n\t\n \t \nb: 2\n", {"a": 1, "b": 2}),
        ("a: 1\n\t# c\nb:\t\n  c: 2\n", {"a": 1, "b": {"c": 2}}),
        ('a:\t"b:\tc\t# d"\t\n', {"a": "b:\tc\t# d"}),
        ("a: ['b:\tc',\t\"d\te\"]\t# f\n", {"a": ["b:\tc", "d\te"]}),
        ("a: |\t\n  b:\tc\t\n  \td\n\ne:\t1\n", {"a": "b:\tc\t\n\td\n", "e": 1}),
        ("a: >-\n  b:\tc\nd: 'e\tf'\t\n", {"a": "b:\tc", "d": "e\tf"}),
        ('a: "b\n  c:\td\t# e"\nf: 1\n', {"a": "b c:\td\t# e", "f": 1}),
        ("- a:\tb\n  c: d\t\n", [{"a": "b", "c": "d"}]),
    ],
)
def test_permitted_tabs_are_read_and_kept_in_text(text: str, value: object) -> None:
    assert parse(text) == [value]


@pytest.mark.parametrize("text", ["\ta: 1", "a:\n\tb: 1", "a:\n \tb: 1", "a: b\tc"])
def test_tab_as_indentation_is_refused(text: str) -> None:
    assert "a tab where YAML requires spaces" in only_problem(text)


@pytest.mark.parametrize(
    "text",
    [
        "{a: 1} b",
        '"a" b',
        'a: "\\UFFFFFFFF"',
        "a: >b",
        "a: |0",
        "%",
        "a: ]",
        "a: !<b",
        "a: !b!c d",
        "a: - b",
        "*a ? b",
        "*a *b",
    ],
)
def test_parser_error_is_translated_without_jargon(text: str) -> None:
    problem = only_problem(text)
    assert not any(jargon in problem for jargon in ("<", "Python", "token", "scalar", "node", "indicator", "chomping")), problem
