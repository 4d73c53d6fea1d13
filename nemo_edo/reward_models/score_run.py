"""Scores the stored responses of a run's evaluations with a process reward model: ``nemo-edo score``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_edo.config import ScoreConfig
from nemo_edo.data.batching import minibatches
from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import KINDS
from nemo_edo.reward_models.formats import RewardFolder, load_format, read_reward_folder, too_long
from nemo_edo.reward_models.process_reward import (
    ProcessRewardModel,
    encode_responses,
    require_fitting,
    scores_or_zeros,
)
from nemo_edo.rollouts.score_store import ScoreStore, check_score_name, rollouts_checksum
from nemo_edo.run.folder import taken
from nemo_edo.run.stored_run import StoredRun, open_run

if TYPE_CHECKING:
    from nemo_edo.reward_models.vllm_pooling import ServedRewardModel

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
    with taken([run]):
        return _score(stored, about, maker, name, arm, cfg)


def _score(stored: StoredRun, about: RewardFolder, maker: str, name: str, arm: str | None, cfg: ScoreConfig):
    form, questions = load_format(about), stored.questions("test")
    pending, lines = [], []
    for policy, kind in product(stored.evaluated([arm] if arm else []), KINDS):
        store = ScoreStore(stored.folder.scores(policy, name))
        responses = stored.evaluation_responses(policy, kind)
        label = {"rollouts": rollouts_checksum(responses), "made_by": maker}
        scores = store.scored(kind, **label)
        keys = [(one.rollout.problem_id, one.rollout.sample_index) for one in responses]
        missing = {key: one.rollout for key, one in zip(keys, responses, strict=True) if key not in scores}
        encoded = encode_responses(list(missing.values()), questions, form, separator=cfg.step_separator)
        if cfg.too_long != "zero":
            require_fitting(encoded, about.max_length, "responses")
        zeros = len(too_long(encoded, about.max_length))
        new = f"{len(missing)} new" if missing else "none new"
        new += f", {zeros} longer than the model's context with score 0" if zeros else ""
        lines.append(f"{store.folder}: scores of {len(responses)} {kind} responses ({new})")
        if missing:
            pending.append((store, kind, label, scores, list(zip(missing, encoded, strict=True))))
    if pending:
        with _scorer(about, cfg, stored.folder.path / "servers" / f"scores_{name}") as scorer:
            for store, kind, label, scores, missing_scores in pending:
                for part in minibatches(missing_scores, cfg.part_size):
                    found = scores_or_zeros(scorer, [parts for _, parts in part], about.max_length)
                    found = dict(zip((key for key, _ in part), found, strict=True))
                    store.write_part(kind, found, **label)
                    scores |= found
                store.write(kind, scores, **label)
    return lines


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
def _scorer(about: RewardFolder, cfg: ScoreConfig, work: Path) -> Iterator[ProcessRewardModel | ServedRewardModel]:
    """The model, in this process or on servers; servers that are started for it are stopped at the end."""
    if not cfg.serve and not cfg.servers.urls:
        yield ProcessRewardModel(about.path, device=cfg.device, dtype=cfg.dtype, batch_tokens=cfg.batch_tokens)
        return
    from nemo_edo.reward_models.vllm_pooling import serving

    with serving(about, cfg.servers, work) as served:
        yield served
