"""Solutions generated step by step, for a search: a StepProposer (``test_time.search_llm``) over any engine.

A step ends where the text has a separator, or with the solution. A path is continued from the very tokens that were
sampled for it, without tokenising again: where a token extends past a separator, the next step begins with its rest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from nemo_edo.algorithms.plan import request_seed
from nemo_edo.data.answers import AnswerFormat
from nemo_edo.interfaces import GenerationEngine
from nemo_edo.reward_models.formats import split_steps
from nemo_edo.test_time.search_llm import Step, StepPath
from nemo_edo.types import GenerationRequest, Rollout, SamplingParams


class Draft(NamedTuple):
    rollout: Rollout
    """What has been sampled so far; finished where its end token came or it has stated its final answer."""
    rest: str = ""
    """The text after the last separator."""
    ended: bool = False
    """Whether it is finished or its tokens are used up; otherwise it continues."""


class EngineStepProposer:
    """Generates the next steps of a call's paths together. ``drafts`` grows: make a new one for other questions."""

    def __init__(
        self,
        engine: GenerationEngine,
        questions: Mapping[str, tuple[str, tuple[int, ...]]],
        sampling: SamplingParams,
        *,
        separator: str,
        decode: Callable[[Sequence[int]], str],
        answers: AnswerFormat | None,
    ) -> None:
        """questions: text -> (problem id, prompt ids). sampling: ``max_new_tokens`` are those of a whole solution.
        answers: a path ends with the step that states its answer and nothing after it; None: with none."""
        self._engine = engine
        self._sampling = replace(sampling, stop=(separator,))
        self._separator = separator
        self._decode = decode
        self._answers = answers
        self.drafts = {
            (StepPath(question), False): Draft(Rollout(problem_id, 0, prompt_ids, (), (), "", False, 0, 0))
            for question, (problem_id, prompt_ids) in questions.items()
        }
        """The questions' and every proposed path's, by path and whether it has ended: the same text may or may not."""

    def propose(self, paths: Sequence[StepPath], count: int, seeds: Sequence[int]) -> list[list[Step]]:
        """``count`` next steps for each path. One call of the engine, and another one for each further separator that
        the policy puts where a step would begin. For equal steps after one path, the first one's tokens are kept."""
        begun = [self.drafts[path, False] for path in paths]
        drafts = [draft for draft in begun for _ in range(count)]
        samples = [(seed, sample) for seed in seeds for sample in range(count)]
        steps: list[str] = [""] * len(drafts)
        going = list(range(len(drafts)))
        while going:
            requests = []
            for place in going:
                so_far, (seed, sample) = drafts[place].rollout, samples[place]
                used = len(so_far.response_ids)
                left, own_seed = self._sampling.max_new_tokens - used, request_seed(seed, sample, used)
                prompt_ids = (*so_far.prompt_ids, *so_far.response_ids)
                requests.append(GenerationRequest(so_far.problem_id, sample, prompt_ids, own_seed, left))
            rollouts = self._engine.generate(requests, self._sampling)
            for place, rollout in zip(going, rollouts, strict=True):
                drafts[place], steps[place] = self._extended(drafts[place], rollout)
            going = [place for place in going if not steps[place] and not drafts[place].ended]
        found: list[list[Step]] = [[] for _ in paths]
        for place, (draft, text) in enumerate(zip(drafts, steps, strict=True)):
            number = place // count
            path = replace(paths[number], steps=(*paths[number].steps, text))
            self.drafts.setdefault((path, draft.ended), draft)
            tokens = len(draft.rollout.response_ids) - len(begun[number].rollout.response_ids)
            found[number].append(Step(text, finished=draft.ended, tokens=tokens))
        return found

    def solution(self, path: StepPath, ended: bool, seed: int) -> Rollout:
        """A path, ended or not, as one response; ``finished`` where its end token came or it has stated its answer."""
        return replace(self.drafts[path, ended].rollout, seed=seed)

    def _extended(self, draft: Draft, sampled: Rollout) -> tuple[Draft, str]:
        """The draft with the sampled tokens, and the step that they make; an empty one where it is only a separator."""
        so_far = draft.rollout
        ids = (*so_far.response_ids, *sampled.response_ids)
        logprobs = so_far.response_logprobs + sampled.response_logprobs
        # All of it: the first token of a text may be decoded without its space.
        text = self._decode(ids[:-1] if sampled.finished else ids)
        if not text.startswith(so_far.text):
            raise ValueError(f"the tokenizer decodes {so_far.text!r} otherwise once other tokens follow: {text!r}")
        may_answer = sampled.stop is not None and self._answers is not None
        finished = sampled.finished or (may_answer and self._answers.is_well_formed(text))
        # Without an end or a separator it was cut, perhaps at an endpoint's limit, which counts other tokens.
        ended = finished or sampled.stop is None or len(ids) >= self._sampling.max_new_tokens
        step, rest = draft.rest + text[len(so_far.text) :], ""
        if not ended:
            step, _, rest = step.rpartition(self._separator)
        about = {"text": text, "finished": finished, "policy_version": sampled.policy_version}
        rollout = replace(so_far, response_ids=ids, response_logprobs=logprobs, **about)
        return Draft(rollout, rest, ended), self._separator.join(split_steps(step, self._separator))
