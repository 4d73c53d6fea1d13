"""The verification processes under attack and under load."""

import random
import time
from pathlib import Path

import pytest

from nemo_edo.rewards.verifier import MathVerifier
from nemo_edo.utils.worker_pool import Limits, WorkerPool

pytestmark = pytest.mark.slow
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


HOSTILE = 200


def hostile_answers() -> list[str]:
    chance = random.Random(7)
    long = ["".join(chance.choices("0123456789x+{}^\\", k=1000)) * 1000 for _ in range(20)]
    fuzzed = ["".join(chance.choices(TOKENS, k=chance.randint(1, 25))) for _ in range(HOSTILE - len(BOMBS) - len(long))]
    return [*BOMBS, *fuzzed, *long]


def workers_of(pool: WorkerPool) -> list[str]:
    server = pool._server.pid
    return Path(f"/proc/{server}/task/{server}/children").read_text().split()


def resident_mb(pool: WorkerPool) -> float:
    status = [Path(f"/proc/{process}/status").read_text() for process in (pool._server.pid, *workers_of(pool))]
    return sum(int(line.split()[1]) for one in status for line in one.splitlines() if line.startswith("VmRSS")) / 1024


@pytest.mark.filterwarnings("ignore:answers that could not be verified")
def test_hostile_answers_cost_their_limits_and_no_more():
    verifier = MathVerifier(Limits(seconds=LIMIT_S, memory_mb=600, workers=2))
    verifier.verify([("x", "x+x")])
    begun, answers = time.monotonic(), hostile_answers()
    verdicts = [verdict for n in range(0, HOSTILE, 100) for verdict in verifier.verify(
        [("17", answer) for answer in answers[n : n + 100]])]
    spent, resident = time.monotonic() - begun, resident_mb(verifier._pool)
    [after] = verifier.verify([("x+1", "1+x")])
    assert len(verdicts) == HOSTILE and not any(verdict.correct for verdict in verdicts)
    assert all(verdict.answer != "17" for verdict in verdicts)
    assert spent < HOSTILE * LIMIT_S + 60  # half of it on an idle machine: two workers
    assert resident < 3 * 600
    assert after.correct


@pytest.mark.filterwarnings("ignore:answers that could not be verified")
def test_ordinary_answers_are_all_verified_and_by_the_same_workers():
    """Every new worker imports SymPy: workers that ended with each answer would verify a few per second."""
    shapes = ["{}", r"\frac{{{}}}{{7}}", "{}.5", r"{}\sqrt{{2}}", "({},3)", "{}x+1", r"{}\pi", r"{}\%"]
    pairs = [(shape.format(n), shape.format(n + n % 3)) for n in range(2, 65) for shape in shapes]
    verifier = MathVerifier(Limits(seconds=60, memory_mb=1024, workers=2))
    verifier.verify([("x", "x+x")])
    before = workers_of(verifier._pool)
    verdicts = verifier.verify(pairs)
    assert workers_of(verifier._pool) == before and len(before) == 2
    assert [verdict.failure for verdict in verdicts] == [None] * len(pairs)
    assert [verdict.correct for verdict in verdicts] == [gold == answer for gold, answer in pairs]
