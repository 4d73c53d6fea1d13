"""Scores the stored responses of a run's evaluations with a process reward model: ``nemo-edo score``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from nemo_edo.config import ScoreConfig
from nemo_edo.data.batching import minibatches
from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import KINDS
from nemo_edo.reward_models.formats import RewardFolder, load_format, read_reward_folder
from nemo_edo.reward_models.process_reward import EncodedResponses, ProcessRewardModel, StepRewards, encode_responses
from nemo_edo.rollouts.score_store import Key, ScoreStore, check_score_name, rollouts_checksum
from nemo_edo.run.stored_run import StoredRun, open_run
from nemo_edo.types import ScoredRollout

_HASHED_BYTES = 1 << 20
"""Bytes at each end of a weights file that identify a model."""


def score_run(run: Path, model: str, name: str, arm: str | None, tokenizer: Path | None, cfg: ScoreConfig) -> list[str]:
    """Scores the stored responses of the run's final evaluations, of every policy or one, and stores the scores in
    RUN/scores/ARM/NAME. Generates nothing, and keeps the scores of an earlier, killed command. Returns lines to print.

    model: a reward model's folder, or the URL of a vLLM server that serves one, whose config.json, tokenizer and (for
    our models) reward_model.json are in the folder ``tokenizer``. Raises UserError for invalid input before it loads
    a model.
    """
    check_score_name(name)
    about, maker, cfg = _model(model, tokenizer, cfg)
    stored = open_run(run)
    kept = [
        _PolicyScores(ScoreStore(stored.folder.scores(policy, name)), policy, kind, stored, maker)
        for policy in stored.evaluated([arm] if arm else [])
        for kind in KINDS
    ]
    unfinished = [one for one in kept if one.missing]
    if unfinished:
        work = stored.folder.path / "servers" / f"scores_{name}"
        encoded = _encoded(unfinished, about, stored.questions("test"), cfg)
        with _scorer(about, cfg, work) as scorer:
            for one, responses in zip(unfinished, encoded, strict=True):
                one.score(scorer, responses, cfg.part_size)
    return [one.summary for one in kept]


class _PolicyScores:
    """The stored scores of one policy's responses of one kind, and the responses without one."""

    def __init__(self, store: ScoreStore, policy: str, kind: str, stored: StoredRun, maker: str) -> None:
        self._store = store
        self._kind = kind
        responses = stored.evaluation_responses(policy, kind)
        self._label = {"rollouts": rollouts_checksum(responses), "made_by": maker}
        self.scores = store.scored(kind, **self._label)
        self.total = len(responses)
        self.missing = [response for response in responses if _key(response) not in self.scores]
        self._too_long = 0

    def score(self, scorer: StepRewards, encoded: EncodedResponses, part_size: int) -> None:
        """Scores the missing responses part by part, and writes all scores to one file."""
        self._too_long = len(encoded.too_long)
        number = len(list(self._store.folder.glob(f"{self._kind}.parts/part_*.parquet"))) if self.scores else 0
        for part in minibatches(range(len(self.missing)), part_size):
            scores = encoded.scored(scorer, part)
            found = {_key(self.missing[place]): one for place, one in zip(part, scores, strict=True)}
            self._store.write_part(self._kind, number, found, **self._label)
            self.scores |= found
            number += 1
        self._store.write(self._kind, self.scores, **self._label)

    @property
    def summary(self) -> str:
        new = f"{len(self.missing)} new" if self.missing else "none new"
        zero = f", {self._too_long} longer than the model's context with score 0" if self._too_long else ""
        return f"{self._store.folder}: scores of {self.total} {self._kind} responses ({new}{zero})"


def _encoded(
    kept: list[_PolicyScores], about: RewardFolder, questions: Mapping[str, str], cfg: ScoreConfig
) -> list[EncodedResponses]:
    """Encodes the missing responses; all are checked against the model's context before the model is loaded."""
    form = load_format(about)
    return [
        encode_responses(
            [response.rollout for response in one.missing],
            questions,
            form,
            separator=cfg.step_separator,
            max_length=about.max_length,
            zero_too_long=cfg.too_long == "zero",
        )
        for one in kept
    ]


def _model(model: str, tokenizer: Path | None, cfg: ScoreConfig) -> tuple[RewardFolder, str, ScoreConfig]:
    """The folder that describes the model, the label of its scores, and the config with its URL."""
    if not model.startswith(("http://", "https://")):
        if tokenizer is not None:
            raise UserError("--tokenizer is for a model at a URL: a folder has its own")
        if cfg.servers.urls:
            raise UserError("servers.urls is for a model at URLs: set --model to one of them, and --tokenizer")
        return read_reward_folder(Path(model)), made_by(Path(model)), cfg
    if tokenizer is None:
        raise UserError(f"--model {model}: name the folder of its config.json and tokenizer with --tokenizer")
    urls = list(dict.fromkeys([model, *cfg.servers.urls]))
    return read_reward_folder(tokenizer), model, replace(cfg, servers=replace(cfg.servers, urls=urls))


def made_by(folder: Path) -> str:
    """The folder, and a digest that identifies its present weights."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin"), folder / "config.json"]):
        size = path.stat().st_size
        with path.open("rb") as file:
            digest.update(f"{path.name} {size}\n".encode() + file.read(_HASHED_BYTES))
            file.seek(max(0, size - _HASHED_BYTES))
            digest.update(file.read())
    return f"{folder.resolve()} {digest.hexdigest()}"


@contextmanager
def _scorer(about: RewardFolder, cfg: ScoreConfig, work: Path) -> Iterator[StepRewards]:
    """The model, in this process or on servers; servers that are started for it are stopped at the end."""
    if not cfg.serve and not cfg.servers.urls:
        yield ProcessRewardModel(about.path, device=cfg.device, dtype=cfg.dtype, batch_tokens=cfg.batch_tokens)
        return
    from nemo_edo.reward_models.vllm_pooling import serving

    with serving(about, cfg.servers, work) as served:
        yield served


def _key(response: ScoredRollout) -> Key:
    return response.rollout.problem_id, response.rollout.sample_index
