"""YAML 1.2 reader with positions; no tags, bounded aliases.

The 1.2 core schema on the parser's events; nothing is ever constructed by a tag.

The parser is pure Python: 30 µs for each value. So what it would be long about is refused by a scan before it starts, and
its events are put together here, where an alias costs what it repeats and a mapping cannot hold a key twice.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentEndEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
)

from remit.model.manifests.documents import (
    DEPTH_MAX,
    DIGITS_MAX,
    YAML_NODES_MAX,
    Builder,
    Exhausted,
    Node,
    Place,
    Refused,
)
from remit.model.problems import Problems, escaped, shown

ANCHORS_MAX = 64
ALIASES_MAX = 64

_TAG = "tag:yaml.org,2002:"
_NULL = re.compile(r"(?:null|Null|NULL|~|)\Z")
_BOOLEAN = re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")
_INTEGER = re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z")
_NUMBER = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z")
_ENDLESS = re.compile(r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z")
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_yaml(text: str, problems: Problems) -> list[Node]:
    if not _scan(text, problems):
        return []
    composer = _Composer(problems)
    try:
        for part in _parts(text):
            if _directives(part, problems):
                composer.read(part)
    except Exhausted:
        pass
    if not composer.documents and not problems:
        cure = "write at least one manifest, beginning with apiVersion and kind"
        problems.add((1, 1), (), "the file has no document in it", cure)
    return composer.documents


class Part(NamedTuple):
    """A piece of the file with one document in it at most, and the line it starts in, counted from 0."""

    text: str
    line: int


_REST = r"[ \t]*(?:#[^\n]*)?(?:\n|\Z)"
_BORDER = re.compile(rf"^(?:---(?=[ \t\n]|\Z)|\.\.\.(?={_REST}))", re.MULTILINE)
_NOTHING = re.compile(rf"(?:---)?(?:{_REST})*\Z")


def _parts(text: str) -> Iterator[Part]:
    """YAML lets no `---` or `...` stand at the start of a line inside a document, not even in quotes or in a block of text;
    so a document that cannot be read hides none of the others."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    line = 0
    starts = [0, *(match.start() for match in _BORDER.finditer(text) if match.start()), len(text)]
    for start, end in itertools.pairwise(starts):
        part = text[start:end]
        if part.startswith("..."):
            part = "#" + part[1:]  # it ended the document before; now it is a comment on top of the next
        if not _NOTHING.match(part):
            yield Part(part, line)
        line += part.count("\n")


def _directives(part: Part, problems: Problems) -> Part | None:
    """The part without its `%` lines, or None if it holds nothing else. Only `%YAML 1.2` says something we may ignore."""
    if "%" not in part.text:
        return part
    lines = part.text.split("\n")
    may_stand = True
    for number, line in enumerate(lines):
        if may_stand and line.startswith("%"):
            lines[number] = ""
            if not re.match(r"%YAML[ \t]+1\.2[ \t]*(?:#|\Z)", line):
                message = f"the directive {shown(line.strip())} is not followed: this is read as YAML 1.2, without tags"
                problems.add((part.line + number + 1, 1), (), message, "remove the line, or write %YAML 1.2")
        elif line.strip(" \t") and not line.lstrip(" \t").startswith("#"):
            may_stand = False
    text = "\n".join(lines)
    return None if _NOTHING.match(text) else Part(text, part.line)


# ---------------------------------------------------------------------------------------------------- before the parser

