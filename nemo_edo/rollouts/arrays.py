"""An arm's stored responses as arrays: what is computed from them without a model, read from Parquet by columns.

Dimensions: P problems in the order of the requests, N responses to each.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nemo_edo.errors import UserError
from nemo_edo.rollouts.score_store import Key, StepScores, tokens_checksum
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.types import ABSTAINED, RULES_AGREE, RULES_DISAGREE

_COLUMNS = (
    *("problem_id", "sample_index", "response_ids", "response_logprobs", "reward", "success_at", "finished"),
    *("answer", "well_formed", "reason"),
)


@dataclass(frozen=True)
class Samples:
    """P problems with N responses each, in the order of their sample_index."""

    problems: tuple[str, ...]
    rewards: np.ndarray
    """[P, N] float64."""
    successes: np.ndarray
    """[P, N] bool, the responses that count as right (``ScoredRollout.success``)."""
    has_verdict: np.ndarray
    """[P, N] bool, False where the verifier abstained: such a response's reward says nothing."""
    rules: np.ndarray
    """[P, N] int8: 1 or 0 what the rules say where a judge's verdict was compared with theirs; -1 elsewhere."""
    answers: np.ndarray
    """[P, N] objects, the answers in canonical form; None: there is none."""
    well_formed: np.ndarray
    """[P, N] bool."""
    lengths: np.ndarray
    """[P, N] int64, sampled tokens, the stop token included."""
    logprobs: np.ndarray
    """[P, N] float64, the sum of a response's log-probabilities under the sampler; NaN where it told none."""
    tokens: np.ndarray
    """int32, all responses' tokens end to end, problem by problem."""
    checksum: str
    """What scores of these responses name them by (``score_store.rollouts_checksum``)."""

    def responses(self, problem: int) -> list[np.ndarray]:
        """The token ids of the problem's N responses."""
        ends = np.cumsum(self.lengths.ravel())
        n = self.lengths.shape[1]
        first = 0 if problem == 0 else int(ends[problem * n - 1])
        within = ends[problem * n : (problem + 1) * n] - first
        return np.split(self.tokens[first : first + within[-1]], within[:-1])

    def steps(self, scores: dict[Key, StepScores]) -> list[list[tuple[float, ...]]]:
        """The scores of the steps of each problem's responses. Raises UserError where a response has none."""
        try:
            return [
                [scores[problem, sample].steps for sample in range(self.rewards.shape[1])] for problem in self.problems
            ]
        except KeyError as error:
            problem, sample = error.args[0]
            raise UserError(f"response {sample} to {problem} has no score; score the run again") from None


def read_samples(store: RolloutStore, iteration: int) -> Samples:
    """The responses of one evaluation. Raises UserError as ``RolloutStore.read`` does, and unless every problem has the
    same number of responses, each once."""
    table = store.read_table(iteration, _COLUMNS)
    ids = table["problem_id"].to_pylist()
    problems = tuple(dict.fromkeys(ids))
    if not problems:
        raise UserError(f"{store.folder}: iteration {iteration} has no responses")
    each = len(ids) // len(problems)
    order = _order_by_sample(ids, table["sample_index"].to_numpy(), problems, each)
    if order is None:
        raise UserError(
            f"{store.folder}: iteration {iteration} has {len(ids)} responses to {len(problems)} problems, expected "
            "samples 0 to N - 1 of each; evaluate the run again"
        )
    table = table.take(pa.array(order))
    shape = (len(problems), each)
    tokens, lengths = _lists(table["response_ids"])
    logprobs, of_logprobs = _lists(table["response_logprobs"])
    if not of_logprobs.any():  # of an endpoint that returns text alone
        logprobs = np.full(lengths.sum(), np.nan, np.float32)
    elif not np.array_equal(lengths, of_logprobs):
        raise UserError(f"{store.folder}: iteration {iteration} has responses without a log-probability of each token")
    ends = np.cumsum(lengths)
    summed = np.concatenate([[0.0], np.cumsum(logprobs, dtype=np.float64)])
    parts = np.split(tokens, ends[:-1])
    return Samples(
        problems=problems,
        rewards=table["reward"].to_numpy().reshape(shape),
        successes=pc.and_(table["finished"], pc.greater_equal(table["reward"], table["success_at"]))
        .to_numpy()
        .reshape(shape),
        rules=_rules(table).reshape(shape),
        has_verdict=~pc.starts_with(table["reason"], ABSTAINED).to_numpy().reshape(shape),
        answers=np.array([*table["answer"].to_pylist(), None], dtype=object)[:-1].reshape(shape),
        well_formed=table["well_formed"].to_numpy().reshape(shape),
        lengths=lengths.reshape(shape),
        logprobs=(summed[ends] - summed[ends - lengths]).reshape(shape),
        tokens=tokens,
        checksum=tokens_checksum(
            (problem, index, part)
            for (problem, index), part in zip(itertools.product(problems, range(each)), parts, strict=True)
        ),
    )


def _order_by_sample(ids: list[str], samples: np.ndarray, problems: tuple[str, ...], each: int) -> np.ndarray | None:
    """The indices that sort responses by problem and then by sample; None unless each problem has samples 0 to
    ``each`` - 1, once each."""
    place = {problem: index for index, problem in enumerate(problems)}
    where = np.array([place[problem] for problem in ids])
    order = np.lexsort((samples, where))
    expected = np.arange(len(ids))
    complete = np.array_equal(where[order], expected // each) and np.array_equal(samples[order], expected % each)
    return order if complete else None


def _rules(table: pa.Table) -> np.ndarray:
    """[responses] int8, what the rules said of each by the end of its reason."""
    judge = table["reward"].to_numpy() == 1
    agree, disagree = (pc.ends_with(table["reason"], end).to_numpy() for end in (RULES_AGREE, RULES_DISAGREE))
    return np.where(agree, judge, np.where(disagree, ~judge, -1)).astype(np.int8)


def _lists(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """All values end to end, and the length of each list."""
    lists = column.combine_chunks()
    return lists.flatten().to_numpy(zero_copy_only=False), pc.list_value_length(lists).to_numpy().astype(np.int64)
