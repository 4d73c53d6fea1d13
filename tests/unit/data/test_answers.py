from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_edo.data.answers import HASHES, answer_format, canonical_number, final_answer, is_well_formed

DECIMALS = st.decimals(min_value=-(10**12), max_value=10**12, places=3, allow_nan=False)


@pytest.mark.parametrize(("text", "expected"), [
    ("1,234", "1234"), ("$5", "5"), ("-3", "-3"), ("18.00", "18"), ("3.5", "3.5"), ("3.50", "3.5"), ("7.", "7"),
    (" 42 \t", "42"), ("-$1,000.50", "-1000.5"), ("$-2", "-2"), (".5", "0.5"), ("007", "7"), ("-0.0", "0"), ("+4", "4"),
    *((text, None) for text in ("", ".", "$", "-", "$.", "twelve", "12 apples", "1,23", "12,34,567", ",123", "1.2.3",
                                "--3", "5%", "1e3", "1/2", "٣", "3 4", "NaN", "0x1f")),
])
def test_canonical_number_of_known_spellings_and_none_for_other_texts(text, expected):
    assert canonical_number(text) == expected


@given(DECIMALS, DECIMALS)
def test_canonical_numbers_keep_the_value_and_are_the_same_exactly_if_they_are_equal(number, other):
    for text in (f"{number:f}", f"{number:,f}", f"${number:f}"):
        canonical = canonical_number(text)
        assert Decimal(canonical) == number
        assert canonical_number(canonical) == canonical
    assert (canonical_number(f"{number:,f}") == canonical_number(f"{other:f}")) == (number == other)


@pytest.mark.parametrize(("text", "answer", "well_formed"), [
    ("1 + 1 = 2\n#### 2", "2", True), ("#### 2\n\n", "2", True), ("a\r\n  #### $5.00  \r\n", "5", True),
    ("#### 2\nno, wait\n#### 1,003\nthat is it", "1003", False), ("#### 2\nmore", "2", False),
    ("#### 42 apples", "42", True), ("#### **42**", "42", True), (r"#### \boxed{42}", "42", True),
    ("#### 50%", "50", True), ("#### £42", "42", True), ("#### −42", "-42", True), ("#### x = 42", "42", True),
    ("#### 1\u202f234 km", "1234", True), ("#### \u20115", "-5", True), ("#### \u201342\u00a0", "-42", True),
    ("#### 1/2", "0.5", True), (r"#### \frac{3}{4} cups", "0.75", True), ("#### 1/3", None, False),
    *((f"#### {text}", None, False) for text in ("42 or 43", "42 dozen", "42k", "42 + 1", "42 is wrong", "12:30")),
    *((f"#### {text}", None, False) for text in ("5 twelfths", "2 out of three", "5 point two", "1 in six",
                                                "5 below zero", "2 remainder one")),
    ("#### 2\n#### 2", "2", False), ("#### 12\n#### twelve", None, False), ("1 + 1 = 2\n#### two", None, False),
    ("the answer is 12", None, False), ("the answer is #### 12", None, False), ("", None, False),
])
def test_final_answer_is_the_number_of_the_last_marker_line_and_well_formed_if_the_only_one_at_the_end(
        text, answer, well_formed):
    assert (final_answer(text), is_well_formed(text)) == (answer, well_formed)


BOXED, FINAL, SO, FLEXIBLE = map(answer_format, ("boxed", "final_answer_is", "so_the_answer_is", "flexible"))


