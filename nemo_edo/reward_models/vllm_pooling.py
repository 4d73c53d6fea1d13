"""Step scores by a process reward model on vLLM servers (0.33), whose pooling API returns the head's logits.

=====================  ================================================  ==================================
model                  vLLM serves it as                                 task, and what its rows are of
=====================  ================================================  ==================================
Qwen2.5-Math-PRM       itself (Qwen2ForProcessRewardModel)               token_classify, the steps' tokens
Skywork-o1-Open-PRM    Qwen2ForRewardModel, of a converted folder        token_classify, every token
                       (``write_servable``)
ours, a decoder        itself (LlamaForSequenceClassification and kin)   token_classify (not vLLM's default),
                                                                         every token
ours, an encoder       itself (ModernBertForSequenceClassification)      classify, the sequence
=====================  ================================================  ==================================
"""

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from scipy.special import expit
from torch import Tensor

from nemo_edo.config import ServersConfig
from nemo_edo.errors import UserError
from nemo_edo.generation.dispatch import Dispatcher
from nemo_edo.generation.replica import Replica
from nemo_edo.generation.server_api import VLLM, require_model
from nemo_edo.generation.servers import check_environment, managed_replicas, replicas_at_urls, start
from nemo_edo.reward_models.formats import SKYWORK, Encoded, RewardFolder, load_format
from nemo_edo.utils.http import Fault
from nemo_edo.utils.status_line import Counter

POOLING = "/pooling"
TOKENS, SEQUENCE = "token_classify", "classify"  # vLLM's tasks: a row per token, and per sequence
SERVED = "Qwen2ForRewardModel"  # vLLM's name for a head of two layers with one output
_HEAD = "v_head."
_WEIGHT, _BIAS = f"{_HEAD}summary.weight", f"{_HEAD}summary.bias"
_ADDED = "model-score.safetensors"


class VLLMPooling(VLLM):
    model_name: ClassVar[str] = "reward_model"
    takes_weights: ClassVar[bool] = False


class ServedRewardModel:
    """A process reward model whose network runs on servers. Paths are encoded here, as its folder says."""

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
    """The folder's model at the settings' URLs, or on servers that are started here and stopped afterwards. work: a
    folder for their logs, and for a converted copy of the weights where vLLM needs one. Raises UserError where servers
    cannot be started or reached, and ServerError, with none left running, where one does not become ready."""
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
    """Replicas, not started, of the folder's model: at the settings' URLs, or here. work: as for ``serving``."""
    if settings.urls:
        return replicas_at_urls(settings)
    model, pooler = about.path, {}  # the pooler: what vLLM does not take from the model's own files
    if about.own is None and about.architecture == SKYWORK:
        model = write_servable(about.path, work / "served")
    elif about.own is None:
        # vLLM assumes the id that <extra_0> has in Qwen's tokenizer; another tokenizer may have another.
        pooler = {"tok_pooling_type": "STEP", "step_tag_id": load_format(about).step_id}
    elif not about.is_encoder:
        pooler = {"task": TOKENS}  # the default of a sequence classifier is one row per sequence
    arguments = ("--pooler-config", json.dumps(pooler)) if pooler else ()
    dtype = settings.dtype or ("bfloat16" if gpus else "float32")
    return managed_replicas(VLLMPooling(settings, dtype, work, arguments=arguments), model, gpus)


def write_servable(folder: Path, out: Path) -> Path:
    """Writes a Skywork folder (of safetensors), in a form that vLLM serves with exactly the same scores, to ``out``,
    which it replaces; returns ``out``. Raises UserError for a folder without the head's weights.

    vLLM knows a reward model whose head is ``score.2(relu(score.0(h)))``, but not Skywork's, which is v h + b. Two rows
    of ``score.0`` are (v, b) and (-v, -b), the others zero, and ``score.2`` subtracts the second's output from the
    first's: relu(x) - relu(-x) = x. One of the two is zero, so that nothing is rounded.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    places: dict[str, str] = {}
    head: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            # The scores do not use the language model's output layer.
            tensors = {name: file.get_tensor(name) for name in file.keys() if not name.startswith("lm_head.")}
        head |= {name: tensors.pop(name) for name in list(tensors) if name.startswith(_HEAD)}
        if tensors:
            save_file(tensors, out / shard.name, metadata={"format": "pt"})
            places |= dict.fromkeys(tensors, shard.name)
    if set(head) != {_WEIGHT, _BIAS}:
        raise UserError(f"{folder}: its *.safetensors have {sorted(head)}, expected Skywork's {_WEIGHT} and {_BIAS}")
    weight, bias = head[_WEIGHT], head[_BIAS]  # v [1, D] and b [1]
    zeros = weight.new_zeros(weight.shape[1] - 2, weight.shape[1])
    scores = {
        "score.0.weight": torch.cat([weight, -weight, zeros]),
        "score.0.bias": torch.cat([bias, -bias, zeros[:, 0]]),
        "score.2.weight": torch.cat([weight.new_tensor([1, -1]), zeros[:, 0]])[None],
        "score.2.bias": weight.new_zeros(1),
    }
    save_file(scores, out / _ADDED, metadata={"format": "pt"})
    places |= dict.fromkeys(scores, _ADDED)
    index = {"metadata": {}, "weight_map": dict(sorted(places.items()))}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.pop("auto_map", None)  # names code in the folder, which is not copied
    config["architectures"] = [SERVED]
    for name, value in (("model.safetensors.index.json", index), ("config.json", config)):
        (out / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        if path.is_file() and path.suffix in (".json", ".txt", ".jinja", ".model") and not (out / path.name).exists():
            shutil.copy(path, out / path.name)  # the tokenizer's
    return out
