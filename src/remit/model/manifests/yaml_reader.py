"""YAML 1.2 reader with positions; no tags, bounded aliases.

Applies the core schema of YAML 1.2 to the parser's events; tags never construct objects. The parser is written in Python and
takes 30 µs per value, so input that would take long is rejected by a scan before parsing. The document tree is built here
and not by the parser, because here an alias counts with its full size and duplicate keys are reported.
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
        for document in _split_documents(text):
            if _strip_directives(document, problems):
                composer.read(document)
    except FileLimitExceeded:
        pass
    if not composer.documents and not problems:
        cure = "write at least one manifest, starting with apiVersion and kind"
        problems.add((1, 1), (), "the file contains no document", cure)
    return composer.documents


class DocumentText(NamedTuple):
    """A piece of the file that contains at most one document, and its first line, from 0."""

    text: str
    line: int


_LINE_REST = r"[ \t]*(?:#[^\n]*)?(?:\n|\Z)"
_DOCUMENT_BORDER = re.compile(rf"^(?:---(?=[ \t\n]|\Z)|\.\.\.(?={_LINE_REST}))", re.MULTILINE)
_EMPTY_DOCUMENT = re.compile(rf"(?:---)?(?:{_LINE_REST})*\Z")


def _split_documents(text: str) -> Iterator[DocumentText]:
    """Splits a file at `---` and `...`. YAML forbids both at the start of a line inside a document, even in quotes and in block
    scalars; so an invalid document does not hide the others.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    line = 0
    starts = [0, *(match.start() for match in _DOCUMENT_BORDER.finditer(text) if match.start()), len(text)]
    for start, end in itertools.pairwise(starts):
        document = text[start:end]
        if document.startswith("..."):
            document = "#" + document[1:]  # the marker ended the previous document; as a comment it keeps the line count
        if not _EMPTY_DOCUMENT.match(document):
            yield DocumentText(document, line)
        line += document.count("\n")


def _strip_directives(document: DocumentText, problems: Problems) -> DocumentText | None:
    """Returns the document without its `%` lines; None if nothing else is left. Only `%YAML 1.2` can be ignored silently."""
    if "%" not in document.text:
        return document
    lines = document.text.split("\n")
    directives_allowed = True
    for number, line in enumerate(lines):
        if directives_allowed and line.startswith("%"):
            lines[number] = ""
            if not re.match(r"%YAML[ \t]+1\.2[ \t]*(?:#|\Z)", line):
                message = f"the directive {quoted(line.strip())} is not supported: the file is read as YAML 1.2, without tags"
                problems.add((document.line + number + 1, 1), (), message, "remove the line, or write %YAML 1.2")
        elif line.strip(" \t") and not line.lstrip(" \t").startswith("#"):
            directives_allowed = False
    text = "\n".join(lines)
    return None if _EMPTY_DOCUMENT.match(text) else DocumentText(text, document.line)


# ------------------------------------------------------------------------------------------------------ before parsing

