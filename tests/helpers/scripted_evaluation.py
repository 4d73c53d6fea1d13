"""An evaluation on a scripted engine, of problems whose answer is their number."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from helpers.scripted_engine import ScriptedEngine

from nemo_edo.algorithms.plan import sampling_requests
from nemo_edo.config import EvaluationConfig
from nemo_edo.evaluation.evaluator import Evaluator, Tuning
from nemo_edo.evaluation.results import Evaluation
from nemo_edo.interfaces import Policy
from nemo_edo.rewards.verifier import ExactAnswerScorer
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.types import Problem, ScoredRollout

SAMPLES, ROLLOUTS, MAX_NEW_TOKENS = 4, 3, 24
PAD, STOP, FIRST_CHARACTER = 0, 1, 2
PROBLEMS = [Problem(f"test-{i}", f"q{i}", f"#### {i}", str(i), f"test.jsonl:{i}") for i in range(1, 8)]
PROMPTS = {problem.id: (3,) * i for i, problem in enumerate(PROBLEMS, start=1)}


class Engine(ScriptedEngine):
    """Records its calls."""

    def __init__(self, script) -> None:
        super().__init__(script, encode=lambda text: [ord(c) + FIRST_CHARACTER for c in text],
                         decode=lambda ids: "".join(chr(i - FIRST_CHARACTER) for i in ids), stop_id=STOP)
        self.calls: list[tuple] = []

    def generate(self, requests, sampling):
        self.calls.append((list(requests), sampling))
        return super().generate(requests, sampling)


def random_script(request, sampling) -> str:
    """Texts that are right, wrong, tied, without an answer, cut at 24 tokens, or badly formed."""
    rng = random.Random(f"{request.seed} {sampling.temperature}")
    right = request.problem_id.removeprefix("test-")
    answer = rng.choice([right, right, "77", "88"])
    return rng.choice([f"{rng.randint(1, 3)} + 1\n#### {answer}", f"#### {answer}", "no answer", "1" * 60,
                       f"#### {answer}\nand more"])


def evaluate(script=random_script, *, samples: int = SAMPLES, rollouts: int = ROLLOUTS,
             problems: Sequence[Problem] = PROBLEMS, policy: Policy | None = None, tuning: Tuning | None = None,
             change: Callable[[int, ScoredRollout], ScoredRollout] | None = None, folder: Path | None = None,
             **settings) -> tuple[Evaluation, list[ScoredRollout], Engine]:
    """(evaluation, the first rollout's responses, engine). change: of a response's place and what the rule says of it;
    folder: where the responses are stored."""

    engine = Engine(script)

    def respond(kind, requests, sampling, problems):
        scored = ExactAnswerScorer().score(engine.generate(requests, sampling), problems)
        if change is not None:
            scored = [change(place, one) for place, one in enumerate(scored)]
        if folder is not None:
            RolloutStore(folder / kind).write(0, scored)
        return scored

    evaluator = Evaluator(policy, respond, problems, EvaluationConfig(samples=samples, **settings), MAX_NEW_TOKENS, PAD)
    requests = sampling_requests(problems, PROMPTS, rollouts * samples, 42, "evaluate")
    return *evaluator.evaluate("arm", requests, rollouts, tuning), engine
