"""From the config to what judges responses. What needs more than the standard library is imported once it is used."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_edo.config import RunConfig
from nemo_edo.data.answers import AnswerFormat, answer_format
from nemo_edo.data.benchmarks import NUMBER
from nemo_edo.data.problems import LoadedProblems
from nemo_edo.interfaces import Scorer
from nemo_edo.rewards.verifier import ExactAnswerScorer

if TYPE_CHECKING:
    from nemo_edo.rewards.judge import Judge


def build_scorer(cfg: RunConfig, loaded: dict[Path, LoadedProblems]) -> tuple[Scorer, Judge | None]:
    """What judges responses to the loaded problems, and on the first rank the language model behind it, if one is.

    Problems whose answers rules could not verify are bad rows: an error, or taken out of ``loaded``. The first rank
    verifies for all of them. Raises UserError, on all ranks, where a judge does not answer.
    """
    answers = answer_format(cfg.data.answer_format, cfg.data.answer_pattern)
    only_numbers = all(p.answer_kind == NUMBER for file in loaded.values() for p in file.problems)
    if cfg.rewards.verifier == "exact" or (cfg.rewards.verifier == "auto" and only_numbers):
        return ExactAnswerScorer(answers), None
    if cfg.rewards.verifier == "judge":
        return _judge_scorer(cfg, answers)
    from nemo_edo.parallel.main_rank import on_main_for_long
    from nemo_edo.rewards.math_verifier import MathScorer, MathVerifier, require_verifiable
    from nemo_edo.rewards.workers import Limits, WorkerPool

    rewards = cfg.rewards
    verifier = MathVerifier(WorkerPool(Limits(rewards.time_limit_s, rewards.memory_limit_mb, rewards.workers)))
    for path, file in loaded.items():
        bad = on_main_for_long(partial(verifier.unreadable, file.problems))
        loaded[path] = require_verifiable(path, file, bad, on_bad_rows=cfg.data.on_bad_rows)
    return MathScorer(answers, lambda pairs: on_main_for_long(partial(verifier.verify, pairs))), None


def _judge_scorer(cfg: RunConfig, answers: AnswerFormat) -> tuple[Scorer, Judge | None]:
    """The judge has answered once by then, or a UserError is raised on all ranks."""
    from nemo_edo.parallel.main_rank import on_main_for_long
    from nemo_edo.rewards.judge import Judge, JudgeScorer
    from nemo_edo.rewards.judge_cache import JudgeCache
    from nemo_edo.rewards.math_verifier import MathVerifier
    from nemo_edo.rewards.workers import Limits, WorkerPool

    rewards, judges = cfg.rewards, []

    def begin() -> None:
        limits = Limits(rewards.time_limit_s, rewards.memory_limit_mb, rewards.workers)
        rules = MathVerifier(WorkerPool(limits)) if rewards.judge.compare_with_rules else None
        cache = JudgeCache(Path(rewards.judge.cache or Path(cfg.output_dir) / "judge.sqlite"))
        judges.append(Judge(rewards.judge, cache, rules))
        judges[0].check()

    on_main_for_long(begin)
    scorer = JudgeScorer(answers, lambda items: on_main_for_long(lambda: judges[0].verdicts(items)))
    return scorer, judges[0] if judges else None