@pytest.mark.parametrize(("form", "text", "answer"), [
    (BOXED, r"\boxed{1}, no, \boxed{\sqrt{\frac{a}{b}} + \{1\}}", r"\sqrt{\frac{a}{b}} + \{1\}"),
    (BOXED, r"\boxed{\text{a \} b}}", r"\text{a \} b}"), (BOXED, r"\boxed{ 3", None),
    (BOXED, r"either \boxed{3} or $x=\boxed{4}$", "3, 4"),
    (BOXED, r"$\boxed{3}$;\quad **$\boxed{4}$**, or~$A=\boxed{5}$", "3, 4, 5"),
    (BOXED, r"\boxed{3}. No: \boxed{4}", "4"),
    (BOXED, "\\boxed{1\u2009234\u00a0cm}", "1234 cm"),
    (FLEXIBLE, "2 3\n#### 1/3\nmore 4", "1/3"), (FLEXIBLE, "#### 5 million", "5 million"),
    (FLEXIBLE, "#### x+5", "x+5"), (FLEXIBLE, "#### The answer is 5", "5"),
    (FLEXIBLE, "#### Step 2: Sum\nIt is $\\boxed{42}$.", "42"), (FLEXIBLE, "#### **1. Plan**\n2+2=4\nso 42", "42"),
    (FLEXIBLE, "#### Final Answer\n\nThe answer is 42.", "42"), (FLEXIBLE, "#### 5 million\nDone", "5 million"),
    (FLEXIBLE, "#### **Monday**\nI hope that helps 3 of you.", "Monday"),
    (FLEXIBLE, "#### **Answer:** x = 3\nor 4", "x = 3"), (FLEXIBLE, "#### Result\n**4**", "4"),
    (FLEXIBLE, "#### Total cost\n5 dollars: $\\boxed{5}$", "5"),
    (FLEXIBLE, "#### Total cost\n5+5 = 10", "10"), (FLEXIBLE, "#### **Cost of 5 boxes**\n$12", "12"),
    *((FLEXIBLE, f"#### {answer}\n{more}", answer) for answer, more in (
        ("New York", "Population 8 million"), ("New York", "It has 8 million people."), ("x + 1", "so f(2) = 3"),
        (r"\sqrt{3} + 1", "which is 2.73"), ("No solution", "as 1=2"), ("Monday, May 5", "7 days"))),
    (FLEXIBLE, "#### Tom's apples\nSo Tom has 12 apples.", "12"),
    (FLEXIBLE, "#### Working\n5 apples", "5"), (FLEXIBLE, "#### Los Angeles\nIt is far.", "Los Angeles"),
    (FLEXIBLE, "#### Answer: Los Angeles\nor 3", "Los Angeles"), (FLEXIBLE, "#### x = 1/3 cup\nor 4", "x = 1/3 cup"),
    (FLEXIBLE, "#### 5\nor 6", "5"), (FLEXIBLE, r"It is \boxed{\frac{1}{2}}, or 0.5", r"\frac{1}{2}"),
    (FLEXIBLE, "The answer is **42** apples. There are 7 left.", "42 apples"),
    (FLEXIBLE, "5 - 3 leaves $1,234.50 in 2 days", "2"),
    (FLEXIBLE, "It costs \u20131\u202f234\u00a0euros", "-1234"),
    (FLEXIBLE, r"In 2020 100 people paid $1{,}234$", "1234"), (FLEXIBLE, "no number", None),
    (FINAL, "The final answer is: $5.25$. I hope it is right.", "5.25"),
    (FINAL, "The final answer is $\\boxed{(1,2)}$, as was asked.", "(1,2)"),
    (FINAL, "**The final answer is** 3? No. **The final answer is** **4**", "4"),
    (SO, "5. So the answer is 32.", "32"),
    (answer_format("pattern", r"<a>(.*?)</a>"), "<a>1</a> <a> $2$ </a>", "2"),
    (answer_format("pattern", r"(x)=(?P<answer>\d)"), "x=3", "3"),
])
def test_the_answer_is_in_the_last_closed_box_or_after_the_last_phrase_or_the_last_match(form, text, answer):
    assert form.extract(text) == answer


@pytest.mark.parametrize(("form", "text", "good"), [
    (BOXED, "Think.\nSo \\boxed{5}.", True), (BOXED, r"\boxed{5} or \boxed{5}", False),
    (FINAL, "The final answer is $5$.\nOr maybe\nnot", False),
    (FLEXIBLE, "The answer is 5.", True), (FLEXIBLE, "It is 5.", False),
])
def test_well_formed_is_one_answer_on_the_last_line(form, text, good):
    assert form.is_well_formed(text) is good


HOSTILE = {
    "open boxes": "\\boxed{" * 140_000, "closed boxes": r"\boxed{1}" * 110_000, "braces": "{" * 1_000_000,
    "nested": "\\boxed{" * 70_000 + "}" * 70_000, "phrases": "the final answer is " * 50_000,
    "hashes": "####" + "9" * 1_000_000, "words": "#### 5" + " apples" * 140_000, "dots": "1." * 500_000,
    "spaces": "The final answer is" + " " * 1_000_000, "dollars": r"\boxed{" + "$" * 1_000_000 + "}",
    "gap": r"\boxed{1}" + " " * 500_000 + "," + " " * 500_000 + r"\boxed{2}", "name": r"\boxed{1},x_" + "1" * 1_000_000,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("form", [BOXED, FINAL, FLEXIBLE, HASHES], ids=["boxed", "final", "flexible", "hashes"])
def test_a_megabyte_takes_no_longer_than_its_length_asks_for(form, text):
    """A search whose time is the square of the length would take hours: it would run into the suite's time limit."""
    form.extract(text), form.is_well_formed(text)
