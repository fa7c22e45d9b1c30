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
    DocumentBuilder,
    DocumentNode,
    DocumentRejected,
    FileLimitExceeded,
    Position,
)
from remit.model.problems import Problems, escaped, quoted

ANCHORS_MAX = 64
ALIASES_MAX = 64

_TAG_PREFIX = "tag:yaml.org,2002:"
_NULL = re.compile(r"(?:null|Null|NULL|~|)\Z")
_BOOLEAN = re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")
_INTEGER = re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z")
_NUMBER = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z")
_NOT_FINITE = re.compile(r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z")
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_yaml(text: str, problems: Problems) -> list[DocumentNode]:
    if not _prescan(text, problems):
        return []
    composer = _Composer(problems)
    try:
        for part in _split_documents(text):
            if _strip_directives(part, problems):
                composer.read(part)
    except FileLimitExceeded:
        pass
    if not composer.documents and not problems:
        cure = "write at least one manifest, beginning with apiVersion and kind"
        problems.add((1, 1), (), "the file has no document in it", cure)
    return composer.documents


class DocumentText(NamedTuple):
    """A piece of the file with one document in it at most, and the line it starts in, counted from 0."""

    text: str
    line: int


_LINE_REST = r"[ \t]*(?:#[^\n]*)?(?:\n|\Z)"
_DOCUMENT_BORDER = re.compile(rf"^(?:---(?=[ \t\n]|\Z)|\.\.\.(?={_LINE_REST}))", re.MULTILINE)
_EMPTY_DOCUMENT = re.compile(rf"(?:---)?(?:{_LINE_REST})*\Z")


def _split_documents(text: str) -> Iterator[DocumentText]:
    """YAML lets no `---` or `...` stand at the start of a line inside a document, not even in quotes or in a block of text;
    so a document that cannot be read hides none of the others."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    line = 0
    starts = [0, *(match.start() for match in _DOCUMENT_BORDER.finditer(text) if match.start()), len(text)]
    for start, end in itertools.pairwise(starts):
        part = text[start:end]
        if part.startswith("..."):
            part = "#" + part[1:]  # it ended the document before; now it is a comment on top of the next
        if not _EMPTY_DOCUMENT.match(part):
            yield DocumentText(part, line)
        line += part.count("\n")


def _strip_directives(part: DocumentText, problems: Problems) -> DocumentText | None:
    """The part without its `%` lines, or None if it holds nothing else. Only `%YAML 1.2` says something we may ignore."""
    if "%" not in part.text:
        return part
    lines = part.text.split("\n")
    may_stand = True
    for number, line in enumerate(lines):
        if may_stand and line.startswith("%"):
            lines[number] = ""
            if not re.match(r"%YAML[ \t]+1\.2[ \t]*(?:#|\Z)", line):
                message = f"the directive {quoted(line.strip())} is not followed: this is read as YAML 1.2, without tags"
                problems.add((part.line + number + 1, 1), (), message, "remove the line, or write %YAML 1.2")
        elif line.strip(" \t") and not line.lstrip(" \t").startswith("#"):
            may_stand = False
    text = "\n".join(lines)
    return None if _EMPTY_DOCUMENT.match(text) else DocumentText(text, part.line)


# ---------------------------------------------------------------------------------------------------- before the parser

_IN_SINGLE = r"'[^']*(?:''[^']*)*'"
_SINGLE_QUOTED = re.compile(_IN_SINGLE)
_QUOTED = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|' + _IN_SINGLE + '|(?P<open>")')
_UNCLOSED_QUOTE = re.compile(r"""(?:^|[\s\[{,:-])["']""")
_BLOCK_SCALAR = re.compile(r"(?:^|[\s:-])[|>][-+0-9]{0,2}\s*\Z")
_FLOW = re.compile(r"(?:^|[:?-][ \t]+)[\[{]")


def _prescan(text: str, problems: Problems) -> bool:
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
            bare = _empty_quotes(bare)
            if _UNCLOSED_QUOTE.search(bare.replace('""', "")):
                return True
        bare = bare.split(" #", 1)[0]
        if indent == 0 and bare.startswith(("---", "...")):
            flow = 0
        if flow or _FLOW.search(bare):
            opened = bare.count("[") + bare.count("{")
            nodes += opened + bare.count(",")
            if flow + opened > DEPTH_MAX and _max_depth(bare, flow) > DEPTH_MAX:
                message = f"more than {DEPTH_MAX} brackets are open"
                problems.add((number, indent + 1), (), message, "no manifest needs that many levels: flatten it")
                return False
            flow = max(0, flow + opened - bare.count("]") - bare.count("}"))
        else:
            text_indent = indent if _BLOCK_SCALAR.search(bare) else None
            nodes += bare.startswith("- ") + 2 * (": " in bare or bare.endswith(":"))
        if nodes > YAML_NODES_MAX:
            message = f"more than {YAML_NODES_MAX} values in one file"
            problems.add((number, indent + 1), (), message, "split it into several files")
            return False
    return True


def _empty_quotes(bare: str) -> str:
    """Every quoted text emptied. After a double quote that is never closed no other can be (each is escaped, as seen from the
    first), so they are not tried one by one: on a line of nothing but `\\"` that would take the square of its length."""
    left_open = next((match.start() for match in _QUOTED.finditer(bare) if match["open"]), len(bare))
    return _QUOTED.sub('""', bare[:left_open]) + _SINGLE_QUOTED.sub('""', bare[left_open:])


def _max_depth(bare: str, depth: int) -> int:
    deepest = depth
    for letter in bare:
        depth += (letter in "[{") - (letter in "]}")
        deepest = max(deepest, depth)
    return deepest


_OPENS_QUOTE = re.compile(r"""(?:^|[\s\[{,:])(["'])""")
_QUOTED_TEXT = {'"': re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'), "'": re.compile(r"'[^']*+(?:''[^']*+)*+'")}
_AFTER_COLON = re.compile(r"(?<=:)[ \t]*\t[ \t]*")


def _replace_tabs(text: str) -> str:
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
        spaced = _replace_tabs_in_line(line)
        if spaced is None:
            break
        lines[number] = spaced
        if _BLOCK_SCALAR.search(_empty_quotes(spaced.strip()).split(" #", 1)[0]):
            block = indent
    return "\n".join(lines)


def _replace_tabs_in_line(line: str) -> str | None:
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
        quoted_text = _QUOTED_TEXT[opens[1]].match(line, end)
        if quoted_text is None:
            return None
        pieces.append(quoted_text.group())
        at = quoted_text.end()


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
        self.documents: list[DocumentNode] = []
        self._builder = DocumentBuilder(problems, YAML_NODES_MAX)
        self._line = 0
        self._anchors: dict[str, DocumentNode | None] = {}
        self._open_anchors: list[str | None] = []
        self._anchors_seen = 0
        self._aliases_seen = 0

    def read(self, part: DocumentText) -> None:
        self._line = part.line
        try:
            for event in YAML(typ="safe", pure=True).parse(_replace_tabs(part.text)):
                self._handle_event(event)
        except FileLimitExceeded:
            raise
        except DocumentRejected:
            pass
        except MarkedYAMLError as error:
            self._add_parser_error(error)
        except (YAMLError, ValueError, LookupError, AssertionError, AttributeError, TypeError, ArithmeticError) as error:
            # The parser's own accidents on hostile text, such as chr() of an escape past the last character.
            why = "an escape in it names no character" if isinstance(error, (ValueError, ArithmeticError)) else "it is not YAML"
            message = f"this document cannot be read: {why}"
            self._builder.add_problem((part.line + 1, 1), message, "check its quotes, tags and escapes such as \\U0001f600")

    def _handle_event(self, event: Any) -> None:
        builder = self._builder
        if isinstance(event, DocumentStartEvent):
            self._anchors = {}
            self._open_anchors = []
            builder.start_document(self._position(event.start_mark))
        elif isinstance(event, DocumentEndEvent):
            if builder.root is not None:
                self.documents.append(builder.root)
        elif isinstance(event, (MappingEndEvent, SequenceEndEvent)):
            node, anchor = builder.close(), self._open_anchors.pop()
            if anchor is not None:
                self._anchors[anchor] = node
        elif isinstance(event, NodeEvent):
            place = self._position(event.start_mark)
            if builder.expects_key:
                self._key(event, place)
            else:
                self._value(event, place)

    def _position(self, mark: Any) -> Position:
        return self._line + mark.line + 1, mark.column + 1

    def _key(self, event: Any, place: Position) -> None:
        if not isinstance(event, ScalarEvent) or event.anchor is not None:
            cure = "write the key out, without brackets, & or *"
            if isinstance(event, MappingStartEvent):
                cure = "write the key out, without brackets; what stands in {{ }} must be filled in before the file is read"
            self._fail(place, "a key must be plain text", cure)
        merge = event.value == "<<" and event.implicit[0]
        if merge:
            message = "the merge key << belongs to YAML 1.1 and is not followed"
            self._builder.add_problem(place, message, "write the fields out where they are needed")
        elif event.tag is not None:
            self._builder.add_problem(place, "a key takes no tag", "remove the tag")
        self._builder.key(self._valid_text(event.value, place), place, drop=merge)

    def _value(self, event: Any, place: Position) -> None:
        if isinstance(event, AliasEvent):
            self._alias(event.anchor, place)
            return
        if event.anchor is not None:
            self._anchors_seen += 1
            if self._anchors_seen > ANCHORS_MAX:
                self._builder.abort_file(place, f"more than {ANCHORS_MAX} anchors in one file", "write the values out")
        if isinstance(event, ScalarEvent):
            if not event.value and event.implicit[0]:  # nothing was written, and the parser is already at what comes next
                place = self._builder.key_position or place
            node = self._scalar(event, place)
            self._builder.add(node)
            if event.anchor is not None:
                self._anchors[event.anchor] = node
            return
        is_mapping = isinstance(event, MappingStartEvent)
        if event.tag not in (None, "!", _TAG_PREFIX + ("map" if is_mapping else "seq")):
            self._reject_tag(event.tag, place)
        self._builder.open(DocumentNode("mapping" if is_mapping else "list", place))
        self._open_anchors.append(event.anchor)
        if event.anchor is not None:
            self._anchors[event.anchor] = None  # open: an alias to it from inside would have no end

    def _alias(self, name: str, place: Position) -> None:
        self._aliases_seen += 1
        if self._aliases_seen > ALIASES_MAX:
            self._builder.abort_file(place, f"more than {ALIASES_MAX} aliases in one file", "write the values out")
        if name not in self._anchors:
            cure = "define it before, in the same document; or quote the text if no alias was meant"
            self._fail(place, f"the alias *{escaped(name)[:60]} refers to no anchor", cure)
        node = self._anchors[name]
        if node is None:
            self._fail(place, f"the alias *{escaped(name)[:60]} stands inside what it refers to", "write the values out")
        self._builder.add_alias(node, place)

    def _scalar(self, event: Any, place: Position) -> DocumentNode:
        text = self._valid_text(event.value, place)
        tag = event.tag
        if tag is None and not event.implicit[0]:
            return DocumentNode("string", place, text, text)
        node = (
            self._resolved(text, place)
            if tag in (None, "!") or tag.startswith(_TAG_PREFIX)
            else DocumentNode("string", place, text, text)
        )
        if tag is None:
            return node
        expected = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "null": "null"}
        form = expected.get(tag.removeprefix(_TAG_PREFIX))
        if tag == "!" or form == "string":
            return DocumentNode("string", place, text, text)
        if form is None:
            self._reject_tag(tag, place)
            return DocumentNode("void", place)
        if node.type not in (form, "void") and (form, node.type) != ("number", "integer"):
            self._builder.add_problem(place, f"{quoted(text)} is not what its tag says", "remove the tag")
            return DocumentNode("void", place)
        return node

    def _resolved(self, text: str, place: Position) -> DocumentNode:
        """A plain scalar by the core schema of YAML 1.2: `on` and `2026-11-15` are strings, `010` is ten."""
        if _NULL.match(text):
            return DocumentNode("null", place, None, text)
        if _BOOLEAN.match(text):
            return DocumentNode("boolean", place, text.lower() == "true", text)
        if _NOT_FINITE.match(text):
            self._builder.add_problem(place, f"{text} is not a finite number", "write a finite number")
            return DocumentNode("void", place)
        integer = _INTEGER.match(text)
        if not integer and not _NUMBER.match(text):
            return DocumentNode("string", place, text, text)
        if len(text) > DIGITS_MAX:
            self._builder.add_problem(
                place, f"a number of {len(text)} digits", f"use at most {DIGITS_MAX}, or quote it if it is a text"
            )
            return DocumentNode("void", place)
        if integer:
            base = 8 if text.startswith("0o") else 16 if text.startswith("0x") else 10
            return DocumentNode("integer", place, int(text, base), text)
        value = float(text)
        if value in (float("inf"), float("-inf")):
            self._builder.add_problem(place, f"{text} is too large for a number", "write a finite number")
            return DocumentNode("void", place)
        return DocumentNode("number", place, value, text)

    def _valid_text(self, text: str, place: Position) -> str:
        if not _SURROGATE.search(text):
            return text
        self._builder.add_problem(place, "half of a surrogate pair is no character", "write the character itself")
        return _SURROGATE.sub("\ufffd", text)

    def _reject_tag(self, tag: str, place: Position) -> None:
        short = tag.replace(_TAG_PREFIX, "!!", 1)
        message, cure = f"the tag {quoted(short)} is not read", "remove it: a manifest is plain data"
        if short.startswith("!!python"):
            message = f"the tag {quoted(short)} asks to build a Python object, which a manifest never does"
        elif short == "!!binary":
            cure = "remove it, and write the base64 text as a string"
        self._builder.add_problem(place, message, cure)

    def _fail(self, place: Position, message: str, cure: str) -> NoReturn:
        self._builder.add_problem(place, message, cure)
        raise DocumentRejected

    def _add_parser_error(self, error: MarkedYAMLError) -> None:
        """The parser's complaint in words that say what to do."""
        mark = error.problem_mark or error.context_mark
        place = self._position(mark) if mark else (self._line + 1, 1)
        opened = self._position(error.context_mark) if error.context_mark else place
        said = str(error.problem or error.context or error)
        for sign, message, cure, at_opening in _PARSER_ERRORS:
            if re.search(sign, f"{error.context or ''}: {said}"):
                self._builder.add_problem(opened if at_opening else place, message, cure)
                return
        self._builder.add_problem(place, "this cannot be read as YAML", "check the indentation, quotes and brackets near here")


_PARSER_ERRORS = (
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
