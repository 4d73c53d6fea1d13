"""Step scores of stored responses (``nemo-edo score``) and of a search's paths, by a process reward model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nemo_edo.config import MicroBatchConfig, ScoreConfig
from nemo_edo.data.batching import minibatches
from nemo_edo.data.shares import plan_micro_batches
from nemo_edo.errors import UserError
from nemo_edo.evaluation.results import KINDS
from nemo_edo.reward_models.formats import (
    Encoded,
    RewardFolder,
    RewardFormat,
    load_format,
    read_reward_folder,
    split_steps,
    too_long,
)
from nemo_edo.rollouts.store import ScoreStore, StepScores, check_score_name, rollouts_checksum
from nemo_edo.run.stored_run import open_run
from nemo_edo.run_folder import taken
from nemo_edo.test_time.search_llm import StepPath, StepScore
from nemo_edo.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from nemo_edo.reward_models.vllm_pooling import ServedRewardModel

_HASHED_BYTES = 1 << 20  # bytes at each end of a weights file that identify a model


class ProcessRewardModel:
    """Scores the steps of stored responses (``score_encoded``), and those of a search, as a StepScorer. Scores are
    probabilities that a step is right: sigmoids of log-odds. Paths are computed in order of length, equal ones once; a
    path's score depends on the others of a call only through the rounding of padded rows. The same call always gives
    the same numbers."""

    def __init__(
        self, folder: str | Path, *, device: str = "auto", dtype: str = "auto", batch_tokens: int = 16384
    ) -> None:
        """Checks the folder's format, including the tokenizer, before it loads the weights. Raises UserError as
        ``read_reward_folder``, ``load_format`` and ``load_network`` do, and for a device that does not exist."""
        from nemo_edo.reward_models.heads import load_network

        about = read_reward_folder(Path(folder))
        self.format = load_format(about)
        self.max_length = about.max_length
        on_gpu = torch.cuda.is_available()
        try:
            place = torch.device(("cuda" if on_gpu else "cpu") if device == "auto" else device)
            torch.empty(0, device=place)
        except (RuntimeError, AssertionError) as error:  # an unknown name, or CUDA without a GPU
            raise UserError(f"device is {device!r}, which this machine does not have ({error})") from error
        if dtype == "auto":
            dtype = "bfloat16" if place.type == "cuda" else "float32"
        self._network = load_network(about, getattr(torch, dtype)).to(place)
        self._tokens = batch_tokens

    def score_encoded(self, encoded: Sequence[Sequence[Encoded]]) -> list[tuple[float, ...]]:
        """The scores, in [0, 1], of each path's steps, in order."""
        parts = {part for parts in encoded for part in parts}
        scores = {part: torch.sigmoid(odds).tolist() for part, odds, _ in computed(self._network, parts, self._tokens)}
        return [tuple(score for part in parts for score in scores[part]) for parts in encoded]

    def score(self, paths: Sequence[StepPath]) -> list[StepScore]:
        """For each path, its last step's score and embedding: the input of the model's head there. For a path without
        steps, those at the end of the question. Raises UserError for a path that is longer than the model's context."""
        lasts = [self.format.encode(path)[-1] for path in paths]
        lasts = [Encoded(part.ids, part.ends[-1:]) for part in lasts]
        remedy = "a lower sampling.max_new_tokens, with another search.name"
        require_fitting([[part] for part in lasts], self.max_length, "paths of the search", remedy)
        found = {
            part: StepScore(float(torch.sigmoid(odds)), embedding[0].cpu())
            for part, odds, embedding in computed(self._network, set(lasts), self._tokens)
        }
        return [found[part] for part in lasts]


@torch.no_grad()
def computed(
    network: PreTrainedModel, parts: Iterable[Encoded], batch_tokens: int
) -> Iterator[tuple[Encoded, Tensor, Tensor]]:
    """Each sequence with its margins [steps] float64 and its embeddings [steps, D], the longest first, in batches of at
    most ``batch_tokens`` with padding, or of as many as the longest has."""
    from nemo_edo.reward_models.heads import features, margins

    longest_first = sorted(parts, key=lambda part: (-len(part.ids), part.ids, part.ends))
    lengths = [len(part.ids) for part in longest_first]
    how = MicroBatchConfig(len(lengths) or 1, max([batch_tokens, *lengths[:1]]))
    for places in plan_micro_batches(lengths, how, ranks=1)[0]:
        batch = [longest_first[place] for place in places]
        ids, mask = padded([part.ids for part in batch], network.config.pad_token_id or 0)  # any id: padding is masked
        rows = torch.tensor([row for row, part in enumerate(batch) for _ in part.ends])
        ends = torch.tensor([end for part in batch for end in part.ends])
        seen = features(network, *(tensor.to(network.device) for tensor in (ids, mask, rows, ends)))
        lengths = [len(part.ends) for part in batch]
        odds = margins(network, seen).double().cpu()
        yield from zip(batch, odds.split(lengths), seen.split(lengths), strict=True)


