"""The reward models' networks, over transformers' own: features of positions, and a head that scores them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2Model,
    Qwen2PreTrainedModel,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from nemo_edo.errors import UserError
from nemo_edo.rewards.reward_formats import DECODER, ENCODER, QWEN, RewardFolder

_HEADS = ("score", "v_head", "classifier")
"""Where the networks keep their heads; an encoder's is the last."""


class Qwen2ForProcessRewardModel(Qwen2PreTrainedModel):
    """Weights' names as in Qwen2.5-Math-PRM's files: ``model.*``, ``score.0.*``, ``score.2.*``."""

    _keys_to_ignore_on_load_unexpected = [r"lm_head\."]

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.model = Qwen2Model(config)
        self.score = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))
        self.post_init()


class _ValueHead(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.summary = nn.Linear(width, 1)

    def forward(self, features: Tensor) -> Tensor:
        return self.summary(features)


class Qwen2ForPrmModel(Qwen2PreTrainedModel):
    """Weights' names as in Skywork-o1-Open-PRM's files: ``model.*``, ``v_head.summary.*``. The language model's output
    layer, which the files hold too, has no part in the scores."""

    _keys_to_ignore_on_load_unexpected = [r"lm_head\."]

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__(config)
        self.model = Qwen2Model(config)
        self.v_head = _ValueHead(config.hidden_size)
        self.post_init()


def load_network(folder: RewardFolder, dtype: torch.dtype) -> PreTrainedModel:
    """The folder's network in evaluation mode, a decoder's head in float32.

    Raises UserError unless the files hold every weight, and no strange one."""
    if folder.own is not None:
        kind: Any = AutoModelForSequenceClassification
    else:
        kind = Qwen2ForProcessRewardModel if folder.architecture == QWEN else Qwen2ForPrmModel
    try:
        # The folder's auto_map, where it has one, names code of its own: a class that is named here never runs it.
        network, loaded = kind.from_pretrained(
            folder.path, dtype=dtype, trust_remote_code=False, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:  # what transformers raises for missing, odd, damaged files
        raise UserError(f"the reward model of {folder.path} cannot be loaded: {error}") from error
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if loaded[what]:
            named = ", ".join(sorted(map(str, loaded[what]))[:5])
            raise UserError(f"{folder.path}: its weights are not those of a {type(network).__name__}: {what}: {named}")
    if not is_encoder(type(network)):  # an encoder's is part of its forward pass
        head_of(network).float()
    return network.eval()


def head_of(network: PreTrainedModel) -> nn.Module:
    """What turns features, [..., D], into logits, [..., 1 or 2]."""
    return next(getattr(network, name) for name in _HEADS if hasattr(network, name))


def features(network: PreTrainedModel, ids: Tensor, mask: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """[N, D] float32: what the head sees at the positions (rows[n], ends[n]) of ids [B, T].

    An encoder's head sees its sequence as a whole: there each row is read once, at its last token, and ``ends`` plays
    no part.
    """
    if is_encoder(type(network)):
        seen: list[Tensor] = []
        handle = network.classifier.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            network(input_ids=ids, attention_mask=mask)
        finally:
            handle.remove()
        return seen[0][rows].float()
    hidden = network.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    return hidden[rows, ends].float()


def margins(network: PreTrainedModel, features_ND: Tensor) -> Tensor:
    """[N] float32, the log-odds of right. The softmax over two classes is the sigmoid of their difference."""
    head = head_of(network)
    logits = head(features_ND.to(next(head.parameters()).dtype)).float()
    return logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]


# --- our own ------------------------------------------------------------------------------------------------------


def own_class(config: PretrainedConfig, where: str) -> type[PreTrainedModel]:
    """The class that a reward model with this config has. Raises UserError for a model type without one, and for one
    whose head is no single layer."""
    kind = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if kind is None:
        raise UserError(
            f"{where}: transformers has no sequence classification for model_type {config.model_type}; take a model "
            "that it has one for, such as modernbert, bert, llama or qwen2"
        )
    with torch.device("meta"):
        network = kind._from_config(config)
    head = head_of(network) if any(hasattr(network, name) for name in _HEADS) else None
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise UserError(f"{where}: the head of {kind.__name__} is no single linear layer; take another model_type")
    return kind


def is_encoder(kind: type) -> bool:
    """Whether a position sees what follows it."""
    return kind not in (Qwen2ForProcessRewardModel, Qwen2ForPrmModel) and not issubclass(
        kind, GenericForSequenceClassification
    )


def own_kind(kind: type) -> str:
    return ENCODER if is_encoder(kind) else DECODER


def own_config(source: PretrainedConfig, pad_id: int) -> PretrainedConfig:
    """A copy of the config with one score in place of classes, and a padding token: without one, transformers does not
    know where a row ends."""
    values = {**source.to_dict(), "num_labels": 1, "pad_token_id": pad_id}
    for name in ("architectures", "id2label", "label2id", "auto_map"):
        values.pop(name, None)
    return AutoConfig.for_model(values.pop("model_type"), **values)
