"""The sizes of a decoder-only model, by the fields of its Hugging Face config: what its weights' shapes follow from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from nemo_edo.errors import UserError

SHAPE_FIELDS = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)

NAMES_IN_FILES = {"num_local_experts": "num_experts"}
"""Fields that transformers 5 writes under another name than version 4, which also reads it."""

FAMILIES = {
    "llama": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
    "qwen3_moe": (False, True),
}
"""Whether queries, keys and values have a bias; whether queries and keys have a separate norm."""

WITH_EXPERTS = ("qwen3_moe",)

BRIDGES = {
    "use_sliding_window": (False, False, tuple(FAMILIES)),
    "norm_topk_prob": (True, False, WITH_EXPERTS),
    "decoder_sparse_step": (1, 1, WITH_EXPERTS),
    "mlp_only_layers": ([], [], WITH_EXPERTS),
}
"""Fields that Megatron-Bridge 0.6 does not read: what it takes each for, what transformers takes it for where it is
absent, and the model types that have it."""

MEGATRONS_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Llama 3's scaling of rotary positions has in addition to its factor, in megatron-core as in the published
models."""


@dataclass(frozen=True)
class ModelShape:
    """A model of the families Llama, Qwen2, Qwen3 and Qwen3-MoE, with the names that Megatron-core has for sizes.

    All have RMS norms, gated MLPs, grouped queries and rotary positions, and no bias elsewhere. In a mixture of
    experts, experts replace every layer's MLP.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    """Size of an attention head."""
    vocab_size: int
    tied: bool
    """Whether the output layer's weights are the embedding's."""
    qkv_bias: bool
    qk_norm: bool
    num_moe_experts: int | None = None
    """Experts of a layer; None: layers have an MLP."""
    moe_router_topk: int = 0
    """Experts per token."""
    moe_ffn_hidden_size: int = 0
    """An expert's ``ffn_hidden_size``."""
    gated_linear_unit: ClassVar[bool] = True

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any], source: str) -> ModelShape:
        """The shape that the fields of a config.json give, or those of ``model.architecture``. source: where they come
        from, for errors.

        Raises UserError for another family and for a size that is missing.
        """
        fields = with_usual_names(fields)
        family = fields.get("model_type")
        if family not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise UserError(f"{source}: model_type is {family!r}; sizes are known for the model types {known}")
        experts = family in WITH_EXPERTS
        needed = ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"]
        needed += SHAPE_FIELDS[-3:] if experts else ["intermediate_size"]
        missing = [name for name in needed if fields.get(name) is None]
        if missing:
            raise UserError(f"{source} has no {', '.join(missing)}")
        heads = fields["num_attention_heads"]
        bias, norm = FAMILIES[family]
        # Absent fields mean what transformers' config classes take them for.
        return cls(
            num_layers=fields["num_hidden_layers"],
            hidden_size=fields["hidden_size"],
            ffn_hidden_size=fields.get("intermediate_size", 0),
            num_attention_heads=heads,
            num_query_groups=fields.get("num_key_value_heads") or heads,
            kv_channels=fields.get("head_dim") or (128 if family == "qwen3" else fields["hidden_size"] // heads),
            vocab_size=fields["vocab_size"],
            tied=bool(fields.get("tie_word_embeddings", False)),
            qkv_bias=bias,
            qk_norm=norm,
            num_moe_experts=fields["num_experts"] if experts else None,
            moe_router_topk=fields["num_experts_per_tok"] if experts else 0,
            moe_ffn_hidden_size=fields["moe_intermediate_size"] if experts else 0,
        )

    @property
    def query_width(self) -> int:
        """Size of all heads' queries together."""
        return self.num_attention_heads * self.kv_channels

    @property
    def key_width(self) -> int:
        """Size of all keys together, and of all values."""
        return self.num_query_groups * self.kv_channels

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def layer_matrices(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of a layer's matrices by Megatron's names: those that tensor parallelism splits, LoRA
        adapts and FP8 computes with. Experts' are not among them."""
        attention = {
            "linear_qkv": (self.query_width + 2 * self.key_width, self.hidden_size),
            "linear_proj": (self.hidden_size, self.query_width),
        }
        return attention if self.num_moe_experts else attention | self._mlp(self.ffn_hidden_size)

    @property
    def expert_matrices(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of the matrices of one expert."""
        return self._mlp(self.moe_ffn_hidden_size) if self.num_moe_experts else {}

    def _mlp(self, units: int) -> dict[str, tuple[int, int]]:
        return {"linear_fc1": (2 * units, self.hidden_size), "linear_fc2": (self.hidden_size, units)}

    @property
    def layer_experts(self) -> int:
        """Parameters of a layer's experts."""
        return (self.num_moe_experts or 0) * sum(outputs * inputs for outputs, inputs in self.expert_matrices.values())

    @property
    def layer_router(self) -> int:
        """Parameters of a layer's router, which every rank has."""
        return (self.num_moe_experts or 0) * self.hidden_size

    @property
    def layer_biases(self) -> int:
        """Parameters of a layer's biases, which tensor parallelism splits."""
        return self.query_width + 2 * self.key_width if self.qkv_bias else 0

    @property
    def layer_norms(self) -> int:
        """Parameters of a layer's norms, which every tensor-parallel rank has."""
        return 2 * self.hidden_size + (2 * self.kv_channels if self.qk_norm else 0)

    @property
    def parameters(self) -> int:
        """Parameters of the whole model; a tied output layer counts once."""
        matrices = sum(outputs * inputs for outputs, inputs in self.layer_matrices.values())
        rest = self.layer_biases + self.layer_norms + self.layer_router + self.layer_experts
        layers = self.num_layers * (matrices + rest)
        return layers + self.hidden_size + self.embedding_parameters * (1 if self.tied else 2)


def with_usual_names(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json of either transformers version, by the names of version 4."""
    return {NAMES_IN_FILES.get(name, name): value for name, value in fields.items()}


def check_expected(expected: Mapping[str, Any] | None, found: Mapping[str, Any], source: str) -> None:
    """Raises UserError where a config.json's fields ``found`` have other sizes than those of model.architecture."""
    found = with_usual_names(found)
    for name in SHAPE_FIELDS:
        if name in (expected or {}) and name in found and expected[name] != found[name]:
            raise UserError(
                f"{source} has {name} {found[name]}, but model.architecture.{name} is {expected[name]}: choose the "
                "model's own config (model=...), or model=hf, which expects no sizes"
            )


def check_convertible(fields: Mapping[str, Any], source: str) -> None:
    """Raises UserError for fields of the config.json ``source`` that Megatron-Bridge would silently take for
    something else: another model would be trained than the folder's."""
    for name, (bridges, default, model_types) in BRIDGES.items():
        value = fields.get(name, default)
        if fields.get("model_type") in model_types and (default if value is None else value) != bridges:
            raise UserError(
                f"{source}: {name} is {json.dumps(value)}; Megatron-Bridge knows models with {json.dumps(bridges)} only"
            )
    check_positions(fields, source)


def check_positions(fields: Mapping[str, Any], source: str) -> None:
    """Raises UserError for scaled rotary positions that Megatron would silently compute in another way.

    Megatron-Bridge 0.6 reads the factor of Llama 3's scaling; megatron-core 0.19 has fixed values for the rest. Other
    model types are left to Bridge. fields: of the config.json ``source``, as transformers 4 (``rope_scaling``) or 5
    (``rope_parameters``) writes it.
    """
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    kind, family = scaling.get("rope_type", scaling.get("type", "default")), fields.get("model_type")
    if kind == "default" or family not in FAMILIES:
        return
    if family != "llama" or kind != "llama3":
        raise UserError(
            f"{source}: rope_scaling of type {kind!r} would be lost for model_type {family!r}; "
            "to train with unscaled positions, remove it from the file"
        )
    for name, value in MEGATRONS_LLAMA3.items():
        if scaling.get(name, value) != value:
            raise UserError(f"{source}: rope_scaling.{name} is {scaling[name]}; Megatron knows {value} only")
