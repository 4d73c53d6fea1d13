"""A model folder is trained as what it is to transformers, or refused by the name of a field or tensor."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from generated import model_section
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nemo_edo.config.shipped import shipped_config_dir
from nemo_edo.errors import UserError
from nemo_edo.megatron import platform
from nemo_edo.megatron.bridge import check_model_folder
from nemo_edo.megatron.folder_fields import check_fields, load_config
from nemo_edo.megatron.hf_export import export_hf_folder

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILIES = {"llama": {}, "qwen2": {}, "qwen3": {}, "qwen3_moe": EXPERTS, "mistral": {"sliding_window": None}}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}
O_PROJ, NORM, HEAD = "model.layers.1.self_attn.o_proj.weight", "model.norm.weight", "lm_head.weight"


@pytest.fixture(scope="module", autouse=True)
def folders(tiny, tmp_path_factory):
    """A sound folder of each family, in transformers 5's format."""
    platform.enter(1)  # Bridge is imported after it
    root = tmp_path_factory.mktemp("folders")
    return {name: tiny.write_tiny_model(root / name, name, **fields) for name, fields in FAMILIES.items()}


@pytest.fixture
def copied(folders, tmp_path):
    return lambda family: Path(shutil.copytree(folders[family], tmp_path / family))


def edit(folder: Path, **fields) -> None:
    """Sets fields of config.json; ... removes one."""
    path = folder / "config.json"
    kept = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in kept.items() if value is not ...}))


def change(folder: Path, **tensors) -> None:
    """Puts tensors in the file, or what a function makes of those there; None removes one."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name, new in tensors.items():
        old = weights.pop(name, None)
        if new is not None:
            weights[name] = new(old) if callable(new) else new
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path, metadata={"format": "pt"})


def add_prefix(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({f"base_model.model.{name}": tensor for name, tensor in weights.items()}, folder / "model.safetensors")


def in_shards(folder: Path, seed: int = 0) -> None:
    """Writes the model, or another one, in shards with an index, and leaves model.safetensors."""
    weights, shards = load_file(folder / "model.safetensors"), ({}, {})
    for number, (name, tensor) in enumerate(weights.items()):
        shards[number % 2][name] = tensor + seed
    places = {}
    for number, shard in enumerate(shards):
        file = f"model-{number + 1:05d}-of-00002.safetensors"
        save_file(shard, folder / file)
        places |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def only_shards(folder: Path) -> None:
    in_shards(folder)
    (folder / "model.safetensors").unlink()


def fuse(folder: Path, experts: int = 4) -> None:
    """Stores a layer's experts as transformers 5 computes with them."""
    weights = load_file(folder / "model.safetensors")
    for layer in range(2):
        of = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([weights.pop(f"{of}{number}.{name}_proj.weight") for number in range(experts)])
            for name in ("gate", "up", "down"))
        weights |= {f"{of}gate_up_proj": torch.cat([gate, up], dim=1), f"{of}down_proj": down}
    save_file(weights, folder / "model.safetensors")


def twice(folder: Path) -> None:
    only_shards(folder)
    first, second = sorted(folder.glob("model-*.safetensors"))
    save_file({**load_file(second), **dict([next(iter(load_file(first).items()))])}, second)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 777.0, "factor": 2.0}
