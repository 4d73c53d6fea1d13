"""SearchLLM on the test problems of a run, with any of its policies: ``nemo-edo search``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nemo_edo.config import NONE, RunConfig, SearchConfig
from nemo_edo.config.compose import arm_configs, final_iteration
from nemo_edo.config.run import REPLICATE
from nemo_edo.data.answers import answer_format
from nemo_edo.data.batching import minibatches
from nemo_edo.errors import Partly, RunStopped, UserError
from nemo_edo.evaluation.results import START, Evaluation
from nemo_edo.interfaces import GenerationEngine
from nemo_edo.report.page import write_report
from nemo_edo.report.run_set import SEARCH_ACCURACY, SEARCH_EVALUATION, one_run
from nemo_edo.report.sample_browser import tree_record
from nemo_edo.reward_models.formats import RewardFolder, RewardFormat, load_format, read_reward_folder, too_long
from nemo_edo.reward_models.process_reward import ProcessRewardModel, made_by
from nemo_edo.rollouts.store import PartedTable
from nemo_edo.run import inputs, jobs
from nemo_edo.run.build import Builder
from nemo_edo.run.stop_signal import StopSignal
from nemo_edo.run.stored_run import StoredRun
from nemo_edo.run_folder import RunFolder, taken
from nemo_edo.search.step_proposer import EngineStepProposer
from nemo_edo.test_time.search_llm import SearchLLM, SearchResult, StepPath
from nemo_edo.types import ABSTAINED, Problem, SamplingParams
from nemo_edo.utils.files import file_name
from nemo_edo.worker.dispatch import workers
from nemo_edo.worker.worker import Worker

ALGORITHM = tuple(field.name for field in fields(SearchConfig))
MEASURED = ("finished", "tokens", "response_tokens", "score", "nodes", "samples", "iterations")
"""Fields of a record that are averaged over problems in addition to the accuracy."""


def search(opened: StoredRun, arm: str | None) -> list[str]:
    """Searches a run's test problems with the policy of an arm, and keeps the results in RUN/search/ARM/NAME, with
    those of an earlier, killed command. Returns what there is to print. Raises UserError for whatever would stop it
    later, before any weights are read."""
    cfg, folder = opened.cfg, opened.folder
    arms = list(arm_configs(cfg))
    own = [name for name in arms if name != REPLICATE]
    if arm is None and len(own) > 1:
        raise UserError(f"{folder.path} has the arms {', '.join(own)}: choose one with --arm")
    name = arm or (own[0] if own else START)
    if cfg.algorithm != NONE:
        folder.require_arm(name, [START, *arms])
    elif name != START:
        raise UserError(f"{folder.path} has no arm {name!r}: its model is evaluated as it is, as {START}")
    reward_model = _reward_model(cfg)
    with taken([folder.path]):
        return _search(cfg, folder, name, reward_model)


def search_model(cfg: RunConfig) -> list[str]:
    """Evaluates an untrained model as a separate run (``jobs.evaluate_model``), then searches its test problems."""
    reward_model = _reward_model(cfg)
    said, folder = jobs.evaluate_model(cfg), RunFolder(Path(cfg.output_dir) / cfg.name)
    with taken([folder.path]):
        return [*said, *_search(cfg, folder, START, reward_model)]


def _reward_model(cfg: RunConfig) -> tuple[RewardFolder, RewardFormat]:
    if cfg.generation.servers.chat:
        raise UserError("generation.servers.chat is true: a search continues responses, which chat endpoints do not")
    if cfg.search.reward_model is None:
        raise UserError("search.reward_model: give the folder of a process reward model")
    about = read_reward_folder(Path(cfg.search.reward_model))
    return about, load_format(about)


def _search(cfg: RunConfig, folder: RunFolder, arm: str, reward_model: tuple[RewardFolder, RewardFormat]) -> list[str]:
    workers().call(Worker.enter, cfg.threads)
    data = inputs.load_data(cfg, folder)
    cfg = inputs.with_seq_length(cfg, data)
    about, form = reward_model
    encoded = [form.encode(StepPath(problem.question)) for problem in data.test]
    # The solution is counted in the policy's tokens.
    if about.max_length is not None and too_long(encoded, about.max_length - cfg.sampling.max_new_tokens):
        longest = max(len(part.ids) for parts in encoded for part in parts)
        raise UserError(
            f"the reward model takes {about.max_length} tokens; the longest question has {longest} and a solution may "
            f"have sampling.max_new_tokens = {cfg.sampling.max_new_tokens} more: lower that, or take another reward "
            "model"
        )
    builder = Builder(cfg, folder, data)
    builder.check_servers()
    if cfg.algorithm != NONE:
        builder.check_refit()
    seed = cfg.seed if cfg.search.seed is None else cfg.search.seed
    separator = cfg.search.step_separator or form.separator
    asked = [(problem.id, problem.question, data.prompts[problem.id]) for problem in data.test]
    label = {  # what determines the results, except for rounding
        **{f"search.{name}": getattr(cfg.search, name) for name in (*ALGORITHM, "end_at_answer")},
        "search.step_separator": separator,
        "search.seed": seed,
        **{f"sampling.{name}": getattr(cfg.sampling, name) for name in ("temperature", "top_p", "max_new_tokens")},
        "reward model": made_by(about.path),
        **({"generation.servers.model": cfg.generation.servers.model} if cfg.generation.servers.model else {}),
        "set of test problems": hashlib.blake2b(repr(asked).encode(), digest_size=8).hexdigest(),
    }
    store = SearchStore(folder.searches(arm) / cfg.search.name, label)
    found = store.found()
    missing = [problem for problem in data.test if problem.id not in found]
    if missing:
        builder.start_servers()
        try:
            with StopSignal() as stop:
                engine = _engine(cfg, builder, arm)
                own, done = cfg.search, len(found)
                options = {"device": own.device, "dtype": own.dtype, "batch_tokens": own.batch_tokens}
                scorer = ProcessRewardModel(own.reward_model, **options)
                data.scorer.begin([], len(missing))
                for part in minibatches(missing, own.part_size):  # each is on disk before the next is begun
                    if stop.is_asked():
                        raise RunStopped(f"asked to stop: {done} of {len(data.test)} problems have been searched")
                    try:
                        results, records = _search_part(cfg, data, engine, scorer, part, separator, seed)
                    except Partly as partly:
                        kept = f"{done} of {len(data.test)} problems have been searched and are kept"
                        raise UserError(f"{partly}. {kept}") from partly
                    for problem, result in zip(part, results, strict=True):
                        if problem in data.test[: own.trees]:
                            tree = file_name(f"{arm}.{own.name}.{problem.id}")
                            folder.write_json(f"search/{tree}.json", tree_record(result))
                    store.write_part(records)  # after the trees: what has a record is not searched again
                    found |= {record.problem_id: record for record in records}
                    done += len(part)
                    print(f"searched {done} of {len(data.test)} problems", flush=True)
        finally:
            builder.close()
    return _conclude(cfg, folder, arm, store, [found[problem.id] for problem in data.test], seed)


def _engine(cfg: RunConfig, builder: Builder, arm: str) -> GenerationEngine:
    """The policy's engine: servers that have it already or get its weights, or this process."""
    if cfg.algorithm == NONE and builder.servers is not None:
        return builder.servers
    model = builder.model(cfg.sft) if cfg.algorithm == NONE else builder.trained(arm)
    builder.connect(model)
    model.weight_sync.push(final_iteration(cfg, arm))
    return model.engine