def encode_responses(
    rollouts: Sequence[Rollout], questions: Mapping[str, str], form: RewardFormat, *, separator: str | None
) -> list[list[Encoded]]:
    """Responses as a reward model's input. questions: problem id -> text. separator: of steps; None: the format's."""
    separator = separator or form.separator
    each_steps = (split_steps(r.text, separator, keep_blanks=form.keeps_blanks) for r in rollouts)
    # A response without steps has a single empty one, so that it has a score.
    return [
        form.encode(StepPath(questions[r.problem_id], steps or ("",)))
        for r, steps in zip(rollouts, each_steps, strict=True)
    ]


def scores_or_zeros(
    model: ProcessRewardModel | ServedRewardModel, encoded: Sequence[Sequence[Encoded]], limit: int | None
) -> list[StepScores]:
    """The scores of the steps of each response; zeros where it is longer than ``limit`` tokens."""
    long = set(too_long(encoded, limit))
    found = iter(model.score_encoded([parts for place, parts in enumerate(encoded) if place not in long]))
    return [
        StepScores((0.0,) * sum(len(part.ends) for part in parts) if place in long else next(found))
        for place, parts in enumerate(encoded)
    ]


def require_fitting(
    encoded: Sequence[Sequence[Encoded]],
    limit: int | None,
    what: str,
    remedy: str = "too_long=zero, which scores them 0",
) -> None:
    """Raises UserError where a path is longer than a context of ``limit`` tokens. remedy: besides another model."""
    places = too_long(encoded, limit)
    if places:
        longest = max(len(part.ids) for place in places for part in encoded[place])
        raise UserError(
            f"{len(places)} of {len(encoded)} {what} are longer than the reward model's context of {limit} tokens (the "
            f"longest has {longest}); use a model with a longer one, or {remedy}"
        )


def padded(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Token ids and mask, each [B, T] int64, padded on the right."""
    ids = [torch.tensor(row) for row in rows]
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    return pad_sequence(ids, batch_first=True, padding_value=pad_id), mask


# --- the stored responses of a run -------------------------------------------------------------------------------


def score_run(run: Path, model: str, name: str, arm: str | None, tokenizer: Path | None, cfg: ScoreConfig) -> list[str]:
    """Scores the stored responses of the run's final evaluations, of every policy or one, and stores the scores in
    RUN/scores/ARM/NAME. Generates nothing, and keeps the scores of an earlier, killed command. Returns lines to print.
    model: a reward model's folder, or the URL of a vLLM server that serves one, whose config.json, tokenizer and (for
    our models) reward_model.json are in the folder ``tokenizer``. Raises UserError for invalid input before it loads a
    model."""
    check_score_name(name)
    stored = open_run(run)
    about, maker, cfg = _model(model, tokenizer, cfg)
    with taken([run]):
        form, questions = load_format(about), stored.questions("test")
        if cfg.step_separator not in (None, form.separator):
            maker += f", steps between {cfg.step_separator!r}"
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
            if cfg.serve or cfg.servers.urls:
                from nemo_edo.reward_models.vllm_pooling import serving

                made = serving(about, cfg.servers, stored.folder.path / "servers" / f"scores_{name}")
            else:
                settings = {"device": cfg.device, "dtype": cfg.dtype, "batch_tokens": cfg.batch_tokens}
                made = nullcontext(ProcessRewardModel(about.path, **settings))
            with made as scorer:
                encoded = [parts for *_, todo in pending for _, parts in todo]
                if cfg.too_long != "zero":
                    require_fitting(encoded, scorer.max_length, "responses")
                elif zeros := len(too_long(encoded, scorer.max_length)) - len(too_long(encoded, about.max_length)):
                    lines.append(f"{zeros} more are longer than the server's context, {scorer.max_length}: score 0")
                for store, kind, label, scores, missing_scores in pending:
                    for part in minibatches(missing_scores, cfg.part_size):
                        found = scores_or_zeros(scorer, [parts for _, parts in part], scorer.max_length)
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
        if not Path(model).is_dir():
            raise UserError(f"--model {model}: no such folder; expected a reward model's, or a server's URL")
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
