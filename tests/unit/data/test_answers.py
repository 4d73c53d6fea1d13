from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_edo.data.answers import canonical_number, final_answer, is_well_formed

DECIMALS = st.decimals(min_value=-(10**12), max_value=10**12, places=3, allow_nan=False)


@pytest.mark.parametrize(("text", "expected"), [
    ("1,234", "1234"), ("$5", "5"), ("-3", "-3"), ("18.00", "18"), ("3.5", "3.5"), ("3.50", "3.5"), ("7.", "7"),
    (" 42 \t", "42"), ("-$1,000.50", "-1000.5"), ("$-2", "-2"), (".5", "0.5"), ("007", "7"), ("-0.0", "0"), ("+4", "4"),
    ("3.5.", "3.5"), ("1,234,567.", "1234567"), ("0", "0"), ("100", "100"),
])
def test_canonical_number_of_known_spellings(text, expected):
    assert canonical_number(text) == expected


@pytest.mark.parametrize("text", [
    "", ".", "$", "-", "$.", "twelve", "12 apples", "1,23", "12,34,567", ",123", "1.2.3", "--3", "5%", "1e3", "1/2",
    "٣", "3 4", "NaN", "0x1f",
])
def test_text_that_is_no_number_has_no_canonical_form(text):
    assert canonical_number(text) is None


@given(DECIMALS)
def test_canonical_number_keeps_the_value_and_is_idempotent(number):
    for text in (f"{number:f}", f"{number:,f}", f"${number:f}"):
        canonical = canonical_number(text)
        assert Decimal(canonical) == number
        assert canonical_number(canonical) == canonical


@given(DECIMALS, DECIMALS)
def test_numbers_share_a_canonical_form_exactly_if_they_are_equal(first, second):
    assert (canonical_number(f"{first:,f}") == canonical_number(f"{second:f}")) == (first == second)


@given(st.text())
def test_any_text_has_a_canonical_form_that_is_a_number_or_none(text):
    canonical = canonical_number(text)
    assert canonical is None or canonical_number(canonical) == canonical


def test_final_answer_is_the_number_of_the_last_marker_line():
    assert final_answer("1 + 1 = 2\n#### 2") == "2"
    assert final_answer("#### 2\nno, wait\n#### 1,003\nthat is it") == "1003"
    assert final_answer("a\r\n  #### $5.00  \r\n") == "5"


def test_final_answer_is_none_without_a_number_on_the_last_marker_line():
    assert final_answer("the answer is 12") is None
    assert final_answer("") is None
    assert final_answer("the answer is #### 12") is None
    assert final_answer("#### 12\n#### twelve") is None


def test_well_formed_is_one_answer_line_at_the_end():
    assert is_well_formed("1 + 1 = 2\n#### 2")
    assert is_well_formed("#### 2\n\n")
    assert not is_well_formed("#### 2\nmore")
    assert not is_well_formed("#### 2\n#### 2")
    assert not is_well_formed("1 + 1 = 2")
    assert not is_well_formed("1 + 1 = 2\n#### two")
    assert not is_well_formed("")


@given(st.lists(st.sampled_from(["#### 3", "#### x", "####", "words", "", "12"])).map("\n".join))
def test_well_formed_text_has_a_final_answer(text):
    if is_well_formed(text):
        assert final_answer(text) == "3"
        assert text.count("#### 3") == 1