def _search_part(
    cfg: RunConfig, data: inputs.Data, engine: GenerationEngine, scorer: ProcessRewardModel,
    problems: Sequence[Problem], separator: str, seed: int,
) -> tuple[list[SearchResult], list[SearchRecord]]:  # fmt: skip
    settings, by_pattern = cfg.search, cfg.data.answer_format == "pattern"
    proposer = EngineStepProposer(
        engine,
        {problem.question: (problem.id, data.prompts[problem.id]) for problem in problems},
        SamplingParams(cfg.sampling.temperature, cfg.sampling.top_p, cfg.sampling.max_new_tokens),
        separator=separator,
        decode=data.decode,
        answers=answer_format(cfg.data.answer_format) if settings.end_at_answer and not by_pattern else None,
    )
    searching = SearchLLM(proposer, scorer, settings)
    results = searching.search([problem.question for problem in problems], seed)
    rollouts = [
        replace(proposer.solution(result.path, result.finished, seed), problem_id=problem.id)
        for problem, result in zip(problems, results, strict=True)
    ]
    records = [
        SearchRecord(
            problem_id=scored.rollout.problem_id,
            reward=float(scored.success),  # graded rewards are no accuracy
            answer=scored.answer,
            well_formed=scored.well_formed,
            reason=scored.reason,
            finished=scored.rollout.finished,
            ended=result.finished,
            score=result.nodes[result.best].reward,
            text=scored.rollout.text,
            response_tokens=len(scored.rollout.response_ids),
            tokens=result.tokens,
            nodes=len(result.nodes),
            samples=result.samples,
            iterations=result.iterations,
        )
        for result, scored in zip(results, data.scorer.score(rollouts, problems), strict=True)
    ]
    return results, records