MSCALE = {"mscale": 0.7, "mscale_all_dim": 0.7}
DAMAGED_WEIGHTS = {
    "a tensor is missing": (lambda f: change(f, **{O_PROJ: None}), O_PROJ),
    "a layer is missing": (lambda f: edit(f, num_hidden_layers=3, layer_types=...), r"model\.layers\.2\."),
    "untied, without a head": (lambda f: change(f, **{HEAD: None}), HEAD),
    "tied, with another head": (lambda f: edit(f, tie_word_embeddings=True), f"{HEAD} differs from"),
    "a surplus tensor": (lambda f: change(f, **{"model.extra.weight": torch.ones(2)}), r"model\.extra\.weight"),
    "FP8": (lambda f: change(f, **{O_PROJ: lambda w: w.to(torch.float8_e4m3fn)}), f"{O_PROJ} is F8_E4M3"),
    "a shape": (lambda f: change(f, **{NORM: lambda w: w[:-1]}), f"{NORM} has the shape"),
    "more rows than vocab_size": (lambda f: edit(f, vocab_size=100), r"has the shape \[130, 64\]"),
    "PEFT's names": (add_prefix, "no tensor"),
    "a tensor is in two shards": (twice, "is in .*00001-of-00002.*remove one"),
    "the index alone": (lambda f: (only_shards(f), [p.unlink() for p in f.glob("*.safetensors")]), "00001-of-00002"),
    "a file by another name": (
        lambda f: (f / "model.safetensors").rename(f / "weights.safetensors"), r"weights\.safetensors, which is not"),
    "an adapter": (lambda f: (f / "adapter_config.json").write_text("{}"), "adapter_config"),
}
DAMAGED_FIELDS = {
    "quantised": ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    "a size in quotes": ("qwen2", {"head_dim": "16"}, "head_dim is '16', expected a number"),
    "attention that is not installed": ("llama", {"_attn_implementation": "flash_attention_2"}, "FlashAttention2"),
    "own code": ("llama", {"auto_map": {"AutoModelForCausalLM": "own.Model"}}, "auto_map"),
    "misspelt": ("llama", {"rms_norm_epsilon": 1e-3}, "rms_norm_epsilon"),
    "other architecture": ("llama", {"architectures": ["MistralForCausalLM"]}, "architectures .*LlamaForCausalLM"),
    "biases of attention": ("qwen3", {"attention_bias": True}, "attention_bias is true"),
    "biases of an MLP": ("llama", {"mlp_bias": True}, r"mlp.*bias"),
    "every second layer": ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
    "window": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "layer_types": ...}, "sliding_window"),
    "window by layers": ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    "heads": ("mistral", {"head_dim": 32}, "_proj.* shape"),
    "further tokens": ("qwen3", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
    "two bases": ("llama", {"rope_theta": 5e5}, "rope_theta twice: 500000.0"),
    "two scalings": (
        "llama", {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {**LLAMA3}}, "rope_type"),
    "linear": ("qwen3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "linear"),
    "llama3 elsewhere": ("qwen2", {"rope_parameters": LLAMA3}, "llama3|factor"),
    "llama3's factors": ("llama", {"rope_parameters": {**LLAMA3, "high_freq_factor": 3.0}}, "high_freq_factor"),
    "tuples, which transformers' own model does not take": ("llama", {"return_dict": False}, "return_dict"),
    "YaRN's factor": ("qwen2", {"rope_parameters": {**YARN, "attention_factor": 2.0}}, "attention_factor"),
    "a part of the head": ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "groups of heads": ("qwen3", {"num_key_value_heads": 3}, "no multiple of num_key_value_heads"),
    "an odd head": ("mistral", {"head_dim": 17}, "head_dim is 17"),
    "one expert": ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}, "num_experts_per_tok is 1, and"),
    "no vocab_size": ("qwen3", {"vocab_size": ...}, "has no vocab_size, for which transformers takes 151936"),
    "more experts than there are": ("qwen3_moe", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, of 4"),
    "no kind": ("llama", {"model_type": ["llama"]}, "model_type is"),
    "a factor in quotes": ("llama", {"rope_parameters": {**LINEAR, "factor": "2.0"}}, "factor .* is '2.0'"),
    "no factor": ("llama", {"rope_parameters": {**LINEAR, "factor": 0}}, "factor .* is 0"),
}
HALF = {"partial_rotary_factor": 0.5, "rope_theta": 1e4}
FULL = {"sliding_window": None, "layer_types": 30 * ["full_attention"], "num_hidden_layers": 30}
DEEPSEEK = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "ep_size": 1, "moe_layer_freq": 1,
            "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}  # fmt: skip
