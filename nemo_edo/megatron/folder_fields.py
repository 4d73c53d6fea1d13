"""Whether Megatron-Bridge computes what the fields of a config.json tell ``transformers`` to compute.

A field may have the value that transformers takes where it is absent. Any other value has to change Bridge's provider,
that is Megatron's config of the model: a field without an effect on it is lost in the conversion and refused by name.
"""

import contextlib
import copy
import dataclasses
import json
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from nemo_edo.errors import UserError

HARMLESS = frozenset(
    # What describes the file, generation or training, and not what the model computes of a sequence.
    "_name_or_path architectures model_type transformers_version torch_dtype dtype use_cache cache_implementation "
    "_model_name_or_path "  # of a GGUF file
    "initializer_range initializer_factor pad_token_id bos_token_id eos_token_id sep_token_id decoder_start_token_id "
    "forced_bos_token_id forced_eos_token_id id2label label2id problem_type task_specific_params "
    "output_attentions output_hidden_states gradient_checkpointing is_decoder chunk_size_feed_forward finetuning_task "
    "max_position_embeddings "  # rotary positions have no end; what a scaling makes of it is in rope_parameters
    "is_encoder_decoder attn_implementation _attn_implementation _attn_implementation_autoset experts_implementation "
    # A router's losses are not added (bridge.py), and dropout is 0 in training, as in generation.
    "router_aux_loss_coef aux_loss_alpha output_router_logits seq_aux router_jitter_noise "
    "attention_dropout hidden_dropout resid_pdrop resid_dropout embd_pdrop embd_dropout attn_pdrop classifier_dropout "
    # What other tools leave in the file, and llama's two fields that transformers has dropped.
    "initial_context_length experts_per_token unsloth_version unsloth_fixed is_llama_config transformers.js_config "
    "pretraining_tp torchscript".split()
)
ROPE = frozenset(("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rope_local_base_freq"))

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What megatron-core 0.19 has in addition to the factor of Llama 3's scaling, which alone Bridge reads."""

UNDECLARED: dict[str, Callable[[PretrainedConfig], Any]] = {
    "head_dim": lambda config: config.hidden_size // config.num_attention_heads,
    "is_causal": lambda config: True,
    "hidden_act": lambda config: getattr(config, "hidden_activation", None),
    "hidden_activation": lambda config: getattr(config, "hidden_act", None),  # Gemma 1.1 has both
    "sliding_window_size": lambda config: getattr(config, "sliding_window", None),
    "swiglu_limit": lambda config: 7.0 if config.model_type == "gpt_oss" else None,
}
"""What transformers' models take for fields that they, or published files, have and their config's class has not."""
UNREAD: dict[str, Callable[[PretrainedConfig], Any]] = {
    "first_k_dense_replace": lambda config: (getattr(config, "mlp_layer_types", None) or []).count("dense"),
    "topk_method": lambda config: "noaux_tc",
    "scoring_func": lambda config: "softmax" if config.model_type == "deepseek_v2" else "sigmoid",
    "moe_layer_freq": lambda config: 1,
    "ep_size": lambda config: 1,
}
"""Fields of published files that transformers' models do not read, with the only value that is right."""
FURTHER = "num_nextn_predict_layers"  # which some published folders have and transformers leaves out
NOT_TRAINED = dict.fromkeys(
    (FURTHER, "mtp_num_hidden_layers", "mtp_num_layers"),
    "layers that predict further tokens are not trained; remove them from the folder",
)
STEERING = frozenset(("max_window_layers", "sliding_window_pattern", "_sliding_window_pattern"))
"""What config classes make other fields of, and models do not read."""
ABOVE_0 = (  # Megatron takes 0 of some of them for none
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "moe_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts"),
    *("n_group", "topk_group", "routed_scaling_factor", "query_pre_attn_scalar", "final_logit_softcapping"),
    "attn_logit_softcapping",
)
MADE_ERRORS = (  # of transformers, Bridge and megatron-core for a config that they do not take
    *(StrictDataclassError, KeyError, ValueError, TypeError, AttributeError, AssertionError, NotImplementedError),
    *(ArithmeticError, ImportError),
)

IMPLIED = {"gemma3_text": "linear", "exaone_moe": "llama3"}
"""The scaling of positions that Bridge computes where there is a factor, without having read its type."""

