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

import asyncio
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import torch

from nemo_edo.config import ServersConfig
from nemo_edo.generation.dispatch import Dispatcher
from nemo_edo.generation.replica import Replica
from nemo_edo.generation.server_api import Launch, is_number, require_model
from nemo_edo.generation.servers import check_environment, managed_replicas, replicas_at_urls, server_python, start
from nemo_edo.generation.supervision import post
from nemo_edo.generation.vllm_server import VLLM
from nemo_edo.reward_models.formats import SKYWORK, Encoded, RewardFolder, load_format
from nemo_edo.reward_models.skywork import write_servable
from nemo_edo.utils.http import Fault, body_limit
from nemo_edo.utils.status_line import Counter

POOLING = "/pooling"
MODEL_NAME = "reward_model"
TOKENS, SEQUENCE = "token_classify", "classify"
"""vLLM's names of its tasks: one row per token, and one row per sequence."""


class VLLMPooling(VLLM):
    """A ServerAPI: vLLM with a pooling model."""

    takes_weights = False

    def model_name(self, model: Path) -> str:
        return MODEL_NAME

    def use_options(self, launch: Launch) -> dict[str, str]:
        return {"runner": "pooling"}

    def cpu_arguments(self, launch: Launch) -> list[str]:
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
        found = dict(zip(parts, asyncio.run(self._send_all(parts)), strict=True))
        return [tuple(score for part in path for score in found[part]) for path in encoded]

    async def _send_all(self, parts: Sequence[Encoded]) -> list[tuple[float, ...]]:
        scores: dict[int, tuple[float, ...]] = {}
        with Counter("score", len(parts)) as counter:

            def on_answer(place: int, answer: tuple[float, ...]) -> None:
                scores[place] = answer
                counter.add()

            async with Dispatcher(self._replicas, self._settings, self._restart) as servers:
                await servers.send_all([partial(self._send, part=part) for part in parts], on_answer)
        return [scores[place] for place in range(len(parts))]

    async def _send(self, replica: Replica, session: aiohttp.ClientSession, *, part: Encoded) -> tuple[float, ...]:
        body = {
            "model": replica.model_name,
            "input": [list(part.ids)],
            "task": self._task,
            "use_activation": False,
            "encoding_format": "float",
        }
        answer = await post(replica, session, POOLING, body, body_limit(len(part.ids)))
        require_model(answer, replica.model_name)
        return read_scores(answer, part, whole=self._task == SEQUENCE)

    def _restart(self, replica: Replica) -> None:
        if replica.is_managed:
            replica.restart()
        else:
            replica.wait_until_ready(self._settings.health_limit_s)


def read_scores(body: Any, part: Encoded, *, whole: bool) -> tuple[float, ...]:
    """The scores at the part's ends, from a pooling answer of logits. whole: the answer is one row for the sequence;
    otherwise one for each token, or (vLLM's step pooling) for each step's token. Raises Fault for anything else."""
    try:
        [answer] = body["data"]
        rows = answer["data"]
    except (KeyError, TypeError, ValueError) as error:
        raise Fault(f"{POOLING}: an answer without {error}") from error
    if whole:
        rows = [rows]
    if not isinstance(rows, list) or not all(_is_row(row) for row in rows):
        raise Fault(f"{POOLING}: an answer whose rows are not one or two finite numbers each")
    if len(rows) == len(part.ids) and not whole:
        rows = [rows[end] for end in part.ends]
    if len(rows) != len(part.ends):
        raise Fault(f"{POOLING}: {len(rows)} rows for {len(part.ids)} tokens with {len(part.ends)} steps")
    margins = (row[0] if len(row) == 1 else row[1] - row[0] for row in rows)
    return tuple(_sigmoid(margin) for margin in margins)


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


def build_reward_replicas(about: RewardFolder, settings: ServersConfig, work: Path, gpus: int) -> list[Replica]:
    """Replicas that serve the folder's model, at the settings' URLs or on this machine; not started. work: as for
    ``serving``."""
    if settings.urls:
        return replicas_at_urls(settings)
    model = about.path
    if about.own is None and about.architecture == SKYWORK:
        model = write_servable(about.path, work / "served")
    return managed_replicas(settings, VLLMPooling(), _launch(about, settings, work, bool(gpus)), model, gpus)


def _launch(about: RewardFolder, settings: ServersConfig, work: Path, on_gpus: bool) -> Launch:
    arguments = list(settings.arguments)
    if pooler := _pooler_config(about):
        arguments = ["--pooler-config", json.dumps(pooler), *arguments]
    return Launch(
        python=server_python(settings),
        host=settings.host,
        dtype=settings.dtype or ("bfloat16" if on_gpus else "float32"),
        max_length=None,
        logprobs_after_temperature=False,
        gpus=(),
        threads=max(1, len(os.sched_getaffinity(0)) // settings.replicas),
        cpu_cache_gb=settings.cpu_cache_gb,
        memory_share=settings.memory_share,
        max_in_flight=settings.max_in_flight,
        sleeps=False,
        nccl_library=None,
        adapter_rank=None,
        arguments=tuple(arguments),
        log=work,
    )


def _pooler_config(about: RewardFolder) -> dict[str, Any]:
    """Pooling options that vLLM does not take from the model's own files."""
    if about.own is None and about.architecture != SKYWORK:
        # vLLM assumes the id that <extra_0> has in Qwen's tokenizer; another tokenizer may have another.
        return {"tok_pooling_type": "STEP", "step_tag_id": load_format(about).step_id}
    if about.own is not None and not about.is_encoder:
        return {"task": TOKENS}  # the default of a sequence classifier is one row per sequence
    return {}


def _is_row(row: Any) -> bool:
    numbers = isinstance(row, list) and all(is_number(value) for value in row)
    return numbers and len(row) in (1, 2)


def _sigmoid(value: float) -> float:
    """Without overflow at either end."""
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
