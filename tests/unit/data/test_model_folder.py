"""The files of an export other than its weights: one configuration for both versions of transformers, nothing lost."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, LlamaConfig

from nemo_edo.data.model_folder import read_headers, usual_modes, write_files
from nemo_edo.errors import UserError
from nemo_edo.megatron.hf_export import with_untrained

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 5e5}
TWO = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
       "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
CASES = [
    ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {"rope_theta": 1e6}),
    ("llama", {"rope_parameters": YARN}, {"rope_theta": 5e5, "rope_scaling": {**YARN, "rope_theta": None}}),
    ("gemma3_text", {"rope_parameters": TWO}, {"rope_theta": 1e6, "rope_local_base_freq": 1e4,
                                               "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ("qwen3_moe", {"num_experts": 6}, {"num_experts": 6, "num_local_experts": 6}),
]


@pytest.mark.parametrize(("model_type", "fields", "version_4"), CASES)
def test_the_config_says_the_same_to_both_versions(tmp_path: Path, model_type, fields, version_4):
    source, out = tmp_path / "source", tmp_path / "out"
    config = AutoConfig.for_model(model_type, **fields)
    config.save_pretrained(source)
    write_files(source, out, config, "float32")
    written = json.loads((out / "config.json").read_text())
    for name, value in version_4.items():
        kept = {key: one for key, one in value.items() if one is not None} if isinstance(value, dict) else value
        assert written[name] == kept
    again, before = (AutoConfig.from_pretrained(folder).to_dict() for folder in (out, source))
    assert {**again, "dtype": None, "_name_or_path": ""} == {**before, "dtype": None, "_name_or_path": ""}


def test_template_licence_and_generation_config_come_along_with_usual_modes(tmp_path: Path):
    source, out = tmp_path / "source", tmp_path / "out"
    AutoConfig.for_model("llama").save_pretrained(source)
    tokenizer = {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<a>"]}
    kept = {"LICENSE": "ours", "Notice.md": "n", "chat_template.jinja": "{{ x }}", "generation_config.json": "{}"}
    left = {"model.safetensors": "w", "model.safetensors.index.json": "{}", "README.md": "about another"}
    for name, text in {**kept, **left, "tokenizer_config.json": json.dumps(tokenizer)}.items():
        (source / name).write_text(text)
        (source / name).chmod(0o600)
    (source / "additional_chat_templates").mkdir(mode=0o700)
    write_files(source, out, AutoConfig.from_pretrained(source), "float32")
    os.umask(before := os.umask(0o022))
    usual_modes(out)
    assert {name: (out / name).read_text() for name in kept} == kept
    assert not [name for name in left if (out / name).exists()]
    modes = {(path.is_dir(), path.stat().st_mode & 0o777) for path in out.iterdir()}
    assert modes == {(False, 0o666 & ~before), (True, 0o777 & ~before)}
    assert json.loads((out / "tokenizer_config.json").read_text()) == {
        "tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": ["<a>"]}


def test_what_no_training_changes_is_kept_and_a_tensor_that_would_be_lost_is_named(tmp_path: Path):
    config, kept = LlamaConfig(num_hidden_layers=2), (
        "model.layers.2.mtp.weight", "model.rotary_emb.inv_freq", "model.layers.0.self_attn.masked_bias")
    weights = {"model.norm.weight": torch.ones(2)}
    source = {**weights, "model.norm.weight": torch.zeros(2), **dict.fromkeys(kept, torch.ones(1))}
    save_file({name: tensor.clone() for name, tensor in source.items()}, tmp_path / "one.safetensors")
    save_file({"model.layers.1.self_attn.q_proj.bias": torch.ones(1)}, tmp_path / "more.safetensors")
    index = {"weight_map": dict.fromkeys(source, "one.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))  # transformers does not read the other
    exported = dict(with_untrained(weights.items(), read_headers(tmp_path), config))
    assert exported.keys() == source.keys() and torch.equal(exported["model.norm.weight"], torch.ones(2))
    index["weight_map"]["model.layers.1.self_attn.q_proj.bias"] = "more.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"more\.safetensors: model\.layers\.1\.self_attn\.q_proj\.bias"):
        dict(with_untrained(weights.items(), read_headers(tmp_path), config))