OTHER_FAMILIES = {  # fields that their classes' defaults complete, and what of them is refused
    "exaone4's windows": ("exaone4", {"max_position_embeddings": 8192}, "sliding_window is 4096"),
    "exaone4's layers without positions": ("exaone4", {}, "layer_types has full_attention"),
    "exaone4, 1.2 B": ("exaone4", {**FULL, "rope_scaling": {**LLAMA3, "factor": 16.0}, "rope_theta": 5e5}, None),
    "exaone_moe, linear": ("exaone_moe", {"rope_parameters": LINEAR}, "rope_type"),
    "glm4_moe, YaRN of half heads": ("glm4_moe", {"rope_parameters": {**YARN, **HALF}}, "partial_rotary_factor is 0.5"),
    "DeepSeek-V3": ("deepseek_v3", DEEPSEEK, None),
    "Gemma 1.1": ("gemma", {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}, None),
    "Gemma 1": ("gemma", {"hidden_act": "gelu", "hidden_activation": None}, "hidden_act is .gelu"),
    "Moonlight": ("deepseek_v3", {**DEEPSEEK, "q_lora_rank": None}, "q_lora_rank is null"),
    "deepseek_v3, YaRN": ("deepseek_v3", {"rope_parameters": {**YARN, **MSCALE}}, None),
    "deepseek_v3, one mscale": ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 0.7}}, "mscale is 0.7"),
    "deepseek_v3, no factor": ("deepseek_v3", {"rope_parameters": {**YARN, "factor": None}}, "factor .* null"),
    "deepseek_v3, no scaling": ("deepseek_v3", {"routed_scaling_factor": 0.0}, "routed_scaling_factor is 0"),
    "deepseek_v3, groups": ("deepseek_v3", {"num_experts_per_tok": 4}, "topk_group 4"),
    "deepseek_v3, another router": ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
    "deepseek_v2, mscale": ("deepseek_v2", {"num_experts_per_tok": 6, "rope_parameters": {**YARN, **MSCALE}}, "mscale"),
    "GLM-4.7-Flash": ("glm4_moe_lite", {"first_k_dense_replace": 1, "topk_method": "noaux_tc"}, None),
    "glm4_moe_lite, dense layers": ("glm4_moe_lite", {"first_k_dense_replace": 2}, "first_k_dense_replace is 2"),
}  # fmt: skip


PUBLISHED = {  # of their makers' config.json, what is not in conf/model
    "qwen2_5_0_5b": {"sliding_window": 32768, "max_window_layers": 21, "use_sliding_window": False, "use_mrope": False},
    "qwen3_30b_a3b": {"sliding_window": None, "output_router_logits": False, "router_aux_loss_coef": 0.001},
    "llama3_1_8b": {"pretraining_tp": 1, "eos_token_id": [128001, 128008], "torch_dtype": "bfloat16"},
}


@pytest.mark.parametrize("model", sorted(path.stem for path in (shipped_config_dir() / "model").glob("[lq]*_*.yaml")))
def test_the_published_configs_of_shipped_models_lose_nothing(model):
    fields = {**model_section(model)["architecture"], **PUBLISHED.get(model, {})}
    check(fields)


def check(fields) -> None:
    from megatron.bridge import AutoBridge
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    fields = {**fields, "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[fields["model_type"]]]}
    config = load_config(fields, "config.json")
    bridge = AutoBridge.from_hf_config(config)._model_bridge
    check_fields(fields, config, lambda one: bridge.provider_bridge(SimpleNamespace(config=one)), "config.json")


@pytest.mark.parametrize("case", OTHER_FAMILIES)
def test_fields_of_other_families_are_theirs_or_refused_by_name(case):
    model_type, fields, named = OTHER_FAMILIES[case]
    if named is None:
        check({"model_type": model_type, **fields})
        return
    with pytest.raises(UserError, match=f"config.json.*{named}"):
        check({"model_type": model_type, **fields})


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_weights_that_are_not_the_models_are_refused_by_name_and_file(copied, family):
    for damage, (spoil, named) in DAMAGED_WEIGHTS.items():
        folder = copied(family)
        check_model_folder(folder)
        spoil(folder)
        with pytest.raises(UserError, match=named) as error:
            check_model_folder(folder)
        assert str(folder) in str(error.value), damage
        shutil.rmtree(folder)


@pytest.mark.parametrize("damage", DAMAGED_FIELDS)
def test_fields_that_bridge_would_lose_are_refused_by_name(copied, damage):
    family, fields, named = DAMAGED_FIELDS[damage]
    folder = copied(family)
    edit(folder, **fields)
    with pytest.raises(UserError, match=f"config.json.*{named}|{named}"):
        check_model_folder(folder)


def largest_difference(tiny, folder: Path, length: int = 60) -> float:
    tokens = torch.randint(2, 120, (1, length), generator=torch.Generator().manual_seed(0))
    policy = tiny.build_policy(folder)
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = policy.chunks[0](tokens, torch.arange(length)[None], None)[..., : policy.built.vocab_size]
        return float((logits - dense(tokens).logits).abs().max())


SOUND = {
    "version 4's base": ("llama", lambda f: edit(f, rope_theta=5e5, rope_parameters=...)),
    "linear scaling": (
        "llama", lambda f: edit(f, rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters=...)),
    "YaRN": ("qwen3", lambda f: edit(f, rope_parameters=YARN)),
    "version 4's YaRN": (
        "qwen2", lambda f: edit(f, rope_scaling={**YARN, "type": "yarn", "beta_fast": 16.0}, rope_parameters=...)),
    "a window that is not used": (
        "qwen2", lambda f: edit(f, use_sliding_window=False, sliding_window=8, max_window_layers=1)),
    "a window": ("mistral", lambda f: edit(f, sliding_window=8)),
    "probabilities as they are": ("qwen3_moe", lambda f: edit(f, norm_topk_prob=False)),
    "harmless fields": ("llama", lambda f: edit(f, unsloth_version="1", use_mrope=False, attention_dropout=0.1,
                                                     _model_name_or_path="SmolLM2")),
    "tied, with the same head": (
        "qwen3", lambda f: (edit(f, tie_word_embeddings=True),
                            change(f, **{HEAD: load_file(f / "model.safetensors")["model.embed_tokens.weight"]}))),
    "an old buffer": (
        "llama", lambda f: change(f, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})),
    "half": ("qwen2", lambda f: change(f, **{O_PROJ: lambda w: w.half(), NORM: lambda w: w.bfloat16()})),
    "experts in one tensor": ("qwen3_moe", fuse),
    "shards of another model, and a stray one": ("qwen3_moe", lambda f: in_shards(f, seed=1)),
}


