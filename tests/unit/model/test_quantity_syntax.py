"""Syntax of quantities and durations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remit.model.resources import (
    DURATION_MS_MAX,
    QUANTITY_MAX,
    format_duration,
    format_quantity,
    parse_duration,
    parse_quantity,
)

RESOURCES = st.sampled_from(["cpu", "memory", "storage", "share", "gpu"])


@given(RESOURCES, st.integers(0, QUANTITY_MAX))
def test_formatted_quantity_is_parsed_back(resource: str, counted: int) -> None:
    assert parse_quantity(resource, format_quantity(resource, counted)) == counted


@given(st.integers(0, DURATION_MS_MAX))
def test_formatted_duration_is_parsed_back(ms: int) -> None:
    assert parse_duration(format_duration(ms)) == ms


@pytest.mark.parametrize(
    ("resource", "text", "counted"),
    [
        ("cpu", "500m", 500),
        ("cpu", "1.5", 1500),
        ("cpu", 2, 2000),
        ("memory", "64Gi", 64 << 30),
        ("memory", "1e3", 1000),
        ("memory", "0.5Ki", 512),
    ],
)
def test_common_quantity_notations_are_parsed(resource: str, text: str | int, counted: int) -> None:
    assert parse_quantity(resource, text) == counted


@pytest.mark.parametrize("text", ["", "-1", "1GB", "1 Gi", "NaN", "inf", "1e", "٣", "1_000", "0x10", "9" * 41, "1\n"])
def test_malformed_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"quantity|large"):
        parse_quantity("cpu", text)


@pytest.mark.parametrize("text", ["", "5", "-5s", "5 s", "1s1h", "٣s", "1.5h", "999999999d", "1s\n"])
def test_malformed_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"duration|long"):
        parse_duration(text)
