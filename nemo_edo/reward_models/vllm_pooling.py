"""Step scores by a process reward model on vLLM servers (0.33), whose pooling API returns the head's logits.

=====================  ================================================  ==================================
model                  vLLM serves it as                                 task, and what its rows are of
=====================  ================================================  ==================================
Qwen2.5-Math-PRM       itself (Qwen2ForProcessRewardModel)               token_classify, the steps' tokens
Skywork-o1-Open-PRM    Qwen2ForRewardModel, of a converted folder        token_classify, every token
                       (``skywork``)
ours, a decoder        itself (LlamaForSequenceClassification and kin)   token_classify (not vLLM's default),
                                                                         every token
ours, an encoder       itself (ModernBertForSequenceClassification)      classify, the sequence
=====================  ================================================  ==================================
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from scipy.special import expit

from nemo_edo.config import ServersConfig
from nemo_edo.generation.dispatch import Dispatcher
from nemo_edo.generation.replica import Replica
from nemo_edo.generation.server_api import VLLM, require_model
from nemo_edo.generation.servers import check_environment, managed_replicas, replicas_at_urls, start
from nemo_edo.reward_models.formats import SKYWORK, Encoded, RewardFolder, load_format
from nemo_edo.reward_models.skywork import write_servable
from nemo_edo.utils.http import Fault
from nemo_edo.utils.status_line import Counter

POOLING = "/pooling"
MODEL_NAME = "reward_model"
TOKENS, SEQUENCE = "token_classify", "classify"
"""vLLM's names of its tasks: one row per token, and one row per sequence."""


class VLLMPooling(VLLM):
    """vLLM with a pooling model."""

    takes_weights: ClassVar[bool] = False

    def model_name(self, model: Path) -> str:
        return MODEL_NAME

    def use_options(self) -> dict[str, str]:
        return {"runner": "pooling"}

    def cpu_arguments(self) -> list[str]:
        return []


class ServedRewardModel:
    """A StepRewards whose network runs on servers. Paths are encoded here, as its folder says."""

    def __init__(self, about: RewardFolder, replicas: Sequence[Replica], settings: ServersConfig) -> None:
        """replicas: ready ones that serve the folder's model."""
        self.format = load_format(about)
        lengths = [about.max_length, *(replica.max_length for replica in replicas)]
        self.max_length = min((length for length in lengths if length is not None), default=None)
        self._replicas = replicas
        self._settings = settings
        self._task = SEQUENCE if about.is_encoder else TOKENS

    def score_encoded(self, encoded: Sequence[Sequence[Encoded]]) -> list[tuple[float, ...]]:
        """Equal sequences are sent once. Raises ServerError where a server refuses one, or no server is left."""
        parts = list(dict.fromkeys(part for path in encoded for part in path))
        model = self._replicas[0].model_name
        scores: dict[Encoded, tuple[float, ...]] = {}
        bodies = [
            {"model": model, "input": [list(part.ids)], "task": self._task, "use_activation": False,
             "encoding_format": "float"}
            for part in parts
        ]  # fmt: skip
        with Counter("score", len(parts)) as counter:

            def read(place: int, answer: Any) -> None:
                require_model(answer, model)
                scores[parts[place]] = read_scores(answer, parts[place], whole=self._task == SEQUENCE)
                counter.add()

            Dispatcher(self._replicas, self._settings).post_all(POOLING, bodies, read)
        return [tuple(score for part in path for score in scores[part]) for path in encoded]


def read_scores(body: Any, part: Encoded, *, whole: bool) -> tuple[float, ...]:
    """The scores at the part's ends, from a pooling answer of logits. whole: the answer is one row for the sequence;
    otherwise one for each token, or (vLLM's step pooling) for each step's token. Raises Fault for anything else."""
    try:
        [answer] = body["data"]
        rows = [answer["data"]] if whole else answer["data"]
        if len(rows) == len(part.ids) and not whole:
            rows = [rows[end] for end in part.ends]
        # Two numbers are the logits of the classes wrong and right, one is their difference.
        logits = [row if len(row) == 2 else (0.0, *row) for row in rows]
        scores = tuple(float(expit(right - wrong)) for wrong, right in logits)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise Fault(f"{POOLING}: an answer without rows of one or two numbers: {error!r}") from None
    if len(scores) != len(part.ends) or not all(map(math.isfinite, scores)):
        raise Fault(f"{POOLING}: {len(scores)} scores for {len(part.ids)} tokens with {len(part.ends)} steps")
    return scores


@contextmanager
def serving(about: RewardFolder, settings: ServersConfig, work: Path) -> Iterator[ServedRewardModel]:
    """The folder's model at the settings' URLs, or on servers that are started here and stopped afterwards.

    work: a folder for their logs, and for a converted copy of the weights where vLLM needs one. Raises UserError where
    servers cannot be started or reached, and ServerError, with none left running, where one does not become ready.
    """
    gpus = torch.cuda.device_count()
    check_environment(settings, VLLMPooling, gpus)
    replicas = build_reward_replicas(about, settings, work, gpus)
    start(replicas, needed_length=0)
    try:
        yield ServedRewardModel(about, replicas, settings)
    finally:
        for replica in replicas:
            replica.stop()


def build_reward_replicas(about: RewardFolder, settings: ServersConfig, work: Path, gpus: int) -> Sequence[Replica]:
    """Replicas that serve the folder's model, at the settings' URLs or on this machine; not started. work: as for
    ``serving``."""
    if settings.urls:
        return replicas_at_urls(settings)
    model = about.path
    if about.own is None and about.architecture == SKYWORK:
        model = write_servable(about.path, work / "served")
    return managed_replicas(_api(about, settings, work, bool(gpus)), model, gpus)


def _api(about: RewardFolder, settings: ServersConfig, work: Path, on_gpus: bool) -> VLLMPooling:
    pooler: dict[str, Any] = {}  # what vLLM does not take from the model's own files
    if about.own is None and about.architecture != SKYWORK:
        # vLLM assumes the id that <extra_0> has in Qwen's tokenizer; another tokenizer may have another.
        pooler = {"tok_pooling_type": "STEP", "step_tag_id": load_format(about).step_id}
    elif about.own is not None and not about.is_encoder:
        pooler = {"task": TOKENS}  # the default of a sequence classifier is one row per sequence
    arguments = ("--pooler-config", json.dumps(pooler)) if pooler else ()
    return VLLMPooling(settings, settings.dtype or ("bfloat16" if on_gpus else "float32"), work, arguments=arguments)