@pytest.mark.parametrize("case", SOUND)
def test_sound_folders_compute_what_transformers_computes(tiny, copied, case):
    family, prepare = SOUND[case]
    folder = copied(family)
    prepare(folder)
    assert largest_difference(tiny, folder) < 1e-3


def test_weight_files_that_are_not_read_are_named(copied, caplog):
    folder = copied("llama")
    in_shards(folder, seed=1)
    (folder / "pytorch_model.bin").touch()
    check_model_folder(folder)
    for name in ("00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin"):
        assert name in caplog.text


LATENT = {"q_lora_rank": 32, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
          "head_dim": 8, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
          "topk_group": 1, "moe_intermediate_size": 48, "first_k_dense_replace": 1}  # fmt: skip


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe_lite"])
def test_layers_that_predict_further_tokens_are_left_out_as_by_transformers_and_exported(
    tiny, tmp_path, caplog, model_type
):
    folder = tiny.write_tiny_model(tmp_path / "model", model_type, **LATENT)
    further = {f"model.layers.2.{name}.weight": torch.randn(64, size) for name, size in (("eh_proj", 128), ("x", 1))}
    change(folder, **further)
    with pytest.raises(UserError, match=r"model\.layers\.2\.eh_proj"):
        check_model_folder(folder)
    edit(folder, num_nextn_predict_layers=1)
    check_model_folder(folder)
    assert "predict further tokens" in caplog.text
    assert largest_difference(tiny, folder) < 1e-3
    export_hf_folder(tiny.build_policy(folder).built, tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == load_file(folder / "model.safetensors").keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in further.items())


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused_while_weights_load(tiny, copied, number):
    folder = copied("qwen3")
    change(folder, **{O_PROJ: lambda w: w.index_fill(0, torch.tensor(3), number)})
    with pytest.raises(UserError, match=rf"model\.safetensors: {O_PROJ} is not finite"):
        tiny.build_policy(folder)


def test_a_parameter_that_no_tensor_fills_is_refused(tiny, copied, monkeypatch):
    """Bridge itself leaves it random and logs that it has no mapping."""
    from megatron.bridge.models.qwen.qwen3_bridge import Qwen3Bridge

    provide = Qwen3Bridge.provider_bridge

    def with_bias(self, hf_pretrained):
        provider = provide(self, hf_pretrained)
        provider.add_qkv_bias = True
        return provider

    monkeypatch.setattr(Qwen3Bridge, "provider_bridge", with_bias)
    with pytest.raises(UserError, match=r"no tensor for Megatron's decoder\.layers\.0\..*linear_qkv\.bias"):
        tiny.build_policy(copied("qwen3"))
