"""Steps that a policy samples one by one are what it would have sampled at once, token by token."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers.scripted_engine import ScriptedEngine
from hypothesis import given
from hypothesis import strategies as st

from nemo_edo.data.answers import HASHES, answer_format
from nemo_edo.reward_models.formats import split_steps
from nemo_edo.search.step_proposer import EngineStepProposer
from nemo_edo.test_time.search_llm import Step, StepPath
from nemo_edo.types import GenerationRequest, Rollout, SamplingParams

QUESTION, PROMPT = "6 + 1 + 3", (900, 901)


class Chunks:
    """A tokenizer whose tokens are so many characters each, wherever lines end."""

    def __init__(self, size: int) -> None:
        self.size, self.texts = size, ["<end>"]

    def encode(self, text: str) -> list[int]:
        parts = [text[place : place + self.size] for place in range(0, len(text), self.size)]
        self.texts += [part for part in dict.fromkeys(parts) if part not in self.texts]
        return [self.texts.index(part) for part in parts]

    def decode(self, ids) -> str:
        return "".join(self.texts[i] for i in ids)


def proposing(solution, size: int = 1, *, limit: int = 200, separator: str = "\n", answers=None):
    """A proposer over an engine that writes the given solution in tokens of so many characters, the requests of each
    call of the engine, and its tokenizer."""
    tokens, calls = Chunks(size), []

    def rest(request: GenerationRequest, _: SamplingParams) -> str:
        so_far = tokens.decode(request.prompt_ids[len(PROMPT) :])
        return (solution if isinstance(solution, str) else solution(request))[len(so_far) :]

    engine = ScriptedEngine(rest, encode=tokens.encode, decode=tokens.decode, stop_id=0, log_prob=-0.25)
    recorded = SimpleNamespace(generate=lambda requests, sampling: calls.append(requests) or
                               engine.generate(requests, sampling))
    questions = {QUESTION: ("p-0", PROMPT), "other": ("p-1", PROMPT)}
    steps = EngineStepProposer(recorded, questions, SamplingParams(1.0, 1.0, limit), separator=separator,
                               decode=tokens.decode, answers=answers)
    return steps, engine, calls, tokens


def walked(steps: EngineStepProposer) -> tuple[StepPath, list[Step]]:
    """The path that ``count=1`` leads along until it ends, and its steps."""
    path, taken = StepPath(QUESTION), []
    while not taken or not taken[-1].finished:
        [[step]] = steps.propose([path], 1, [len(taken)])
        path = replace(path, steps=(*path.steps, step.text))
        taken.append(step)
    return path, taken


@given(text=st.text("ab\n", max_size=20), size=st.integers(1, 4), limit=st.integers(1, 25),
       separator=st.sampled_from(["\n", "\n\n", "ab"]))
def test_steps_put_together_are_the_response_that_is_sampled_at_once(text, size, limit, separator):
    steps, engine, _, _ = proposing(text, size, limit=limit, separator=separator)
    path, taken = walked(steps)
    [plain] = engine.generate([GenerationRequest("p-0", 0, PROMPT, 1)], SamplingParams(1.0, 1.0, limit))
    whole = steps.solution(path, True, seed=7)
    assert (whole.response_ids, whole.text, whole.finished) == (plain.response_ids, plain.text, plain.finished)
    assert [*whole.response_logprobs] == [-0.25] * len(plain.response_ids)
    assert (whole.problem_id, whole.prompt_ids, whole.seed) == ("p-0", PROMPT, 7)
    assert sum(step.tokens for step in taken) == len(plain.response_ids)
    said = [part for step in taken for part in split_steps(step.text, separator)]
    assert said == list(split_steps(plain.text, separator))
    assert all(step.text for step in taken[:-1]) and not any(step.finished for step in taken[:-1])


def test_a_solution_that_was_cut_without_a_token_is_at_its_end():
    """As by an endpoint whose limit counts other tokens."""
    steps, *_ = proposing("a")
    steps._engine = SimpleNamespace(generate=lambda requests, sampling: [
        Rollout(one.problem_id, 0, one.prompt_ids, (), (), "", False, 0, one.seed) for one in requests])
    [[step]] = steps.propose([StepPath(QUESTION)], 1, [0])
    assert (step.text, step.finished, step.tokens) == ("", True, 0)


def test_all_paths_of_a_call_are_sampled_in_one_call_of_the_engine():
    steps, _, calls, _ = proposing(lambda request: f"a{request.sample_index}\nb\nc")
    found = steps.propose([StepPath(QUESTION), StepPath("other")], 3, [5, 6])
    assert [[step.text for step in of_path] for of_path in found] == [["a0", "a1", "a2"]] * 2
    [asked] = calls
    assert [(r.problem_id, r.sample_index) for r in asked] == [(p, k) for p in ("p-0", "p-1") for k in range(3)]
    assert len({request.seed for request in asked}) == 6


def test_equal_steps_after_one_path_continue_from_the_first_ones_tokens():
    # "a\nb" and "a\nc" are one token each, and the same step
    steps, _, calls, tokens = proposing(lambda request: ["a\nb", "a\nc"][request.sample_index] + "x", size=3)
    [[one, other]] = steps.propose([StepPath(QUESTION)], 2, [1])
    assert one == other == Step("a", False, 1)
    steps.propose([StepPath(QUESTION, ("a",))], 1, [2])
    assert calls[1][0].prompt_ids == (*PROMPT, *tokens.encode("a\nb"))


def test_a_step_that_ends_the_solution_and_its_twin_that_does_not_are_two():
    steps, _, calls, tokens = proposing(lambda request: "a" if request.sample_index == 0 else "a\nb")
    [found] = steps.propose([StepPath(QUESTION)], 2, [1])
    assert found == [Step("a", True, 2), Step("a", False, 2)]
    path = StepPath(QUESTION, ("a",))
    assert steps.solution(path, True, 0).finished and not steps.solution(path, False, 0).finished
    [[after]] = steps.propose([path], 1, [2])
    assert after == Step("", True, 1)
    assert calls[1][0].prompt_ids == (*PROMPT, *tokens.encode("a\n"))


@pytest.mark.parametrize(("text", "options", "said"), [
    ("6 + 1 = 7\n#### 7\nand so on", {"answers": HASHES}, ["6 + 1 = 7", "#### 7"]),
    ("We add.\n\nSo \\boxed{7}.\n\nCheck it.", {"answers": answer_format("boxed"), "separator": "\n\n"},
     ["We add.", "So \\boxed{7}."]),
    *((f"x\n{line}\nmore", {"answers": HASHES}, ["x", line, "more"])  # states no answer
      for line in ("say #### 3", "####", "#### 3 or 4")),
])
def test_a_solution_ends_with_the_step_that_states_its_answer(text, options, said):
    steps, *_ = proposing(text, **options)
    path, taken = walked(steps)
    assert [step.text for step in taken] == said
    assert steps.solution(path, True, 0).finished
