"""Reads objects from YAML or JSON; all problems at once.

No I/O: bytes in, objects or problems out.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import msgspec

from remit.model import metadata, objects
from remit.model.kinds.registry import AnyObject
from remit.model.manifests.documents import JSON_SUFFIXES, TYPE_NAMES, DocumentNode, Position, read_documents
from remit.model.manifests.suggestions import FOREIGN_KINDS, FOREIGN_KINDS_JSON
from remit.model.manifests.type_checks import TypeChecker
from remit.model.manifests.validation import struct_type_of, validate_document
from remit.model.problems import Problem, Problems, an, did_you_mean, escaped, one_of, quoted


class Manifests(NamedTuple):
    """The objects of a file. `objects` is empty if there is any problem, so that a file is never applied in part."""

    objects: tuple[AnyObject, ...]
    problems: tuple[Problem, ...]


def read(data: bytes, name: str, *, system: bool = False) -> Manifests:
    """Reads the manifests in `data`, YAML or JSON. `name` is used in messages, and its suffix can select JSON.

    Never raises, for any input. `system` also accepts what only Remit itself writes: its own kinds, statuses and labels.
    """
    problems = Problems(name)
    problems.as_json = name.lower().endswith(JSON_SUFFIXES) or data.lstrip()[:1] in (b"{", b"[")
    reader = _Reader(problems, system=system)
    for document in read_documents(data, name, problems):
        reader.read(document)
    return Manifests(() if problems else tuple(reader.objects), problems.sorted_problems())


class _Reader:
    def __init__(self, problems: Problems, *, system: bool) -> None:
        self._problems = problems
        self._system = system
        self._known = tuple(objects.KINDS) if system else objects.DECLARED
        self._seen: dict[str, Position] = {}
        self.objects: list[AnyObject] = []

    def read(self, document: DocumentNode) -> None:
        if document.type != "mapping":
            self._add_not_a_manifest(document)
            return
        self._api_version(document)
        kind = self._kind(document)
        if kind is None:
            self._check_common_fields(document)
            return
        value = validate_document(document, kind, self._problems, system=self._system)
        self._check_unique(document, kind)
        if not self._problems:
            self._build(document, kind, value)

    def _add_not_a_manifest(self, document: DocumentNode) -> None:
        if document.type == "void":
            return
        cure = "write apiVersion, kind, metadata and spec, each as key: value"
        if self._problems.as_json:
            cure = 'write an object with "apiVersion", "kind", "metadata" and "spec"'
            if document.type == "list":
                cure = "write each manifest as an object of its own, all in one array or one after another"
        elif document.type == "string" and ":" in document.text:
            cure += ' (with a space after ":")'
        elif document.type == "list":
            cure = "write each manifest as a document of its own, with --- between them"
        self._problems.add(document.position, (), f"expected a manifest, found {TYPE_NAMES[document.type]}", cure)

    def _check_common_fields(self, document: DocumentNode) -> None:
        """Checks the fields that all kinds have, in a document whose kind is unknown."""
        shapes = TypeChecker(self._problems, None, system=self._system)
        for field in struct_type_of("Region").fields:
            node = document.get(field.encode_name)
            if field.encode_name in ("apiVersion", "metadata") and node is not None:
                shapes.check(node, field.type, (field.encode_name,))

    def _api_version(self, document: DocumentNode) -> None:
        """Reports a missing apiVersion. The structs have a default for it, but a file must name the version it was written
        for.
        """
        if document.get("apiVersion") is not None:
            return
        for key, entry in document.fields.items():
            if key.lower() == "apiversion":
                self._problems.add(entry.position, (key,), "unknown field", did_you_mean("apiVersion"))
                return
        self._problems.add(document.position, ("apiVersion",), "is missing", f"add apiVersion: {metadata.API_VERSION}")

    def _kind(self, document: DocumentNode) -> str | None:
        """Returns the kind to check the document against. For a misspelt kind this is the one that was probably meant, so that
        all problems of the document are reported at once.
        """
        node = document.get("kind")
        if node is None:
            for key, entry in document.fields.items():
                if key.lower() == "kind":
                    self._problems.add(entry.position, (key,), "unknown field", did_you_mean("kind"))
                    return None
            self._problems.add(document.position, ("kind",), "is missing", f"add kind: {one_of(self._known)}")
            return None
        kind = node.scalar
        if isinstance(kind, str) and kind in self._known:
            return kind
        if node.type == "void":
            return None
        if not isinstance(kind, str):
            self._problems.add(
                node.position, ("kind",), f"expected a kind, found {TYPE_NAMES[node.type]}", f"write {one_of(self._known)}"
            )
        elif kind in objects.KINDS:
            message = f"{an(kind)} is written by Remit itself and cannot be declared"
            self._problems.add(
                node.position, ("kind",), message, f"remove this document; kinds to declare are {one_of(self._known)}"
            )
        else:
            meant = self._problems.suggest(kind, self._known)
            elsewhere = {**FOREIGN_KINDS, **FOREIGN_KINDS_JSON} if self._problems.as_json else FOREIGN_KINDS
            cure = elsewhere.get(kind) or did_you_mean(meant) or f"write {one_of(self._known)}"
            self._problems.add(node.position, ("kind",), f"unknown kind {quoted(kind)}", cure)
            return meant or None
        return None

    def _check_unique(self, document: DocumentNode, kind: str) -> None:
        name, tenant = document.at("metadata", "name"), document.at("metadata", "tenant")
        if name is None or not isinstance(name.scalar, str):
            return
        key = objects.key_of(kind, name.scalar, str(tenant.scalar) if tenant else "")
        first = self._seen.setdefault(key, name.position)
        if first != name.position:
            message = f"{kind} {quoted(name.scalar)} is already declared in line {first[0]}"
            self._problems.add(name.position, ("metadata", "name"), message, "keep one of the two, or rename it")

    def _build(self, document: DocumentNode, kind: str, value: dict[str, Any]) -> None:
        try:
            built = msgspec.convert({**value, "kind": kind}, objects.KINDS[kind], dec_hook=objects.dec_hook)
        except (msgspec.ValidationError, ValueError) as error:
            # The decoder rejects what the checks accepted. That is a gap in the checks (a property test searches for one);
            # report it as a problem instead of raising.
            self._problems.add(document.position, (), escaped(str(error)), "compare it with `remit schema`")
            return
        self.objects.append(cast(AnyObject, built))
