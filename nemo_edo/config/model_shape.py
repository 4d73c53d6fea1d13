"""The sizes of a decoder-only model, by the fields of its Hugging Face config: what its weights' shapes follow from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from nemo_edo.errors import UserError

SHAPE_FIELDS = (
    "model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "tie_word_embeddings", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
)  # fmt: skip
# Fields that families, or transformers 5, name in another way than Qwen3-MoE in transformers 4.
NAMES_IN_FILES = {"num_local_experts": "num_experts", "n_routed_experts": "num_experts"}
FAMILIES = {
    "llama": (False, False),
    "mistral": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
    "qwen3_moe": (False, True),
}
"""Whether queries, keys and values have a bias; whether queries and keys have a separate norm. The sizes of other
families are estimated as Llama's."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model by the names that Megatron-core has for them: exact for the families Llama, Mistral, Qwen2,
    Qwen3 and Qwen3-MoE, an estimate for others. All have RMS norms, gated MLPs, grouped queries and rotary positions,
    and no bias elsewhere. In a mixture of experts, experts replace every layer's MLP."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int  # the size of an attention head
    vocab_size: int
    tied: bool  # whether the output layer's weights are the embedding's
    qkv_bias: bool
    qk_norm: bool
    num_moe_experts: int | None = None  # of a layer; None: layers have an MLP
    moe_router_topk: int = 0  # experts per token
    moe_ffn_hidden_size: int = 0  # an expert's ffn_hidden_size
    gated_linear_unit: ClassVar[bool] = True

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any], source: str) -> ModelShape:
        """The shape that the fields of a config.json give, or those of ``model.architecture``. source: where they come
        from, for errors. Raises UserError for a size that is missing."""
        fields = {NAMES_IN_FILES.get(name, name): value for name, value in fields.items()}
        family = fields.get("model_type")
        experts = family == "qwen3_moe" or bool(fields.get("num_experts"))
        needed = ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"]
        needed += ["num_experts", "num_experts_per_tok"] if experts else ["intermediate_size"]
        missing = [name for name in needed if fields.get(name) is None]
        if missing:
            raise UserError(f"{source} has no {', '.join(missing)}")
        heads, width = fields["num_attention_heads"], fields.get("intermediate_size", 0)
        bias, norm = FAMILIES.get(family, (False, False))
        width_of_head = fields.get("head_dim") or (128 if family == "qwen3" else fields["hidden_size"] // heads)
        groups = fields.get("num_key_value_heads") or heads
        if fields.get("kv_lora_rank"):  # latent attention, whose cache here has each head's keys and values
            parts = [fields.get(f"{part}_head_dim") or 0 for part in ("qk_nope", "qk_rope", "v")]
            width_of_head, groups = sum(parts) // 2 or width_of_head, heads
        # Absent fields mean what transformers' config classes take them for.
        return cls(
            num_layers=fields["num_hidden_layers"],
            hidden_size=fields["hidden_size"],
            ffn_hidden_size=width,
            num_attention_heads=heads,
            num_query_groups=groups,
            kv_channels=width_of_head,
            vocab_size=fields["vocab_size"],
            tied=bool(fields.get("tie_word_embeddings", False)),
            qkv_bias=bias,
            qk_norm=norm,
            num_moe_experts=fields["num_experts"] if experts else None,
            moe_router_topk=fields["num_experts_per_tok"] if experts else 0,
            moe_ffn_hidden_size=(fields.get("moe_intermediate_size") or width) if experts else 0,
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
        return self._mlp(self.moe_ffn_hidden_size) if self.num_moe_experts else {}

    def _mlp(self, units: int) -> dict[str, tuple[int, int]]:
        return {"linear_fc1": (2 * units, self.hidden_size), "linear_fc2": (self.hidden_size, units)}

    @property
    def layer_experts(self) -> int:
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


def check_expected(expected: Mapping[str, Any] | None, found: Mapping[str, Any], source: str) -> None:
    """Raises UserError where a config.json's fields ``found`` have other sizes than those of model.architecture."""
    found = {NAMES_IN_FILES.get(name, name): value for name, value in found.items()}
    for name in SHAPE_FIELDS:
        if name in (expected or {}) and name in found and expected[name] != found[name]:
            raise UserError(
                f"{source} has {name} {found[name]}, but model.architecture.{name} is {expected[name]}: choose the "
                "model's own config (model=...), or model=hf, which expects no sizes"
            )