_IN_SINGLE = r"'[^']*(?:''[^']*)*'"
_SINGLE_QUOTED = re.compile(_IN_SINGLE)
_QUOTED = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|' + _IN_SINGLE + '|(?P<open>")')
_UNCLOSED_QUOTE = re.compile(r"""(?:^|[\s\[{,:-])["']""")
_BLOCK_SCALAR = re.compile(r"(?:^|[\s:-])[|>][-+0-9]{0,2}\s*\Z")
_FLOW = re.compile(r"(?:^|[:?-][ \t]+)[\[{]")


def _prescan(text: str, problems: Problems) -> bool:
    """Returns False if the text is too large to parse, and reports why. It never counts more values than there are, so that it
    rejects no valid file. Where it cannot follow (a quoted text over several lines) it leaves counting to the parser.
    """
    nodes = flow = 0
    text_indent: int | None = None
    for number, line in enumerate(text.split("\n"), start=1):
        content = line.strip()
        if not content or content[0] == "#":
            continue
        indent = len(line) - len(line.lstrip(" "))
        if text_indent is not None and indent > text_indent:
            continue
        text_indent = None
        if '"' in content or "'" in content:
            content = _empty_quotes(content)
            if _UNCLOSED_QUOTE.search(content.replace('""', "")):
                return True
        content = content.split(" #", 1)[0]
        if indent == 0 and content.startswith(("---", "...")):
            flow = 0
        if flow or _FLOW.search(content):
            opened = content.count("[") + content.count("{")
            nodes += opened + content.count(",")
            if flow + opened > DEPTH_MAX and _max_depth(content, flow) > DEPTH_MAX:
                message = f"more than {DEPTH_MAX} brackets are open"
                problems.add((number, indent + 1), (), message, "no manifest needs that many levels: flatten it")
                return False
            flow = max(0, flow + opened - content.count("]") - content.count("}"))
        else:
            text_indent = indent if _BLOCK_SCALAR.search(content) else None
            nodes += content.startswith("- ") + 2 * (": " in content or content.endswith(":"))
        if nodes > YAML_NODES_MAX:
            message = f"more than {YAML_NODES_MAX} values in one file"
            problems.add((number, indent + 1), (), message, "split it into several files")
            return False
    return True


def _empty_quotes(content: str) -> str:
    """Empties all quoted texts. After a double quote that is never closed there can be no other quoted text (each further quote
    is escaped, as seen from the first), so the rest is not searched quote by quote: on a line of only `\\"` that would take
    quadratic time.
    """
    left_open = next((match.start() for match in _QUOTED.finditer(content) if match["open"]), len(content))
    return _QUOTED.sub('""', content[:left_open]) + _SINGLE_QUOTED.sub('""', content[left_open:])


def _max_depth(content: str, depth: int) -> int:
    deepest = depth
    for char in content:
        depth += (char in "[{") - (char in "]}")
        deepest = max(deepest, depth)
    return deepest


_OPENS_QUOTE = re.compile(r"""(?:^|[\s\[{,:])(["'])""")
_QUOTED_TEXT = {'"': re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'), "'": re.compile(r"'[^']*+(?:''[^']*+)*+'")}
_AFTER_COLON = re.compile(r"(?<=:)[ \t]*\t[ \t]*")


def _replace_tabs(text: str) -> str:
    """Replaces tabs by spaces where YAML allows them and the parser does not: at the end of a line, before a comment, and after
    the colon of a key. Each tab becomes one space, so that columns stay the same. Tabs in indentation and in texts are kept.
    After the first quote that continues on the next line nothing is replaced, because the role of later lines is unknown.
    """
    if "\t" not in text:
        return text
    lines = text.split("\n")
    block_indent: int | None = None
    for number, line in enumerate(lines):
        content = line.strip(" \t")
        indent = len(line) - len(line.lstrip(" "))
        if block_indent is not None and (not content or indent > block_indent):
            continue
        block_indent = None
        if not content or content[0] == "#":
            lines[number] = line[: len(line) - len(line.lstrip(" \t"))].replace("\t", " ") + line.lstrip(" \t")
            continue
        spaced = _replace_tabs_in_line(line)
        if spaced is None:
            break
        lines[number] = spaced
        if _BLOCK_SCALAR.search(_empty_quotes(spaced.strip()).split(" #", 1)[0]):
            block_indent = indent
    return "\n".join(lines)


def _replace_tabs_in_line(line: str) -> str | None:
    """Returns None if a quote is opened and not closed in this line."""
    pieces: list[str] = []
    offset = 0
    while True:
        quote = _OPENS_QUOTE.search(line, offset)
        end = quote.start(1) if quote else len(line)
        plain = line[offset:end]
        comment = re.search(r"(?:^|[ \t])#", plain)
        body = plain[: comment.start() + 1] if comment else plain
        rest = plain[len(body) :]
        pieces.append(_blank_tabs(body, first=offset == 0, last=quote is None or comment is not None) + rest)
        if quote is None:
            return "".join(pieces)
        if comment:
            return "".join(pieces) + line[end:]
        quoted_text = _QUOTED_TEXT[quote[1]].match(line, end)
        if quoted_text is None:
            return None
        pieces.append(quoted_text.group())
        offset = quoted_text.end()


def _blank_tabs(body: str, *, first: bool, last: bool) -> str:
    """`first`: the text starts with the indentation of its line, which is kept. `last`: at most a comment follows the text."""
    lead = len(body) - len(body.lstrip(" \t")) if first else 0
    head, body = body[:lead], body[lead:]
    body = _AFTER_COLON.sub(lambda match: " " * len(match.group()), body)
    if last:
        stripped = body.rstrip(" \t")
        body = stripped + " " * (len(body) - len(stripped))
    return head + body


# ------------------------------------------------------------------------------------------------------------- parsing


class _Composer:
    def __init__(self, problems: Problems) -> None:
        self.documents: list[DocumentNode] = []
        self._builder = DocumentBuilder(problems, YAML_NODES_MAX)
        self._line = 0
        self._anchors: dict[str, DocumentNode | None] = {}
        self._open_anchors: list[str | None] = []
        self._anchors_seen = 0
        self._aliases_seen = 0

    def read(self, document: DocumentText) -> None:
        self._line = document.line
        try:
            for event in YAML(typ="safe", pure=True).parse(_replace_tabs(document.text)):
                self._handle_event(event)
        except FileLimitExceeded:
            raise
        except DocumentRejected:
            pass
        except MarkedYAMLError as error:
            self._add_parser_error(error)
        except (YAMLError, ValueError, LookupError, AssertionError, AttributeError, TypeError, ArithmeticError) as error:
            # The parser raises these on some invalid input, such as an escape beyond the last Unicode character.
            reason = "it contains an invalid escape" if isinstance(error, (ValueError, ArithmeticError)) else "it is not YAML"
            message = f"this document cannot be read: {reason}"
            self._builder.add_problem((document.line + 1, 1), message, "check its quotes, tags and escapes such as \\U0001f600")

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
            position = self._position(event.start_mark)
            if builder.expects_key:
                self._key(event, position)
            else:
                self._value(event, position)

    def _position(self, mark: Any) -> Position:
        return self._line + mark.line + 1, mark.column + 1

    def _key(self, event: Any, position: Position) -> None:
        if not isinstance(event, ScalarEvent) or event.anchor is not None:
            cure = "write the key as plain text, without brackets, & or *"
            if isinstance(event, MappingStartEvent):
                cure = "write the key as plain text, without brackets; a template such as {{ }} must be rendered first"
            self._fail(position, "a key must be plain text", cure)
        merge = event.value == "<<" and event.implicit[0]
        if merge:
            message = "the merge key << of YAML 1.1 is not supported"
            self._builder.add_problem(position, message, "write out the fields where they are needed")
        elif event.tag is not None:
            self._builder.add_problem(position, "a key cannot have a tag", "remove the tag")
        self._builder.key(self._valid_text(event.value, position), position, drop=merge)

    def _value(self, event: Any, position: Position) -> None:
        if isinstance(event, AliasEvent):
            self._alias(event.anchor, position)
            return
        if event.anchor is not None:
            self._anchors_seen += 1
            if self._anchors_seen > ANCHORS_MAX:
                self._builder.abort_file(position, f"more than {ANCHORS_MAX} anchors in one file", "write out the values")
        if isinstance(event, ScalarEvent):
            if not event.value and event.implicit[0]:
                # For an absent value the parser's position is already that of the next token.
                position = self._builder.key_position or position
            node = self._scalar(event, position)
            self._builder.add(node)
            if event.anchor is not None:
                self._anchors[event.anchor] = node
            return
        is_mapping = isinstance(event, MappingStartEvent)
        if event.tag not in (None, "!", _TAG_PREFIX + ("map" if is_mapping else "seq")):
            self._reject_tag(event.tag, position)
        self._builder.open(DocumentNode.container("mapping" if is_mapping else "list", position))
        self._open_anchors.append(event.anchor)
        if event.anchor is not None:
            self._anchors[event.anchor] = None  # still open: an alias to it from inside would be infinite

    def _alias(self, name: str, position: Position) -> None:
        self._aliases_seen += 1
        if self._aliases_seen > ALIASES_MAX:
            self._builder.abort_file(position, f"more than {ALIASES_MAX} aliases in one file", "write out the values")
        if name not in self._anchors:
            cure = "define it before, in the same document; or quote the text if it is not an alias"
            self._fail(position, f"the alias *{escaped(name)[:60]} refers to no anchor", cure)
        node = self._anchors[name]
        if node is None:
            self._fail(
                position, f"the alias *{escaped(name)[:60]} is inside the value that it refers to", "write out the values"
            )
        self._builder.add_alias(node, position)

    def _scalar(self, event: Any, position: Position) -> DocumentNode:
        text = self._valid_text(event.value, position)
        tag = event.tag
        if tag is None and not event.implicit[0]:
            return DocumentNode("string", position, text, text)
        node = (
            self._resolved(text, position)
            if tag in (None, "!") or tag.startswith(_TAG_PREFIX)
            else DocumentNode("string", position, text, text)
        )
        if tag is None:
            return node
        expected = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "null": "null"}
        form = expected.get(tag.removeprefix(_TAG_PREFIX))
        if tag == "!" or form == "string":
            return DocumentNode("string", position, text, text)
        if form is None:
            self._reject_tag(tag, position)
            return DocumentNode("void", position)
        if node.type not in (form, "void") and (form, node.type) != ("number", "integer"):
            self._builder.add_problem(position, f"{quoted(text)} does not match its tag", "remove the tag")
            return DocumentNode("void", position)
        return node

    def _resolved(self, text: str, position: Position) -> DocumentNode:
        """Resolves a plain scalar by the core schema of YAML 1.2: `on` and `2026-11-15` are strings, `010` is ten."""
        if _NULL.match(text):
            return DocumentNode("null", position, None, text)
        if _BOOLEAN.match(text):
            return DocumentNode("boolean", position, text.lower() == "true", text)
        if _NOT_FINITE.match(text):
            self._builder.add_problem(position, f"{text} is not a finite number", "write a finite number")
            return DocumentNode("void", position)
        integer = _INTEGER.match(text)
        if not integer and not _NUMBER.match(text):
            return DocumentNode("string", position, text, text)
        if len(text) > DIGITS_MAX:
            self._builder.add_problem(
                position, f"a number of {len(text)} digits is too long", f"use at most {DIGITS_MAX}, or quote it if it is text"
            )
            return DocumentNode("void", position)
        if integer:
            base = 8 if text.startswith("0o") else 16 if text.startswith("0x") else 10
            return DocumentNode("integer", position, int(text, base), text)
        value = float(text)
        if value in (float("inf"), float("-inf")):
            self._builder.add_problem(position, f"{text} is too large for a number", "write a finite number")
            return DocumentNode("void", position)
        return DocumentNode("number", position, value, text)

    def _valid_text(self, text: str, position: Position) -> str:
        if not _SURROGATE.search(text):
            return text
        self._builder.add_problem(position, "unpaired surrogate in a text", "write the character itself")
        return _SURROGATE.sub("\ufffd", text)

    def _reject_tag(self, tag: str, position: Position) -> None:
        short = tag.replace(_TAG_PREFIX, "!!", 1)
        message, cure = f"the tag {quoted(short)} is not supported", "remove it: a manifest is plain data"
        if short.startswith("!!python"):
            message = f"the tag {quoted(short)} would construct a Python object, which is not supported"
        elif short == "!!binary":
            cure = "remove it, and write the base64 text as a string"
        self._builder.add_problem(position, message, cure)

    def _fail(self, position: Position, message: str, cure: str) -> NoReturn:
        self._builder.add_problem(position, message, cure)
        raise DocumentRejected

    def _add_parser_error(self, error: MarkedYAMLError) -> None:
        """Reports an error of the parser with a message that names the fix."""
        mark = error.problem_mark or error.context_mark
        position = self._position(mark) if mark else (self._line + 1, 1)
        opened_at = self._position(error.context_mark) if error.context_mark else position
        text = str(error.problem or error.context or error)
        for pattern, message, cure, at_opening in _PARSER_ERRORS:
            if re.search(pattern, f"{error.context or ''}: {text}"):
                self._builder.add_problem(opened_at if at_opening else position, message, cure)
                return
        self._builder.add_problem(
            position, "this cannot be read as YAML", "check the indentation, quotes and brackets near here"
        )


_PARSER_ERRORS = (
    (
        r"found character '\\t'",
        "a tab where YAML requires spaces",
        r'indent with spaces; inside a text, write a tab as "\t" in double quotes',
        False,
    ),
    (r"found character '.{1,2}' that", "a plain text cannot start with this character", "put the text in quotes", False),
    (
        r"mapping values are not allowed",
        '":" is not allowed here',
        'indent like the line above, or quote a text that has ": " in it',
        False,
    ),
    (r"sequence entries are not allowed", 'a list cannot start with "- " here', "start the list on a line of its own", False),
    (
        r"could not find expected ':'",
        'a key without ":"',
        'write "key: value", or --- between documents; is it incomplete?',
        True,
    ),
    (r"quoted scalar: found unexpected (end|document)", "this quote is never closed", "close it", True),
    (
        r"flow sequence: expected ',' or ']'",
        '"[" is opened here and not closed',
        'close it with "]", or write the missing ","',
        True,
    ),
    (
        r"flow mapping: expected ',' or '}'",
        '"{" is opened here and not closed',
        'close it with "}", or write the missing ","',
        True,
    ),
    (
        r"expected the node content, but found '(<stream end>|<document)",
        "the document ends too early",
        "is it incomplete?",
        False,
    ),
    (
        r"unknown escape character",
        "invalid escape sequence",
        r"write \\ for a backslash, or use single quotes",
        False,
    ),
    (r"escape sequence", "incomplete escape sequence", "write all its hexadecimal digits", False),
    (r"expected <block end>, but found '<scalar>'", "text continues after its closing quote", "quote all of it", False),
    (
        r"expected <block end>",
        "the indentation of this line differs from its neighbours",
        "indent it like its neighbours, with spaces",
        False,
    ),
    (
        r"expected '<document start>'",
        "content after the end of the document",
        "put --- on a line of its own before a second document, or quote all of the text",
        False,
    ),
    (r"block scalar", '"|" and ">" start a block of text', "end the line after them, or put the text in quotes", True),
    (r"scanning a directive", '"%" starts a directive', "put the text in quotes", True),
    (r"mapping keys are not allowed", '"?" is not allowed here', "put the text in quotes", False),
    (
        r"(block|flow) node: expected the node content",
        "a special character of YAML where a value is expected",
        "write the value, or put the text in quotes",
        False,
    ),
    (r"undefined tag handle", '"!" starts a tag', "put the text in quotes", False),
    (r"while scanning an? (alias|anchor)", '"*" and "&" start an alias and an anchor', "put the text in quotes", True),
    (r"while (parsing|scanning) an? tag", '"!" starts a tag', "put the text in quotes", True),
)
"""Pattern of the parser's error, message, fix, and whether to report it at the position where the construct was opened."""
