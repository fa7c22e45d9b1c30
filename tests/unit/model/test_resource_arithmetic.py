"""Exact arithmetic of amounts, durations and capacities, without floats."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remit.model.resources import (
    DURATION_MS_MAX,
    QUANTITY_MAX,
    Amount,
    Duration,
    format_duration,
    format_quantity,
    parse_duration,
    parse_quantity,
    scale,
)

RESOURCES = ("cpu", "memory", "storage", "ephemeral-storage", "devices/gpu", "licences")
SUFFIXES = {
    "": Fraction(1),
    "m": Fraction(1, 1000),
    **{name: Fraction(10) ** (3 * power) for power, name in enumerate(("k", "M", "G", "T", "P", "E"), start=1)},
    **{name: Fraction(2) ** (10 * power) for power, name in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), start=1)},
}

counted = st.integers(0, QUANTITY_MAX) | st.integers(0, 5000) | st.integers(0, 60).map(lambda bits: 1 << bits)
resources = st.sampled_from(RESOURCES)


@given(resources, counted)
def test_formatted_quantity_is_parsed_back_exactly(resource: str, count: int) -> None:
    assert parse_quantity(resource, format_quantity(resource, count)) == count


@pytest.mark.parametrize("resource", RESOURCES)
@pytest.mark.parametrize("count", [0, 1, 999, 1000, 1001, 1023, 1024, 1 << 60, QUANTITY_MAX - 1, QUANTITY_MAX])
def test_quantity_limits_are_parsed_back(resource: str, count: int) -> None:
    assert parse_quantity(resource, format_quantity(resource, count)) == count


digits = st.from_regex(r"\A[0-9]{1,12}(\.[0-9]{1,6})?\Z", fullmatch=False) | st.from_regex(r"\A\.[0-9]{1,6}\Z")
exponents = st.integers(-20, 20).flatmap(lambda n: st.sampled_from((f"e{n}", f"E{n}", f"e{n:+}")))


@given(resources, digits, st.sampled_from(sorted(SUFFIXES)) | exponents)
def test_quantity_is_parsed_exactly_or_refused(resource: str, number: str, suffix: str) -> None:
    unit = SUFFIXES[suffix] if suffix in SUFFIXES else Fraction(10) ** int(suffix[1:])
    exact = Fraction(number) * unit * scale(resource)
    if exact.denominator == 1 and exact <= QUANTITY_MAX:
        assert parse_quantity(resource, number + suffix) == exact
        assert parse_quantity(resource, "+" + number + suffix) == exact
    else:
        with pytest.raises(ValueError, match=r"finer than|too large"):
            parse_quantity(resource, number + suffix)


@pytest.mark.parametrize(
    ("resource", "text", "count"),
    [
        ("cpu", "500m", 500),
        ("cpu", "1.5", 1500),
        ("cpu", 2, 2000),
        ("cpu", 0.1, 100),
        ("cpu", "1e3", 1_000_000),
        ("cpu", "1E", None),
        ("memory", "1E", 10**18),
        ("memory", "64Gi", 64 << 30),
        ("memory", "0.5Ki", 512),
        ("memory", "1500m", None),
        ("memory", "2000m", 2),
        ("memory", str(QUANTITY_MAX), QUANTITY_MAX),
        ("memory", str(QUANTITY_MAX + 1), None),
        ("cpu", "0.0001", None),
    ],
)
def test_usual_quantity_notations_are_exact(resource: str, text: str | float, count: int | None) -> None:
    if count is None:
        with pytest.raises(ValueError, match=r"finer|large"):
            parse_quantity(resource, text)
    else:
        assert parse_quantity(resource, text) == count


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "1 ", " 1", "1\n", "1 Gi", "1g", "1K", "1KI", "1gi", "m", ".", "1.", "1..2", "1,5", "1_000", "0x10"),
        *("1e", "1e3m", "1e1000", "+-1", "++1", "٣", "1٣", "½", "inf", "nan", "NaN", "9" * 41, True, False),
        *(float("inf"), float("nan")),
    ],
)
def test_malformed_quantity_is_refused_with_message(text: str | float) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        parse_quantity("cpu", text)


@pytest.mark.parametrize("text", ["-1", "-0.5", -1, -0.5, "-1Gi"])
def test_negative_quantity_is_refused(text: str | float) -> None:
    with pytest.raises(ValueError, match="negative"):
        parse_quantity("cpu", text)


# -------------------------------------------------------------------------------------------------------------- durations


@given(st.integers(0, DURATION_MS_MAX) | st.integers(0, 100_000))
def test_formatted_duration_is_parsed_back_exactly(ms: int) -> None:
    assert parse_duration(format_duration(ms)) == ms
    assert Duration.parse(str(Duration(ms))) == ms


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("0s", 0),
        ("250ms", 250),
        ("30s", 30_000),
        ("1.5s", 1500),
        ("0.001s", 1),
        ("5m", 300_000),
        ("1h30m", 5_400_000),
        ("1d2h3m4s5ms", 93_784_005),
        ("90m", 5_400_000),
        ("3650d", DURATION_MS_MAX),
    ],
)
def test_usual_duration_notations_are_parsed(text: str, ms: int) -> None:
    assert parse_duration(text) == ms


@pytest.mark.parametrize(
    "text", ["", "5", 5, 5.0, "s", "-5s", "5 s", "5S", "5sec", "1m1h", "1s1s", "1.5m", "0.0001s", "1e3s", "٣s", "5s\n", " 5s"]
)
def test_malformed_duration_is_refused_with_message(text: str | float) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["3650d1ms", "99999999h", "999999999d"])
def test_duration_over_ten_years_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="too long"):
        parse_duration(text)


@pytest.mark.parametrize("obj", [None, [], {}, b"5s"])
def test_duration_that_is_not_text_is_refused(obj: object) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        Duration.parse(obj)


# ---------------------------------------------------------------------------------------------------------------- amounts

names = st.sampled_from(("cpu", "memory", "devices/gpu", "licences"))
amounts = st.dictionaries(names, st.integers(0, 6), max_size=4).map(Amount)
signed = st.dictionaries(names, st.integers(-6, 6), max_size=4).map(Amount)


@given(signed, signed, signed)
def test_amounts_add_like_numbers(a: Amount, b: Amount, c: Amount) -> None:
    assert a + b == b + a
    assert (a + b) + c == a + (b + c)
    assert a + Amount() == a
    assert a - a == Amount() and not (a - a)
    assert (a - b) + b == a


@given(signed, signed, st.integers(0, 5), st.integers(0, 5))
def test_amounts_multiply_like_repeated_addition(a: Amount, b: Amount, n: int, m: int) -> None:
    assert a * 0 == Amount()
    assert a * (n + m) == a * n + a * m
    assert (a + b) * n == a * n + b * n


@given(amounts, amounts, amounts)
def test_fitting_is_partial_order_preserved_by_addition(a: Amount, b: Amount, c: Amount) -> None:
    assert a <= a
    assert not (a <= b and b <= a) or a == b
    assert not (a <= b and b <= c) or a <= c
    assert (a <= b) == (a + c <= b + c)
    assert a <= a + b


@given(amounts, amounts)
def test_excess_over_limit_is_minimal(a: Amount, limit: Amount) -> None:
    excess = a.excess_over(limit)
    assert a - excess <= limit
    assert (not excess) == (a <= limit)
    assert all(a.get(name) - count == limit.get(name) for name, count in excess)


@given(signed, signed)
def test_equal_amounts_have_equal_hash_and_no_zeros(a: Amount, b: Amount) -> None:
    assert (a == b) == (dict(a) == dict(b))
    assert a != b or hash(a) == hash(b)
    assert all(count for _, count in a), "zeros are omitted"
    assert a != dict(a)


@given(amounts)
def test_amount_round_trips_through_manifest(a: Amount) -> None:
    assert Amount.parse(a.to_manifest()) == a


@pytest.mark.parametrize("value", [True, None, [], {"gpu": 1}, "many"])
def test_amount_that_is_not_a_quantity_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        Amount.parse({"cpu": value})