def _conclude(
    cfg: RunConfig, folder: RunFolder, arm: str, store: SearchStore, records: Sequence[SearchRecord], seed: int
) -> list[str]:
    """Writes the results, their means and, for a run that is finished, its report. Problems on whose answers a judge
    abstained do not count in the accuracy."""
    store.write(records)
    ones = np.ones(len(records))
    with_verdict = np.array([float(not record.reason.startswith(ABSTAINED)) for record in records])
    metrics = {
        "accuracy": (with_verdict * [record.reward for record in records], with_verdict),
        **{name: (np.array([float(getattr(record, name)) for record in records]), ones) for name in MEASURED},
    }
    found = Evaluation(arm, tuple(record.problem_id for record in records), metrics)
    means = found.means(resamples=cfg.evaluation.bootstrap, seed=cfg.seed)
    name = store.folder.relative_to(folder.path)
    about = {"problems": len(records), "seed": seed, "settings": asdict(cfg.search)}
    folder.write_json(f"{name}/summary.json", {**about, "metrics": means})
    accuracy = {SEARCH_ACCURACY: found.metrics["accuracy"]}
    folder.write_json(store.folder / SEARCH_EVALUATION, replace(found, metrics=accuracy).record())
    lines = [f"{len(records)} problems searched, means with 95 % intervals over them:"]
    lines += [f"  {metric}: {one['mean']:.3f} [{one['low']:.3f}, {one['high']:.3f}]" for metric, one in means.items()]
    report = [f"report: {write_report(one_run(folder.path)).path}"] if folder.is_finished else []
    return [*lines, f"written: {store.folder}", *report]


# --- the results on disk ----------------------------------------------------------------------------------------------
#
# ``RUN/search/ARM/NAME/results.parquet`` has one row for each problem. While problems are searched, the finished parts
# are ``parts/part_00000.parquet`` and so on. Every file names its settings, so that a search with other settings is
# never mistaken for this one.

_LABEL = "nemo_edo.search"


@dataclass(frozen=True)
class SearchRecord:
    problem_id: str
    reward: float
    answer: str | None
    well_formed: bool
    reason: str
    finished: bool  # whether the solution ended by itself; otherwise it was cut off, or is only the best leaf
    ended: bool  # whether the search ended with it as a solution, cut off or not; False for the best leaf
    score: float  # the reward model's score of the solution's last step
    text: str
    response_tokens: int
    tokens: int
    nodes: int
    samples: int
    iterations: int


_TYPES = {"str": pa.string(), "str | None": pa.string(), "bool": pa.bool_(), "int": pa.int64(), "float": pa.float64()}
_SCHEMA = pa.schema([(field.name, _TYPES[field.type]) for field in fields(SearchRecord)])


class SearchStore:
    """The folder of one search. label: JSON values that say what it is made with."""

    def __init__(self, folder: str | Path, label: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self.table = PartedTable(self.folder / "results.parquet", self.folder / "parts", _SCHEMA, "remove it")
        self._label = dict(label)

    def found(self) -> dict[str, SearchRecord]:
        """What there is, by problem. Raises UserError where a file is damaged, or was made with something else."""
        records = {}
        for file in self.table.files():
            rows, metadata = self.table.read(file)
            try:
                found, there = [SearchRecord(**row) for row in rows], json.loads(metadata[_LABEL])
            except (KeyError, ValueError) as error:
                raise UserError(f"{file}: not the results of a search ({error!r}); remove it") from error
            different = sorted(key for key in there | self._label if there.get(key) != self._label.get(key))
            if different:
                key = different[0]
                raise UserError(
                    f"{file}: made with another {key}: {there.get(key)!r} there and {self._label.get(key)!r} here "
                    f"({', '.join(different)} differ); choose another search.name, or remove it"
                )
            records |= {record.problem_id: record for record in found}
        return records

    def write_part(self, records: Sequence[SearchRecord]) -> None:
        """Adds the records of some problems, in whole or not at all."""
        self.table.write_part([asdict(record) for record in records], {_LABEL: json.dumps(self._label)})

    def write(self, records: Sequence[SearchRecord]) -> Path:
        return self.table.write([asdict(record) for record in records], {_LABEL: json.dumps(self._label)})
