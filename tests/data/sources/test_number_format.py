"""Numbers written as text: one format for a job, and what `hwopt init` proposes."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwopt.data.sources.number_format import decimal_of, number_of, unread_number


@pytest.mark.parametrize(
    ("values", "decimal"),
    [
        (["4,5", "3", "-0,25", "", None], ","),
        (["4.5", "3", "1e-3", "NaN"], "."),
        (["12,5", "1,234"], ","),
        (["1,234", "5,678"], None),  # could be thousands
        (["4.5", "3,5"], None),
        (["4,5", "three"], None),
    ],
)
def test_decimal_separator_of_a_column_is_recognised(values: list[Any], decimal: str | None) -> None:
    assert decimal_of(values) == decimal


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_is_read_back_in_both_formats(number: float) -> None:
    text = repr(number)
    assert number_of(text, ".") == number
    assert number_of(text.replace(".", ","), ",") == number


@pytest.mark.parametrize("text", ["", "nan", "inf", "1_000", "0x10", "1.5.2", "1,5", "1 000", "one"])
def test_other_text_is_not_a_number_with_a_decimal_point(text: str) -> None:
    with pytest.raises(ValueError, match="not a number with a decimal point"):
        number_of(text, ".")


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (["12.5%", "3 %", "n/a"], "12.5%"),
        (["1.234,50 €", "3 €"], "1.234,50 €"),
        (["$1,200", "-$3"], "$1,200"),
        (["1.5", "2,5"], "2,5"),
        (["8.4 kg", "12 kg", "n/a"], "8.4 kg"),
        (["10 km/h", "8km/h"], "10 km/h"),
        (["1st", "2nd"], None),
        (["1.5", "2"], None),
        (["2020-11-01"], None),
        (["3.10.1"], None),
        (["good", "3 %"], None),
        ([], None),
    ],
)
def test_columns_of_numbers_that_are_not_read_are_found(texts: list[str], found: str | None) -> None:
    assert unread_number(texts) == found
