import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_edo.data.answers import (
    answer_format,
    canonical_number,
    clean_answer,
    final_answer,
    is_well_formed,
    simple_fraction,
)

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


BOXED, FINAL, SO = (answer_format(name) for name in ("boxed", "final_answer_is", "so_the_answer_is"))


@pytest.mark.parametrize(("text", "answer"), [
    (r"so $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
    (r"\boxed{1}, no, \boxed{\sqrt{\frac{a}{b}} + \{1\}}", r"\sqrt{\frac{a}{b}} + \{1\}"),
    (r"\boxed{\text{a \} b}}", r"\text{a \} b}"),
    (r"\boxed{\boxed{7}}", "7"),
    (r"\fbox{7} it is", "7"),
    (r"it is \boxed 5$", "5"),
    (r"\boxed{ 3", None),
    (r"\boxed{3} and \boxed{4", "3"),
    (r"\boxed{}", None),
    ("5", None),
])
def test_boxed_answer_is_the_last_box_whose_braces_close(text, answer):
    assert BOXED.extract(text) == answer


@pytest.mark.parametrize(("text", "answer"), [
    ("The final answer is 5.", "5"),
    ("The final answer is: $5.25$. I hope it is right.", "5.25"),
    ("the Final Answer is\n\\[\n x^2 \n\\]", "x^2"),
    ("The final answer is $\\boxed{(1,2)}$, as was asked.", "(1,2)"),
    ("The final answer is 3? No. The final answer is 4", "4"),
    ("**The final answer is** **12**", "12"),
    ("The final answer is (A).\nGood bye", "(A)"),
    ("So the answer is 5.", None),
    (r"It is \boxed{5}", None),
])
def test_stated_answer_is_what_follows_the_last_phrase(text, answer):
    assert FINAL.extract(text) == answer


def test_gsm8k_answer_of_the_paper_follows_its_own_phrase():
    assert SO.extract("5. So the answer is 32.") == "32"
    assert SO.extract("So the answer is $1,200.00.") == "1,200.00"


@pytest.mark.parametrize(("form", "text", "good"), [
    (BOXED, "Think.\nSo \\boxed{5}.", True),
    (BOXED, r"\boxed{5} or \boxed{5}", False),
    (BOXED, r"\boxed{\boxed{5}}", True),
    (BOXED, "\\boxed{5}\nbut then\nmore", False),
    (BOXED, "none", False),
    (FINAL, "Think.\nThe final answer is $5$.\n", True),
    (FINAL, "The final answer is $5$.\nOr maybe\nnot", False),
])
def test_well_formed_is_one_answer_on_the_last_line(form, text, good):
    assert form.is_well_formed(text) is good


def test_pattern_takes_its_named_or_first_group_of_the_last_match():
    assert answer_format("pattern", r"<a>(.*?)</a>").extract("<a>1</a> <a> $2$ </a>") == "2"
    assert answer_format("pattern", r"(x)=(?P<answer>\d)").extract("x=3") == "3"
    assert answer_format("pattern", r"\d+").extract("12 of 15") == "15"


@pytest.mark.parametrize(("text", "clean"), [
    ("$2$", "2"), (r"\(x\).", "x"), (r"\[ x \]", "x"), ("**7**", "7"), ("$$7$$", "7"), (r"\boxed{3}.", "3"),
    (r"10\,000", "10000"), ("12{,}345", "12345"), ("1 234 567", "1234567"), ("1, 234", "1, 234"),
    (r"\left(1,2\right)", "(1,2)"), ("$(1,2)$, $(3,4)$", "(1,2), (3,4)"), (r"\$5", "5"), (r"5\%", "5%"),
    (r"\begin{pmatrix} 1 \\ 0 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 0 \end{pmatrix}"), ("−3", "-3"), ("2.50", "2.50"),
])
def test_clean_answer_takes_off_what_surrounds_it_and_changes_no_mathematics(text, clean):
    assert clean_answer(text) == clean
    assert clean_answer(clean) == clean


@pytest.mark.parametrize(("text", "value"), [
    ("3/4", Fraction(3, 4)), (r"\frac{6}{8}", Fraction(3, 4)), (r"-\dfrac{1}{2}", Fraction(-1, 2)),
    ("0.5", Fraction(1, 2)),
    (r"\frac{-1}{2}", Fraction(-1, 2)), (r"\frac12", Fraction(1, 2)), ("1,234", Fraction(1234)), ("1/0", None),
    (r"\frac{x}{2}", None), ("1/2/3", None), ("x", None),
])
def test_simple_fraction_is_exact(text, value):
    assert simple_fraction(text) == value


HOSTILE = {
    "open boxes": "\\boxed{" * 140_000, "closed boxes": r"\boxed{1}" * 110_000, "braces": "{" * 1_000_000,
    "nested": "\\boxed{" * 70_000 + "}" * 70_000, "phrases": "the final answer is " * 50_000,
    "phrase and digits": "The final answer is " + "9" * 1_000_000, "backslashes": "\\" * 1_000_000,
    "spaces": "The final answer is" + " " * 1_000_000, "dollars": r"\boxed{" + "$" * 1_000_000 + "}",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("form", [BOXED, FINAL], ids=["boxed", "final"])
def test_answer_is_searched_for_in_a_megabyte_in_seconds(form, text):
    begun = time.process_time()
    form.extract(text), form.is_well_formed(text)
    assert time.process_time() - begun < 10
