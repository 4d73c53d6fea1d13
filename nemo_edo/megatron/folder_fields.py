"""Whether Megatron-Bridge computes what the fields of a config.json tell ``transformers`` to compute.

A field may have the value that transformers takes where it is absent. Any other value has to change Bridge's provider,
that is Megatron's config of the model: a field without an effect on it is lost in the conversion and refused by name.
"""

from __future__ import annotations

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
    "initializer_range initializer_factor pad_token_id bos_token_id eos_token_id sep_token_id decoder_start_token_id "
    "forced_bos_token_id forced_eos_token_id id2label label2id problem_type task_specific_params return_dict "
    "output_attentions output_hidden_states gradient_checkpointing is_decoder chunk_size_feed_forward finetuning_task "
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
    "sliding_window_size": lambda config: getattr(config, "sliding_window", None),
    "swiglu_limit": lambda config: 7.0 if config.model_type == "gpt_oss" else None,
}
"""What transformers' models take for fields that they, or published files, have and their config's class has not."""
NOT_TRAINED = dict.fromkeys(
    ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers"),
    "layers that predict further tokens are not trained; remove them from the folder",
)
STEERING = frozenset(("max_window_layers", "sliding_window_pattern", "_sliding_window_pattern"))
"""What config classes make other fields of, and models do not read."""
BRIDGE_ERRORS = (KeyError, ValueError, TypeError, AttributeError, AssertionError, NotImplementedError)

IMPLIED = {"gemma3_text": "linear"}
"""The scaling of positions that Bridge computes where there is a factor, without having read its type."""

Provider = Callable[[PretrainedConfig], Any]


def load_config(fields: Mapping[str, Any], source: str) -> PretrainedConfig:
    """transformers' config of the fields of the config.json ``source``. Raises UserError for what it does not take."""
    if fields.get("auto_map"):
        raise UserError(f"{source}: auto_map names code of the model's own, which is not run; remove it")
    if fields.get("model_type") not in CONFIG_MAPPING:
        raise UserError(f"{source}: model_type is {fields.get('model_type')!r}, which transformers does not have")
    try:
        config = _config(fields)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:
        said = " ".join(str(error).split())
        raise UserError(f"{source}: transformers does not take it: {type(error).__name__}: {said}") from error
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model is None or fields.get("architectures") != [model.__name__]:
        built = "no causal language model" if model is None else model.__name__
        raise UserError(
            f"{source}: architectures is {fields.get('architectures')}, and transformers builds {built} for model_type "
            f"{config.model_type!r}; correct the one that is wrong"
        )
    return config


def check_fields(fields: Mapping[str, Any], config: PretrainedConfig, provider: Provider, source: str) -> None:
    """Raises UserError where transformers would compute something else than Megatron-Bridge.

    config: ``load_config`` of the fields. provider: Bridge's, made from a config.
    """
    # The names that the config's class declares: it also takes any other, and keeps it.
    declared = {field.name for field in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()
    declared |= set(type(config)().to_dict()) | set(config.attribute_map)
    with _quiet():
        try:
            compare = _Comparison(config, provider)
        except BRIDGE_ERRORS as error:
            said = " ".join(str(error).split())
            raise UserError(f"{source}: Megatron-Bridge does not take it: {type(error).__name__}: {said}") from error
        for name in sorted(fields.keys() - HARMLESS - ROPE):
            value, known = fields[name], name in declared or name in UNDECLARED or name in STEERING
            if not known and value in (None, False, [], {}):
                continue  # transformers does not read it, and what it would turn on is off
            if name not in declared and name in UNDECLARED and value in (None, UNDECLARED[name](config)):
                continue
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
        except BRIDGE_ERRORS:  # it misses the field
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
    kinds = {place.get("rope_type", "default") for place in _places(found)}
    yarn = getattr(compare.usual, "position_embedding_type", None) == "yarn"
    if yarn != ("yarn" in kinds) and not getattr(compare.usual, "multi_latent_attention", False):
        raise UserError(
            f"{source}: rope_type is {_short(sorted(kinds))}; for model_type {config.model_type!r}, Megatron-Bridge "
            f"computes {'yarn' if yarn else 'no yarn'}"
        )
    usual = _places(getattr(type(config)(), "rope_parameters", None) or {})
    for number, place in enumerate(_places(found)):
        kind, stock = place.get("rope_type", "default"), usual[number] if number < len(usual) else {}
        stock = {"rope_type": "default", "partial_rotary_factor": 1.0, **stock}
        for name, value in sorted(place.items(), key=lambda item: item[0] != "rope_type"):
            if value is None or value == stock.get(name) or (name == "type" and value == kind):
                continue
            if name == "rope_type" and value == IMPLIED.get(config.model_type):
                continue
            fixed = LLAMA3.get(name) if (kind, config.model_type) == ("llama3", "llama") else None
            if fixed is not None:
                if value != fixed:
                    raise UserError(f"{source}: {name} of rope_type 'llama3' is {value}; Megatron knows {fixed} only")
                continue
            other = copy.deepcopy(config)
            another = not value if isinstance(value, bool) else 2 * value if isinstance(value, (int, float)) else None
            changed = {**stock, "type": stock["rope_type"]} if name == "rope_type" else {name: another}
            _places(other.rope_parameters)[number].update(changed)
            if compare.is_lost(other):
                raise UserError(
                    f"{source}: {name} {_short(value)} of the rotary positions (rope_parameters or rope_scaling) would "
                    f"be lost: Megatron-Bridge does not read it for model_type {config.model_type!r}"
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
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError):
        return None


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
