"""Reads objects from YAML or JSON; all problems at once.

All of it at once. No I/O: bytes in, values out.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import msgspec

from remit.model import metadata, objects
from remit.model.manifests.documents import ARTICLE, JSON_ENDINGS, Node, Place, read_documents
from remit.model.manifests.suggestions import JSON_KINDS, KINDS
from remit.model.manifests.type_checks import Shapes
from remit.model.manifests.validation import judge_document, shape_of
from remit.model.problems import Problem, Problems, an, did_you_mean, escaped, one_of, shown


class Manifests(NamedTuple):
    """What a file declares. `objects` is empty if there is any problem: half a file is never applied."""

    objects: tuple[objects.AnyObject, ...]
    problems: tuple[Problem, ...]


def read(data: bytes, name: str, *, system: bool = False) -> Manifests:
    """The manifests in `data`, YAML or JSON; `name` is for the messages, and its ending tells JSON.

    Never raises, whatever the bytes. `system` lets in what only Remit itself writes: its own kinds, statuses and labels.
    """
    problems = Problems(name)
    problems.as_json = name.lower().endswith(JSON_ENDINGS) or data.lstrip()[:1] in (b"{", b"[")
    reader = _Reader(problems, system=system)
    for document in read_documents(data, name, problems):
        reader.read(document)
    return Manifests(() if problems else tuple(reader.objects), problems.told())


class _Reader:
    def __init__(self, problems: Problems, *, system: bool) -> None:
        self._problems = problems
        self._system = system
        self._known = tuple(objects.KINDS) if system else objects.DECLARED
        self._seen: dict[str, Place] = {}
        self.objects: list[objects.AnyObject] = []

    def read(self, document: Node) -> None:
        if document.form != "mapping":
            self._no_manifest(document)
            return
        self._api_version(document)
        kind = self._kind(document)
        if kind is None:
            self._head(document)
            return
        value = judge_document(document, kind, self._problems, system=self._system)
        self._once(document, kind)
        if not self._problems:
            self._build(document, kind, value)

    def _no_manifest(self, document: Node) -> None:
        if document.form == "void":
            return
        cure = "write apiVersion, kind, metadata and spec, each as key: value"
        if self._problems.as_json:
            cure = 'write an object with "apiVersion", "kind", "metadata" and "spec"'
            if document.form == "list":
                cure = "write each manifest as an object of its own, all in one array or one after another"
        elif document.form == "string" and ":" in document.text:
            cure += ' (with a space after ":")'
        elif document.form == "list":
            cure = "write each manifest as a document of its own, with --- between them"
        self._problems.add(document.place, (), f"expected a manifest, found {ARTICLE[document.form]}", cure)

    def _head(self, document: Node) -> None:
        """What can be judged of a document whose kind nobody knows."""
        shapes = Shapes(self._problems, None, system=self._system)
        for field in shape_of("Region").fields:
            node = document.get(field.encode_name)
            if field.encode_name in ("apiVersion", "metadata") and node is not None:
                shapes.check(node, field.type, (field.encode_name,))

    def _api_version(self, document: Node) -> None:
        """Told here if it is missing: the structs have a default, a file must say what it was written for."""
        if document.get("apiVersion") is not None:
            return
        for key, entry in document.fields.items():
            if key.lower() == "apiversion":
                self._problems.add(entry.place, (key,), "unknown field", did_you_mean("apiVersion"))
                return
        self._problems.add(document.place, ("apiVersion",), "is missing", f"add apiVersion: {metadata.API_VERSION}")

    def _kind(self, document: Node) -> str | None:
        """The kind to judge the document by: if it is misspelt, the one that was meant, so that the rest is told at once."""
        node = document.get("kind")
        if node is None:
            for key, entry in document.fields.items():
                if key.lower() == "kind":
                    self._problems.add(entry.place, (key,), "unknown field", did_you_mean("kind"))
                    return None
            self._problems.add(document.place, ("kind",), "is missing", f"add kind: {one_of(self._known)}")
            return None
        kind = node.scalar
        if isinstance(kind, str) and kind in self._known:
            return kind
        if node.form == "void":
            return None
        if not isinstance(kind, str):
            self._problems.add(
                node.place, ("kind",), f"expected a kind, found {ARTICLE[node.form]}", f"write {one_of(self._known)}"
            )
        elif kind in objects.KINDS:
            message = f"{an(kind)} is a record of Remit's own, and is not declared"
            self._problems.add(node.place, ("kind",), message, f"remove this document; declared are {one_of(self._known)}")
        else:
            meant = self._problems.meant(kind, self._known)
            elsewhere = {**KINDS, **JSON_KINDS} if self._problems.as_json else KINDS
            cure = elsewhere.get(kind) or did_you_mean(meant) or f"write {one_of(self._known)}"
            self._problems.add(node.place, ("kind",), f"unknown kind {shown(kind)}", cure)
            return meant or None
        return None

    def _once(self, document: Node, kind: str) -> None:
        name, tenant = document.at("metadata", "name"), document.at("metadata", "tenant")
        if name is None or not isinstance(name.scalar, str):
            return
        key = objects.key_of(kind, name.scalar, str(tenant.scalar) if tenant else "")
        first = self._seen.setdefault(key, name.place)
        if first != name.place:
            message = f"{kind} {shown(name.scalar)} is already declared in line {first[0]}"
            self._problems.add(name.place, ("metadata", "name"), message, "keep one of the two, or rename it")

    def _build(self, document: Node, kind: str, value: dict[str, Any]) -> None:
        try:
            built = msgspec.convert({**value, "kind": kind}, objects.KINDS[kind], dec_hook=objects.dec_hook)
        except (msgspec.ValidationError, ValueError) as error:
            # The types refuse what the shapes let pass: told, never raised; a property test looks for such a gap.
            self._problems.add(document.place, (), escaped(str(error)), "compare it with `remit schema`")
            return
        self.objects.append(cast(objects.AnyObject, built))
