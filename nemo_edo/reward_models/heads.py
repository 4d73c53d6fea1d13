"""The reward models' networks, built on transformers: features at positions, and a head that scores them."""

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
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
from nemo_edo.reward_models.formats import QWEN, RewardFolder

_HEADS = ("score", "v_head", "classifier")  # attributes that hold the networks' heads; an encoder's is the last


class Qwen2ForProcessRewardModel(Qwen2PreTrainedModel):
    """Weights' names as in Qwen2.5-Math-PRM's files: ``model.*``, ``score.0.*``, ``score.2.*``."""

    # The scores do not use the language model's output layer, which the files contain, too.
    _keys_to_ignore_on_load_unexpected = [r"lm_head\."]

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__(config)
        self.model = Qwen2Model(config)
        self.add_head(config.hidden_size)
        self.post_init()

    def add_head(self, width: int) -> None:
        self.score = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))


class Qwen2ForPrmModel(Qwen2ForProcessRewardModel):
    """Weights' names as in Skywork-o1-Open-PRM's files: ``model.*``, ``v_head.summary.*``."""

    def add_head(self, width: int) -> None:
        self.v_head = nn.Sequential(OrderedDict(summary=nn.Linear(width, 1)))


def load_network(folder: RewardFolder, dtype: torch.dtype) -> PreTrainedModel:
    """The folder's network in evaluation mode, a decoder's head in float32. Raises UserError for other weights."""
    if folder.own is not None:
        kind: Any = AutoModelForSequenceClassification
    else:
        kind = Qwen2ForProcessRewardModel if folder.architecture == QWEN else Qwen2ForPrmModel
    try:
        # A folder's auto_map names code in the folder; loading by class never runs it.
        network, loaded = kind.from_pretrained(
            folder.path, dtype=dtype, trust_remote_code=False, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:  # what transformers raises for missing or damaged files
        raise UserError(f"the reward model of {folder.path} cannot be loaded: {error}") from error
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if loaded[what]:
            named = ", ".join(sorted(map(str, loaded[what]))[:5])
            raise UserError(f"{folder.path}: its weights are not those of a {type(network).__name__}: {what}: {named}")
    if not is_encoder(type(network)):  # an encoder's head is part of its forward pass
        head_of(network).float()
    return network.eval()


def head_of(network: PreTrainedModel) -> nn.Module | None:
    """The layer that maps features, [..., D], to logits, [..., 1 or 2]."""
    return next((getattr(network, name) for name in _HEADS if hasattr(network, name)), None)


def features(network: PreTrainedModel, ids: Tensor, mask: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """[N, D] float32: the head's input at the positions (rows[n], ends[n]) of ids [B, T]; mask [B, T], 1 for tokens. An
    encoder has one feature per sequence, so ``ends`` is not used."""
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
    """[N] float32, the log-odds that a step is right; for two classes, the difference of their logits."""
    head = head_of(network)
    logits = head(features_ND.to(next(head.parameters()).dtype)).float()
    return logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]


def own_class(config: PretrainedConfig, where: str) -> type[PreTrainedModel]:
    """The class of a reward model with this config. Raises UserError for a model type without one, and for one whose
    head is not a single linear layer."""
    kind: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if kind is None:
        raise UserError(
            f"{where}: transformers has no sequence classification for model_type {config.model_type}; use a "
            "model_type that has one, such as modernbert, bert, llama or qwen2"
        )
    with torch.device("meta"):
        head = head_of(kind._from_config(config))
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise UserError(f"{where}: the head of {kind.__name__} is not a single linear layer; use another model_type")
    return kind


def is_encoder(kind: type) -> bool:
    """Whether positions attend to later ones."""
    return not issubclass(kind, Qwen2ForProcessRewardModel | GenericForSequenceClassification)


def own_config(source: PretrainedConfig, pad_id: int) -> PretrainedConfig:
    """A copy of the config with one score, and a padding token, by which transformers finds the end of a row."""
    config = copy.deepcopy(source)
    config.num_labels, config.pad_token_id, config.architectures = 1, pad_id, None
    if hasattr(config, "auto_map"):
        del config.auto_map  # names code in the source's folder
    return config