Provider = Callable[[PretrainedConfig], Any]


def load_config(fields: Mapping[str, Any], source: str) -> PretrainedConfig:
    """transformers' config of the fields of the config.json ``source``. Raises UserError for what it does not take."""
    if fields.get("auto_map"):
        raise UserError(f"{source}: auto_map names code of the model's own, which is not run; remove it")
    if fields.get("model_type") not in CONFIG_MAPPING:
        raise UserError(f"{source}: model_type is {fields.get('model_type')!r}, which transformers does not have")
    for name in ABOVE_0:
        if (value := fields.get(name)) is not None and not (isinstance(value, int | float) and value > 0):
            raise UserError(f"{source}: {name} is {value!r}, expected a number above 0")
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(fields.get(name), dict | None):
            raise UserError(f"{source}: {name} is {_short(fields[name])}, expected an object")
    try:
        config = _config(fields)
    except MADE_ERRORS as error:
        raise not_taken(source, "transformers", error) from error
    heads = getattr(config, "num_attention_heads", None)
    if heads is None or config.get_text_config() is not config:
        raise UserError(
            f"{source}: model_type {config.model_type} is a model of text and images: export its model of text alone "
            f"({config.get_text_config().model_type})"
        )
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model is None or fields.get("architectures") != [model.__name__]:
        built = "no causal language model" if model is None else model.__name__
        raise UserError(
            f"{source}: architectures is {fields.get('architectures')}, and transformers builds {built} for model_type "
            f"{config.model_type!r}; correct the one that is wrong"
        )
    if heads % (groups := getattr(config, "num_key_value_heads", None) or heads):
        raise UserError(f"{source}: num_attention_heads is {heads}, no multiple of num_key_value_heads, {groups}")
    if (getattr(config, "head_dim", None) or 0) % 2:
        raise UserError(f"{source}: head_dim is {config.head_dim}, an odd number: rotary positions turn pairs")
    return config