_IN_SINGLE = r"'[^']*(?:''[^']*)*'"
_SINGLE_QUOTED = re.compile(_IN_SINGLE)
_QUOTED = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|' + _IN_SINGLE + '|(?P<open>")')
_QUOTE_LEFT_OPEN = re.compile(r"""(?:^|[\s\[{,:-])["']""")
_BLOCK_OF_TEXT = re.compile(r"(?:^|[\s:-])[|>][-+0-9]{0,2}\s*\Z")
_FLOW = re.compile(r"(?:^|[:?-][ \t]+)[\[{]")


def _scan(text: str, problems: Problems) -> bool:
    """May the parser have it? Counts at most the values that are surely there, so that it refuses nothing wrongly: where it
    loses its way (in a quoted text of several lines) it lets the parser count."""
    nodes = flow = 0
    text_indent: int | None = None
    for number, line in enumerate(text.split("\n"), start=1):
        bare = line.strip()
        if not bare or bare[0] == "#":
            continue
        indent = len(line) - len(line.lstrip(" "))
        if text_indent is not None and indent > text_indent:
            continue
        text_indent = None
        if '"' in bare or "'" in bare:
            bare = _unquoted(bare)
            if _QUOTE_LEFT_OPEN.search(bare.replace('""', "")):
                return True
        bare = bare.split(" #", 1)[0]
        if indent == 0 and bare.startswith(("---", "...")):
            flow = 0
        if flow or _FLOW.search(bare):
            opened = bare.count("[") + bare.count("{")
            nodes += opened + bare.count(",")
            if flow + opened > DEPTH_MAX and _depth(bare, flow) > DEPTH_MAX:
                message = f"more than {DEPTH_MAX} brackets are open"
                problems.add((number, indent + 1), (), message, "no manifest needs that many levels: flatten it")
                return False
            flow = max(0, flow + opened - bare.count("]") - bare.count("}"))
        else:
            text_indent = indent if _BLOCK_OF_TEXT.search(bare) else None
            nodes += bare.startswith("- ") + 2 * (": " in bare or bare.endswith(":"))
        if nodes > YAML_NODES_MAX:
            message = f"more than {YAML_NODES_MAX} values in one file"
            problems.add((number, indent + 1), (), message, "split it into several files")
            return False
    return True


def _unquoted(bare: str) -> str:
    """Every quoted text emptied. After a double quote that is never closed no other can be (each is escaped, as seen from the
    first), so they are not tried one by one: on a line of nothing but `\\"` that would take the square of its length."""
    left_open = next((match.start() for match in _QUOTED.finditer(bare) if match["open"]), len(bare))
    return _QUOTED.sub('""', bare[:left_open]) + _SINGLE_QUOTED.sub('""', bare[left_open:])


def _depth(bare: str, depth: int) -> int:
    deepest = depth
    for letter in bare:
        depth += (letter in "[{") - (letter in "]}")
        deepest = max(deepest, depth)
    return deepest


_OPENS_QUOTE = re.compile(r"""(?:^|[\s\[{,:])(["'])""")
_QUOTE = {'"': re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'), "'": re.compile(r"'[^']*+(?:''[^']*+)*+'")}
_AFTER_COLON = re.compile(r"(?<=:)[ \t]*\t[ \t]*")


def _spaced(text: str) -> str:
    """YAML allows tabs in a few places where the parser does not: at the end of a line, before a comment, after the colon of a
    key. There they become spaces, one for one, so that no column moves. A tab that indents stays, and so does one in a text:
    from the first quote that runs over its line nothing is touched, because from there a line does not tell what it is."""
    if "\t" not in text:
        return text
    lines = text.split("\n")
    block: int | None = None
    for number, line in enumerate(lines):
        bare = line.strip(" \t")
        indent = len(line) - len(line.lstrip(" "))
        if block is not None and (not bare or indent > block):
            continue
        block = None
        if not bare or bare[0] == "#":
            lines[number] = line[: len(line) - len(line.lstrip(" \t"))].replace("\t", " ") + line.lstrip(" \t")
            continue
        spaced = _spaced_line(line)
        if spaced is None:
            break
        lines[number] = spaced
        if _BLOCK_OF_TEXT.search(_unquoted(spaced.strip()).split(" #", 1)[0]):
            block = indent
    return "\n".join(lines)


def _spaced_line(line: str) -> str | None:
    """None: a quote opens and is not closed."""
    pieces: list[str] = []
    at = 0
    while True:
        opens = _OPENS_QUOTE.search(line, at)
        end = opens.start(1) if opens else len(line)
        plain = line[at:end]
        comment = re.search(r"(?:^|[ \t])#", plain)
        body = plain[: comment.start() + 1] if comment else plain
        rest = plain[len(body) :]
        pieces.append(_blank_tabs(body, first=at == 0, last=opens is None or comment is not None) + rest)
        if opens is None:
            return "".join(pieces)
        if comment:
            return "".join(pieces) + line[end:]
        quoted = _QUOTE[opens[1]].match(line, end)
        if quoted is None:
            return None
        pieces.append(quoted.group())
        at = quoted.end()


def _blank_tabs(body: str, *, first: bool, last: bool) -> str:
    """`first`: it begins with the indentation of its line, which stays. `last`: nothing but a comment follows it."""
    lead = len(body) - len(body.lstrip(" \t")) if first else 0
    head, body = body[:lead], body[lead:]
    body = _AFTER_COLON.sub(lambda match: " " * len(match.group()), body)
    if last:
        kept = body.rstrip(" \t")
        body = kept + " " * (len(body) - len(kept))
    return head + body


# -------------------------------------------------------------------------------------------------------- from the parser


class _Composer:
    def __init__(self, problems: Problems) -> None:
        self.documents: list[Node] = []
        self._builder = Builder(problems, YAML_NODES_MAX)
        self._line = 0
        self._anchors: dict[str, Node | None] = {}
        self._open: list[str | None] = []
        self._anchors_seen = 0
        self._aliases_seen = 0

    def read(self, part: Part) -> None:
        self._line = part.line
        try:
            for event in YAML(typ="safe", pure=True).parse(_spaced(part.text)):
                self._take(event)
        except Exhausted:
            raise
        except Refused:
            pass
        except MarkedYAMLError as error:
            self._tell(error)
        except (YAMLError, ValueError, LookupError, AssertionError, AttributeError, TypeError, ArithmeticError) as error:
            # The parser's own accidents on hostile text, such as chr() of an escape past the last character.
            why = "an escape in it names no character" if isinstance(error, (ValueError, ArithmeticError)) else "it is not YAML"
            message = f"this document cannot be read: {why}"
            self._builder.refuse((part.line + 1, 1), message, "check its quotes, tags and escapes such as \\U0001f600")

    def _take(self, event: Any) -> None:
        builder = self._builder
        if isinstance(event, DocumentStartEvent):
            self._anchors = {}
            self._open = []
            builder.begin(self._place(event.start_mark))
        elif isinstance(event, DocumentEndEvent):
            if builder.root is not None:
                self.documents.append(builder.root)
        elif isinstance(event, (MappingEndEvent, SequenceEndEvent)):
            node, anchor = builder.close(), self._open.pop()
            if anchor is not None:
                self._anchors[anchor] = node
        elif isinstance(event, NodeEvent):
            place = self._place(event.start_mark)
            if builder.wants_key:
                self._key(event, place)
            else:
                self._value(event, place)

    def _place(self, mark: Any) -> Place:
        return self._line + mark.line + 1, mark.column + 1

    def _key(self, event: Any, place: Place) -> None:
        if not isinstance(event, ScalarEvent) or event.anchor is not None:
            cure = "write the key out, without brackets, & or *"
            if isinstance(event, MappingStartEvent):
                cure = "write the key out, without brackets; what stands in {{ }} must be filled in before the file is read"
            self._stop(place, "a key must be plain text", cure)
        merge = event.value == "<<" and event.implicit[0]
        if merge:
            message = "the merge key << belongs to YAML 1.1 and is not followed"
            self._builder.refuse(place, message, "write the fields out where they are needed")
        elif event.tag is not None:
            self._builder.refuse(place, "a key takes no tag", "remove the tag")
        self._builder.key(self._text(event.value, place), place, drop=merge)

    def _value(self, event: Any, place: Place) -> None:
        if isinstance(event, AliasEvent):
            self._alias(event.anchor, place)
            return
        if event.anchor is not None:
            self._anchors_seen += 1
            if self._anchors_seen > ANCHORS_MAX:
                self._builder.exhausted(place, f"more than {ANCHORS_MAX} anchors in one file", "write the values out")
        if isinstance(event, ScalarEvent):
            if not event.value and event.implicit[0]:  # nothing was written, and the parser is already at what comes next
                place = self._builder.key_place or place
            node = self._scalar(event, place)
            self._builder.add(node)
            if event.anchor is not None:
                self._anchors[event.anchor] = node
            return
        is_mapping = isinstance(event, MappingStartEvent)
        if event.tag not in (None, "!", _TAG + ("map" if is_mapping else "seq")):
            self._refuse_tag(event.tag, place)
        self._builder.open(Node("mapping" if is_mapping else "list", place))
        self._open.append(event.anchor)
        if event.anchor is not None:
            self._anchors[event.anchor] = None  # open: an alias to it from inside would have no end

    def _alias(self, name: str, place: Place) -> None:
        self._aliases_seen += 1
        if self._aliases_seen > ALIASES_MAX:
            self._builder.exhausted(place, f"more than {ALIASES_MAX} aliases in one file", "write the values out")
        if name not in self._anchors:
            cure = "define it before, in the same document; or quote the text if no alias was meant"
            self._stop(place, f"the alias *{escaped(name)[:60]} refers to no anchor", cure)
        node = self._anchors[name]
        if node is None:
            self._stop(place, f"the alias *{escaped(name)[:60]} stands inside what it refers to", "write the values out")
        self._builder.repeat(node, place)

    def _scalar(self, event: Any, place: Place) -> Node:
        text = self._text(event.value, place)
        tag = event.tag
        if tag is None and not event.implicit[0]:
            return Node("string", place, text, text)
        node = self._resolved(text, place) if tag in (None, "!") or tag.startswith(_TAG) else Node("string", place, text, text)
        if tag is None:
            return node
        expected = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "null": "null"}
        form = expected.get(tag.removeprefix(_TAG))
        if tag == "!" or form == "string":
            return Node("string", place, text, text)
        if form is None:
            self._refuse_tag(tag, place)
            return Node("void", place)
        if node.form not in (form, "void") and (form, node.form) != ("number", "integer"):
            self._builder.refuse(place, f"{shown(text)} is not what its tag says", "remove the tag")
            return Node("void", place)
        return node

    def _resolved(self, text: str, place: Place) -> Node:
        """A plain scalar by the core schema of YAML 1.2: `on` and `2026-11-15` are strings, `010` is ten."""
        if _NULL.match(text):
            return Node("null", place, None, text)
        if _BOOLEAN.match(text):
            return Node("boolean", place, text.lower() == "true", text)
        if _ENDLESS.match(text):
            self._builder.refuse(place, f"{text} is not a finite number", "write a finite number")
            return Node("void", place)
        integer = _INTEGER.match(text)
        if not integer and not _NUMBER.match(text):
            return Node("string", place, text, text)
        if len(text) > DIGITS_MAX:
            self._builder.refuse(
                place, f"a number of {len(text)} digits", f"use at most {DIGITS_MAX}, or quote it if it is a text"
            )
            return Node("void", place)
        if integer:
            base = 8 if text.startswith("0o") else 16 if text.startswith("0x") else 10
            return Node("integer", place, int(text, base), text)
        value = float(text)
        if value in (float("inf"), float("-inf")):
            self._builder.refuse(place, f"{text} is too large for a number", "write a finite number")
            return Node("void", place)
        return Node("number", place, value, text)

    def _text(self, text: str, place: Place) -> str:
        if not _SURROGATE.search(text):
            return text
        self._builder.refuse(place, "half of a surrogate pair is no character", "write the character itself")
        return _SURROGATE.sub("\ufffd", text)

    def _refuse_tag(self, tag: str, place: Place) -> None:
        short = tag.replace(_TAG, "!!", 1)
        message, cure = f"the tag {shown(short)} is not read", "remove it: a manifest is plain data"
        if short.startswith("!!python"):
            message = f"the tag {shown(short)} asks to build a Python object, which a manifest never does"
        elif short == "!!binary":
            cure = "remove it, and write the base64 text as a string"
        self._builder.refuse(place, message, cure)

    def _stop(self, place: Place, message: str, cure: str) -> NoReturn:
        self._builder.refuse(place, message, cure)
        raise Refused

    def _tell(self, error: MarkedYAMLError) -> None:
        """The parser's complaint in words that say what to do."""
        mark = error.problem_mark or error.context_mark
        place = self._place(mark) if mark else (self._line + 1, 1)
        opened = self._place(error.context_mark) if error.context_mark else place
        said = str(error.problem or error.context or error)
        for sign, message, cure, at_opening in _COMPLAINTS:
            if re.search(sign, f"{error.context or ''}: {said}"):
                self._builder.refuse(opened if at_opening else place, message, cure)
                return
        self._builder.refuse(place, "this cannot be read as YAML", "check the indentation, quotes and brackets near here")


_COMPLAINTS = (
    (
        r"found character '\\t'",
        "a tab where YAML wants spaces",
        r'indent with spaces; a tab inside a text is written "\t", in double quotes',
        False,
    ),
    (r"found character '.{1,2}' that", "a text cannot begin with this character", "put the text in quotes", False),
    (
        r"mapping values are not allowed",
        '":" where no key can be',
        'indent like the line above, or quote a text that has ": " in it',
        False,
    ),
    (r"sequence entries are not allowed", '"- " where no list can begin', "begin the list on a line of its own", False),
    (
        r"could not find expected ':'",
        'a key without ":"',
        'write "key: value", or --- between documents; is it only half written?',
        True,
    ),
    (r"quoted scalar: found unexpected (end|document)", "a quote opens here and is never closed", "close it", True),
    (
        r"flow sequence: expected ',' or ']'",
        '"[" opens here and is not closed',
        'close it with "]", or write the missing ","',
        True,
    ),
    (
        r"flow mapping: expected ',' or '}'",
        '"{" opens here and is not closed',
        'close it with "}", or write the missing ","',
        True,
    ),
    (
        r"expected the node content, but found '(<stream end>|<document)",
        "the document ends in the middle",
        "is it only half written?",
        False,
    ),
    (
        r"unknown escape character",
        "a backslash that begins no escape",
        r"write \\ for a backslash, or use single quotes",
        False,
    ),
    (r"escape sequence", "an escape that is not complete", "write all its hexadecimal digits", False),
    (r"expected <block end>, but found '<scalar>'", "a text goes on after its closing quote", "quote all of it", False),
    (
        r"expected <block end>",
        "this line is indented unlike the lines it belongs to",
        "indent it like its neighbours, with spaces",
        False,
    ),
    (
        r"expected '<document start>'",
        "something follows after the document has ended",
        "put --- on a line of its own before a second document, or quote all of the text",
        False,
    ),
    (r"block scalar", '"|" and ">" begin a block of text', "end the line after them, or put the text in quotes", True),
    (r"scanning a directive", '"%" begins a directive', "put the text in quotes", True),
    (r"mapping keys are not allowed", '"?" where no key can be', "put the text in quotes", False),
    (
        r"(block|flow) node: expected the node content",
        "a mark of YAML where a value is expected",
        "write the value, or put the text in quotes",
        False,
    ),
    (r"undefined tag handle", '"!" begins a tag', "put the text in quotes", False),
    (r"while scanning an? (alias|anchor)", '"*" and "&" begin an alias and an anchor', "put the text in quotes", True),
    (r"while (parsing|scanning) an? tag", '"!" begins a tag', "put the text in quotes", True),
)
"""What the parser says, what to tell instead, what to do, and whether the fault lies where the construct opened."""
