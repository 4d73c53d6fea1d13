"""Solutions generated step by step, for a search: a StepProposer (``test_time.search_llm``) over any engine.

A step ends where the text has a separator, or with the solution. A path is continued from the very tokens that were
sampled for it, without tokenising again: where a token extends past a separator, the next step begins with its rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from nemo_edo.algorithms.plan import request_seed
from nemo_edo.data.answers import AnswerFormat
from nemo_edo.interfaces import GenerationEngine
from nemo_edo.reward_models.formats import split_steps
from nemo_edo.test_time.search_llm import Step, StepPath
from nemo_edo.types import GenerationRequest, Rollout, SamplingParams

END, ANSWER, LENGTH = "end", "answer", "length"
"""Why a solution ended: its end token came, it has stated its final answer, or its tokens are used up."""


@dataclass(frozen=True)
class Draft:
    problem_id: str
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...] = ()  # sampled so far, an end token included
    logprobs: tuple[float, ...] = ()
    text: str = ""
    rest: str = ""  # what ``text`` has after its last separator
    end: str | None = None  # why the solution ended with it; None: it continues
    policy_version: int = 0


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
        self.drafts = {(StepPath(question), False): Draft(*about) for question, about in questions.items()}
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
                draft, (seed, sample) = drafts[place], samples[place]
                used = len(draft.ids)
                left, own_seed = self._sampling.max_new_tokens - used, request_seed(seed, sample, used)
                prompt_ids = draft.prompt_ids + draft.ids
                requests.append(GenerationRequest(draft.problem_id, sample, prompt_ids, own_seed, left))
            rollouts = self._engine.generate(requests, self._sampling)
            for place, rollout in zip(going, rollouts, strict=True):
                drafts[place], steps[place] = self._extended(drafts[place], rollout)
            going = [place for place in going if not steps[place] and drafts[place].end is None]
        found: list[list[Step]] = [[] for _ in paths]
        for place, (draft, text) in enumerate(zip(drafts, steps, strict=True)):
            number, ended = place // count, draft.end is not None
            path = replace(paths[number], steps=(*paths[number].steps, text))
            self.drafts.setdefault((path, ended), draft)
            found[number].append(Step(text, finished=ended, tokens=len(draft.ids) - len(begun[number].ids)))
        return found

    def solution(self, path: StepPath, ended: bool, seed: int) -> Rollout:
        """A path, ended or not, as one response; ``finished`` where its end token came or it has stated its answer."""
        draft = self.drafts[path, ended]
        return Rollout(
            problem_id=draft.problem_id,
            sample_index=0,
            prompt_ids=draft.prompt_ids,
            response_ids=draft.ids,
            response_logprobs=draft.logprobs,
            text=draft.text,
            finished=draft.end in (END, ANSWER),
            policy_version=draft.policy_version,
            seed=seed,
        )

    def _extended(self, draft: Draft, rollout: Rollout) -> tuple[Draft, str]:
        """The draft with the sampled tokens, and the step that they make; an empty one where it is only a separator."""
        ids = (*draft.ids, *rollout.response_ids)
        # All of it: the first token of a text may be decoded without its space.
        text = self._decode(ids[:-1] if rollout.finished else ids)
        if not text.startswith(draft.text):
            raise ValueError(f"the tokenizer decodes {draft.text!r} otherwise once other tokens follow: {text!r}")
        end = None
        if rollout.finished:
            end = END
        elif rollout.stop is not None and self._answers is not None and self._answers.is_well_formed(text):
            end = ANSWER
        elif len(ids) >= self._sampling.max_new_tokens:
            end = LENGTH
        step, rest = draft.rest + text[len(draft.text) :], ""
        if end is None:
            step, _, rest = step.rpartition(self._separator)
        draft = replace(
            draft,
            ids=ids,
            logprobs=(*draft.logprobs, *rollout.response_logprobs),
            text=text,
            rest=rest,
            end=end,
            policy_version=rollout.policy_version,
        )
        return draft, self._separator.join(split_steps(step, self._separator))
