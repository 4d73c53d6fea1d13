import pytest

from nemo_edo.errors import UserError
from nemo_edo.sizes import parse_size


@pytest.mark.parametrize(("text", "expected"), [
    ("5GB", 5 * 10**9), ("500 mb", 5 * 10**8), ("2GiB", 2**31), ("1.5KB", 1500), ("123", 123),
])
def test_sizes_are_read_as_transformers_reads_them(text: str, expected: int):
    assert parse_size("--max-shard-size", text) == expected


@pytest.mark.parametrize("text", ["", "GB", "5 apples", "-1GB", "0GB"])
def test_anything_else_is_an_error_that_says_what_is_expected(text: str):
    with pytest.raises(UserError, match=f"^--max-shard-size is {text}, expected a size such as 5GB"):
        parse_size("--max-shard-size", text)
