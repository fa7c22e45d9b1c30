"""Hypothesis strategies for manifests, derived from the types: a new field needs no line here."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from msgspec import inspect

from remit.model.manifests.validation import AUTHORITY_FIELDS, struct_type_of
from remit.model.metadata import QUALIFIED_NAME, Metadata
from remit.model.objects import TENANTED
from remit.model.resources import Amount, Duration

TAME_TEXT = ("a", "b-1", "eu-west", "8")
SHARP_TEXT = (
    "", "remit/x", "A B", "..", "../x", "/etc/../x", "/", ".", "x" * 64, "x\0", "x\ny", "\x1b[2J", "\u202e", "$(PORT_no)",
    "@daily", "60 * * * *", "0 0 31 2 *", "*/5 * * * mon-fri", "A_b", "a/b", "0" * 64, " ", "ä",
)  # fmt: skip
AMOUNTS = ("1", "500m", "1Gi", "0", "2k")
SHARP_AMOUNTS = ("", "-1", "1.5", "0.0001", "1e30", 1, 0.5, "4 cores")
RESOURCES = ("cpu", "memory", "license")
SHARP_RESOURCES = ("gpu", "mem", "stroage", "a b", "devices/gpu", "limits", "nvidia.com/gpu", "@x")
DURATIONS = ("1s", "10m", "1h30m")
SHARP_DURATIONS = ("0s", "0ms", "8d", "9999d", "5", "")
SHARP_WHOLE = (-1, 0, 1, 2, 63, 64, 65, 65_536, 1_000_001, 1_000_000_001, 2_000_000_000, 1 << 53)


@st.composite
def manifests(draw: st.DrawFn, kinds: tuple[str, ...]) -> dict[str, Any]:
    """A manifest of one of these kinds: mostly valid, some with a few suspicious values."""
    kind = draw(st.sampled_from(kinds))
    drawn: dict[str, Any] = _Drawing(draw, draw(st.sampled_from((0, 0, 8, 3)))).struct(struct_type_of(kind))
    if kind not in TENANTED:
        drawn["metadata"].pop("tenant")
    return {**drawn, "apiVersion": "remit/v1", "kind": kind}


class _Drawing:
    """With `sharp`, one value in that many is suspicious; with 0, none."""

    def __init__(self, draw: st.DrawFn, sharp: int) -> None:
        self._draw = draw
        self._sharp = sharp

    def _odds(self, one_in: int) -> bool:
        return bool(one_in) and self._draw(st.integers(1, one_in)) == 1

    def _of(self, tame: tuple[Any, ...], sharp: tuple[Any, ...]) -> Any:
        return self._draw(st.sampled_from(sharp if self._odds(self._sharp) else tame))

    def struct(self, type_: inspect.StructType) -> dict[str, Any]:
        left_out = {"status", *(AUTHORITY_FIELDS if type_.cls is Metadata else ())}
        return {
            field.encode_name: self.value(field.type)
            for field in type_.fields
            if field.encode_name not in left_out and (field.required or field.encode_name == "tenant" or self._odds(5))
        }

    def value(self, type_: inspect.Type) -> Any:
        match type_:
            case inspect.Metadata():
                if "quantity" in (type_.extra or {}):
                    return self._of(("250m", 0.5, "1m"), SHARP_AMOUNTS)
                return self.value(type_.type)
            case inspect.StructType():
                return self.struct(type_)
            case inspect.UnionType():
                parts = [part for part in type_.types if not isinstance(part, inspect.NoneType)]
                return self.value(self._draw(st.sampled_from(parts)))
            case inspect.VarTupleType():
                least = max(type_.min_length or 0, 0 if self._odds(self._sharp) else 1)
                return [self.value(type_.item_type) for _ in range(least + self._draw(st.integers(0, 2)))]
            case inspect.DictType():
                size = max(type_.min_length or 0, self._draw(st.integers(0, 2)))
                return {self.value(type_.key_type): self.value(type_.value_type) for _ in range(size)}
            case inspect.StrType():
                digest = type_.pattern is not None and "{64}" in type_.pattern
                tame = ("0" * 64,) if digest else ("/", "/a") if type_.pattern and type_.pattern.startswith("^/") else TAME_TEXT
                return self._of(("a/b", "web/b-1") if type_.pattern == QUALIFIED_NAME else tame, SHARP_TEXT)
            case inspect.IntType():
                return self._of((max(type_.ge or 0, 1), 2, 3), SHARP_WHOLE)
            case inspect.BoolType():
                return self._draw(st.booleans())
            case inspect.LiteralType():
                return self._draw(st.sampled_from([value for value in type_.values if value]))
            case inspect.CustomType():
                return self._custom(type_.cls)
        raise TypeError(f"manifest_strategies.py does not support {type(type_).__name__}; add it")

    def _custom(self, cls: type) -> Any:
        if cls is Duration:
            return self._of(DURATIONS, SHARP_DURATIONS)
        if cls is not Amount:
            raise TypeError(f"manifest_strategies.py does not support {cls.__name__}; add it")
        names = [self._of(RESOURCES, SHARP_RESOURCES) for _ in range(self._draw(st.integers(0, 3)))]
        amount: dict[str, Any] = {name: self._of(AMOUNTS, SHARP_AMOUNTS) for name in names if name != "memory"}
        if self._odds(self._sharp):
            amount["devices"] = {self._of(("gpu", "nic"), SHARP_TEXT): self._of(AMOUNTS, SHARP_AMOUNTS)}
        return amount
