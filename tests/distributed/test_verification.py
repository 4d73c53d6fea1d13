"""The verification processes under attack, and their speed."""

import random
import time
from pathlib import Path

import pytest

from nemo_edo.rewards.math_verifier import MathVerifier
from nemo_edo.rewards.workers import Ended, Limits, WorkerPool

LIMIT_S = 0.5
BOMBS = [
    "10^{10^{10}}", "9!!!!!!", "2^{2^{2^{2^{2^{2}}}}}", r"\int_0^1 x^{x^{x}} dx", r"\prod_{i=1}^{10^9} i",
    r"\sum_{k=1}^{1000000} k^{1000}", "(1+x)^{100000}", "1000000!!", r"\left(" * 100, "x^" * 300 + "2", "{" * 900,
    "(" * 900, r"\frac{1}{" * 90, r"\sqrt{" * 120 + "2" + "}" * 120, r"\binom{10^9}{10^8}", "1e999999999",
    "9" * 900 + "!", "%" * 300,
    r"\begin{pmatrix}" + "1&" * 300 + r"1\end{pmatrix}", r"\log_{0}{0}", r"\frac{0}{0}", "|" * 600, "x=" * 300 + "1",
    r"\{" + "1," * 400 + r"1\}", r"\sin " * 150 + "x", "10^{100000}", r"\lim_{x\to 0} \frac{\sin x^{x^x}}{x}",
]  # fmt: skip
TOKENS = [
    r"\frac", "{", "}", "^", "_", "(", ")", "[", "]", "1", "99999", "x", r"\sqrt", r"\int", "!", "+", "-", ",", "=",
    " ", r"\left", r"\right", r"\sum", "%", "$", "\\", r"\infty", r"\cup", r"\text", "&", "é", "\x00", "\ud800",
]  # fmt: skip


def hostile_answers(count: int) -> list[str]:
    draw = random.Random(7)
    fuzzed = ["".join(draw.choices(TOKENS, k=draw.randint(1, 25))) for _ in range(count - len(BOMBS) - 100)]
    long = ["".join(draw.choices("0123456789x+{}^\\", k=1000)) * 1000 for _ in range(100)]
    return [*BOMBS, *fuzzed, *long]


def resident_mb(pid: int) -> float:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    sizes = [line for one in (str(pid), *children) for line in Path(f"/proc/{one}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in sizes if line.startswith("VmRSS")) / 1024


@pytest.mark.filterwarnings("ignore:answers that could not be verified")
def test_a_thousand_hostile_answers_cost_their_limits_and_no_more():
    pool = WorkerPool(Limits(seconds=LIMIT_S, memory_mb=600, workers=2))
    try:
        pool.run("parses", [("x",)])
        begun = time.monotonic()
        answers = hostile_answers(1000)
        assert len(answers) == 1000
        verdicts = [verdict for n in range(0, 1000, 100) for verdict in MathVerifier(pool).verify(
            [("17", answer) for answer in answers[n : n + 100]])]
        spent, resident = time.monotonic() - begun, resident_mb(pool._server.pid)
        [after] = pool.run("compare", [("x+1", "1+x")])
    finally:
        pool.close()
    assert len(verdicts) == 1000 and not any(verdict.right for verdict in verdicts)
    assert all(verdict.answer != "17" for verdict in verdicts)
    print(f"{spent:.1f} s, {resident:.0f} MB, {sum(v.trouble is not None for v in verdicts)} not verified")
    assert spent < 1000 * LIMIT_S / 2 + 30
    assert resident < 3 * 600
    assert after is Ended.TIMED_OUT or after[0] is True


@pytest.mark.filterwarnings("ignore:answers that could not be verified")
def test_ordinary_answers_are_verified_by_the_hundred_a_second():
    """200 a second of two free cores; this machine may be busy, so that processor time is what counts."""
    draw = random.Random(3)
    shapes = [r"{a}", r"\frac{{{a}}}{{{b}}}", "{a}.{b}", r"{a}\sqrt{{{b}}}", "({a},{b})", "{a}x+{b}", r"{a}\pi", "{a}%",
              r"\text{{option {a}}}", "x={a}"]  # fmt: skip
    numbers = [(draw.randint(2, 99), draw.randint(2, 99)) for _ in range(2000)]
    pairs = [(shapes[n % 10].format(a=a, b=b), shapes[(n + n // 10 % 2 * 3) % 10].format(a=a, b=b + n % 3))
             for n, (a, b) in enumerate(numbers)]
    pool = WorkerPool(Limits(seconds=30, memory_mb=1024, workers=2))
    try:
        pool.run("parses", [("x",)] * 4)
        before, begun = _cpu_seconds(pool), time.monotonic()
        MathVerifier(pool).verify(pairs)
        cpu, wall = _cpu_seconds(pool) - before, time.monotonic() - begun
    finally:
        pool.close()
    print(f"{len(pairs) / wall:.0f} a second here, {2 * len(pairs) / cpu:.0f} a second of two cores' time")
    assert len(pairs) == 2000 and 2 * len(pairs) / cpu >= 200


def _cpu_seconds(pool: WorkerPool) -> float:
    """Of the workers, user and system."""
    server = pool._server.pid
    workers = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    ticks = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in workers]
    return sum(int(value) for pair in ticks for value in pair) / 100
