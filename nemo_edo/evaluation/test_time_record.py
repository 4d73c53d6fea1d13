"""What ``nemo-edo evaluate --stored`` and ``nemo-edo search`` left in a run: more compute at test time, by problem."""

from __future__ import annotations

from dataclasses import replace

from nemo_edo.errors import UserError
from nemo_edo.evaluation.comparison import Evaluation
from nemo_edo.evaluation.run_record import RunRecord, load_evaluation

EVALUATION = "evaluation.json"
"""In a search's folder: the accuracy of each problem."""
SEARCH_ACCURACY = "search_accuracy"


def read_test_time(record: RunRecord) -> dict[str, Evaluation]:
    """``test_time/ARM.json`` by arm, of the arms that have one, with ``search_accuracy`` where ``search/ARM`` has one
    search; of several, none is taken for the arm's. Raises UserError naming a file that is malformed, or a search of
    other problems."""
    found = {}
    for arm in record.evaluations:
        path = record.folder / "test_time" / f"{arm}.json"
        searches = sorted((record.folder / "search" / arm).glob(f"*/{EVALUATION}"))
        evaluations = [load_evaluation(path)] if path.is_file() else []
        evaluations += [load_evaluation(searches[0])] if len(searches) == 1 else []
        if not evaluations:
            continue
        if len({evaluation.problems for evaluation in evaluations}) > 1:
            raise UserError(f"{searches[0]}: has other problems than {path}, or another order; search them again")
        metrics = {name: value for evaluation in evaluations for name, value in evaluation.metrics.items()}
        found[arm] = replace(evaluations[0], metrics=metrics)
    return found