def check_fields(fields: Mapping[str, Any], config: PretrainedConfig, provider: Provider, source: str) -> Any:
    """Bridge's provider of the config. Raises UserError where transformers would compute something else than it.
    config: ``load_config`` of the fields. provider: Bridge's, made from a config."""
    # The names that the config's class declares: it also takes any other, and keeps it.
    declared = {field.name for field in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()
    declared |= set(type(config)().to_dict()) | set(config.attribute_map)
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with _quiet():
        try:
            compare = _Comparison(config, provider)
        except MADE_ERRORS as error:
            raise not_taken(source, "Megatron-Bridge", error) from error
        _check_experts(config, compare.usual, source)
        _check_windows(config, compare.usual, source)
        if getattr(compare.usual, "q_lora_rank", 0) is None and compare.usual.qk_layernorm:
            raise UserError(
                f"{source}: q_lora_rank is null, and megatron-core gives such queries a norm that the model has not"
            )
        for name in sorted(fields.keys() - HARMLESS - ROPE):
            value, known = fields[name], name in declared or name in UNDECLARED or name in STEERING
            if not known and value in (None, False, [], {}):
                continue  # transformers does not read it, and what it would turn on is off
            if name == FURTHER and model._keys_to_ignore_on_load_unexpected and isinstance(value, int):
                continue  # folder_weights.py finds their tensors
            taken = UNDECLARED.get(name) or UNREAD.get(name)
            if name not in declared and taken is not None and value in (None, taken(config)):
                continue
            if compare.usual.window_size is None and (
                (name == "layer_types" and {*(value or ())} == {"full_attention"})
                or (name == "sliding_window" and value is None)
            ):
                continue  # no windows in either, whatever the family's default
            if not known or (name in NOT_TRAINED and value):
                why = NOT_TRAINED.get(name, f"{type(config).__name__} has no such field; correct its name or remove it")
                raise UserError(f"{source}: {name} is {_short(value)}: {why}")
            # With transformers' default in its place, and in what the config's class makes of the field as well.
            alone = copy.deepcopy(config)
            setattr(alone, name, getattr(type(config)(), name, None))
            without = _attempt({key: value for key, value in fields.items() if key != name}) or alone
            steers = name if name in STEERING else None
            if compare.is_lost(without, steers) or (
                steers is None and compare.differs(without) and compare.is_lost(alone)
            ):
                raise UserError(
                    f"{source}: {name} is {_short(value)}, which would be lost: Megatron-Bridge does not read it for "
                    f"model_type {config.model_type!r}"
                )
        _check_positions(fields, config, compare, source)
    return compare.usual


def _check_experts(config: PretrainedConfig, provider: Any, source: str) -> None:
    """Raises UserError where a token has experts that there are not, or gates that megatron-core does not compute."""
    experts, chosen = provider.num_moe_experts, provider.moe_router_topk
    if experts and not 1 <= (chosen or 0) <= experts:
        raise UserError(f"{source}: num_experts_per_tok is {chosen}, of {experts} experts")
    if experts and chosen == 1 and getattr(config, "norm_topk_prob", True):
        raise UserError(
            f"{source}: num_experts_per_tok is 1, and norm_topk_prob makes the gate of one expert 1, which "
            "megatron-core does not compute"
        )
    of_group = 1 if config.model_type == "deepseek_v2" else 2  # experts whose scores are a group's
    if (provider.moe_router_num_groups or 1) > 1 and chosen // (provider.moe_router_group_topk or 1) != of_group:
        raise UserError(
            f"{source}: num_experts_per_tok is {chosen} and topk_group {provider.moe_router_group_topk}: megatron-core "
            f"scores a group by their ratio, transformers by its best {of_group}"
        )


def _check_windows(config: PretrainedConfig, provider: Any, source: str) -> None:
    """Raises UserError for default windows that Bridge does not read, and for EXAONE's layers without positions."""
    types, window = set(getattr(config, "layer_types", None) or ()), getattr(config, "sliding_window", None)
    if window is None:
        return
    if "sliding_attention" in types and provider.window_size is None and window < config.max_position_embeddings:
        raise UserError(
            f"{source}: sliding_window is {window}, which would be lost: Megatron-Bridge does not read it for "
            f"model_type {config.model_type!r}; only a model of at most so many positions (max_position_embeddings, "
            f"which is {config.max_position_embeddings}) is the same without it"
        )
    if config.model_type.startswith("exaone") and "full_attention" in types and not provider.no_rope_freq:
        raise UserError(
            f"{source}: layer_types has full_attention, which has no rotary positions where there is a sliding_window: "
            f"Megatron-Bridge does not know it for model_type {config.model_type!r}"
        )


class _Comparison:
    """Compares what transformers and Bridge make of a config with what they make of other configs."""

    def __init__(self, config: PretrainedConfig, provider: Provider) -> None:
        self.config, self.provider = config, provider
        self.usual, again = provider(config), provider(config)
        names = [field.name for field in dataclasses.fields(self.usual)]
        # Layer specs and the like are made anew each time.
        self.names = [name for name in names if getattr(self.usual, name) == getattr(again, name)]

    def differs(self, other: PretrainedConfig, but: str | None = None) -> bool:
        """Whether transformers computes something else of the other config."""
        ours, others = (
            {name: value for name, value in config.to_dict().items() if name not in HARMLESS and name != but}
            for config in (self.config, other)
        )
        return ours != others

    def is_lost(self, other: PretrainedConfig, but: str | None = None) -> bool:
        """Whether the other config differs to transformers, and not to Bridge. but: a field that is not compared."""
        if not self.differs(other, but):
            return False
        try:
            changed = self.provider(other)
        except MADE_ERRORS:  # it misses the field
            return False
        return all(getattr(self.usual, name) == getattr(changed, name) for name in self.names)


def _check_positions(fields: Mapping[str, Any], config: PretrainedConfig, compare: _Comparison, source: str) -> None:
    """Raises UserError for rotary positions that are stated twice, differently, or that Megatron computes otherwise."""
    found = getattr(config, "rope_parameters", None) or {}
    stated = dict(fields.get("rope_scaling") or {}) | {
        name: fields[name] for name in ("rope_theta", "partial_rotary_factor") if fields.get(name) is not None
    }
    stated.setdefault("rope_type", stated.pop("type", None))
    for name, value in [*stated.items(), *(fields.get("rope_parameters") or {}).items()]:
        taken = [place[name] for place in _places(found) if name in place]
        if value is not None and taken and value not in taken:
            raise UserError(
                f"{source} states {name} twice: {_short(value)} and {_short(taken[0])}, in rope_theta, rope_scaling or "
                "rope_parameters; remove the wrong one"
            )
    _check_kinds(config, compare.usual, source)
    usual = _places(getattr(type(config)(), "rope_parameters", None) or {})
    for number, place in enumerate(_places(found)):
        kind, stock = place.get("rope_type", "default"), usual[number] if number < len(usual) else {}
        stock = {"rope_type": "default", "partial_rotary_factor": 1.0, **stock}
        for name, value in sorted(place.items(), key=lambda item: item[0] != "rope_type"):
            if value is None or value == stock.get(name) or (name == "type" and value == kind):
                continue
            if name == "rope_type" and value == IMPLIED.get(config.model_type):
                continue
            with_llama3 = kind == "llama3" and config.model_type in ("llama", "exaone4", "exaone_moe")
            fixed = LLAMA3.get(name) if with_llama3 else None
            if fixed is not None:
                if value != fixed:
                    raise UserError(f"{source}: {name} of rope_type 'llama3' is {value}; Megatron knows {fixed} only")
                continue
            other = copy.deepcopy(config)
            another = not value if isinstance(value, bool) else 2 * value if isinstance(value, (int, float)) else None
            others = "default" if value != "default" else stock["rope_type"]
            changed = {"rope_type": others, "type": others} if name == "rope_type" else {name: another}
            _places(other.rope_parameters)[number].update(changed)
            if compare.is_lost(other):
                raise UserError(
                    f"{source}: {name} {_short(value)} of the rotary positions (rope_parameters or rope_scaling) would "
                    f"be lost: Megatron-Bridge does not read it for model_type {config.model_type!r}"
                )


def _check_kinds(config: PretrainedConfig, provider: Any, source: str) -> None:
    """Raises UserError for a scaling of positions that is not the one that Megatron computes for the model's type."""
    places = _places(getattr(config, "rope_parameters", None) or {})
    for place in places:
        for name, value in place.items():
            text = isinstance(value, str) and name not in ("rope_type", "type")
            if text or (name in ("factor", "rope_theta") and value is not None and not value > 0):
                raise UserError(f"{source}: {name} of the rotary positions is {value!r}, expected a number above 0")
        if place.get("factor", 1.0) is None:
            raise UserError(f"{source}: factor of the rotary positions is null, expected the scaling's factor")
    kinds = {str(place.get("rope_type", "default")) for place in places}
    latent = getattr(provider, "multi_latent_attention", False)
    yarn = getattr(provider, "position_embedding_type", None) == "yarn"
    if yarn != ("yarn" in kinds) and not latent:
        raise UserError(
            f"{source}: rope_type is {_short(sorted(kinds))}; for model_type {config.model_type!r}, Megatron-Bridge "
            f"computes {'yarn' if yarn else 'no yarn'}"
        )
    if yarn and not latent and provider.rotary_percent < 1:
        part = f"partial_rotary_factor is {provider.rotary_percent}"
        raise UserError(f"{source}: rope_type is yarn and {part}; megatron-core computes yarn of whole heads only")
    for place in places if latent and "yarn" in kinds else ():
        scale, of_all = place.get("mscale"), place.get("mscale_all_dim")
        if (of_all and (not scale or config.model_type == "deepseek_v2")) or (not of_all and scale not in (None, 1)):
            raise UserError(
                f"{source}: mscale is {_short(scale)} and mscale_all_dim {_short(of_all)}: for model_type "
                f"{config.model_type!r}, transformers makes something else of them than megatron-core"
            )


def _places(rope: dict[str, Any]) -> list[dict[str, Any]]:
    """The dictionaries of rotary positions: one, or one for each type of layer."""
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]


def _config(fields: Mapping[str, Any]) -> PretrainedConfig:
    return CONFIG_MAPPING[fields["model_type"]].from_dict(copy.deepcopy(dict(fields)))


def _attempt(fields: Mapping[str, Any]) -> PretrainedConfig | None:
    try:
        return _config(fields)
    except MADE_ERRORS:
        return None


def not_taken(source: object, by: str, error: BaseException) -> UserError:
    return UserError(f"{source}: {by} does not take it: {type(error).__name__}: {' '.join(str(error).split())}")


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


@contextlib.contextmanager
def _quiet():
    """Without the advice that Bridge and transformers log for each config."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
