"""Tiny process reward models with random weights, in the layouts of the official folders and in our own."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast, Qwen2Config

from nemo_edo.reward_models.formats import OwnSettings, write_own_settings
from nemo_edo.reward_models.heads import Qwen2ForPrmModel, Qwen2ForProcessRewardModel, own_class, own_config
from nemo_edo.reward_models.process_reward import encode_responses, scores_or_zeros

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""How Qwen2.5's template writes a conversation with a system prompt."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<extra_0>", "[CLS]", "[SEP]")
ANY_SHAPE = {"hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 2, "max_position_embeddings": 512,
             "initializer_range": 0.15}
SHAPE = {**ANY_SHAPE, "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 64}
ENCODER_SHAPE = {**ANY_SHAPE, "num_hidden_layers": 3, "local_attention": 16}
REMOTE_CODE = "from pathlib import Path\nPath(__file__).with_name('it_ran').touch()\nclass {name}: pass\n"


def write_tokenizer(folder: Path, *, special: tuple[str, ...] = SPECIAL, **fields) -> PreTrainedTokenizerFast:
    """One token for each byte, and the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", **fields}
    named = {name: value for name, value in names.items() if value is None or value in special}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=list(special), **named)
    fast.chat_template = CHATML
    fast.save_pretrained(str(folder))
    return fast


def write_qwen_prm(folder: Path, *, seed: int = 0, **tokenizer) -> Path:
    """As Qwen2.5-Math-PRM-7B's folder: names of weights, config with an auto_map, the code that it names."""
    fast = write_tokenizer(folder, **tokenizer)
    _save(Qwen2ForProcessRewardModel, Qwen2Config(vocab_size=len(fast), **SHAPE), folder, seed)
    _add_remote_code(folder, "Qwen2ForProcessRewardModel", "Qwen2RMConfig", "qwen2_rm")
    return folder


def write_skywork_prm(folder: Path, *, seed: int = 0, **tokenizer) -> Path:
    """As a Skywork-o1-Open-PRM's folder, with the language model's output layer that it holds, too."""
    from safetensors.torch import load_file, save_file

    fast = write_tokenizer(folder, **tokenizer)
    _save(Qwen2ForPrmModel, Qwen2Config(vocab_size=len(fast), **SHAPE), folder, seed)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = torch.zeros(len(fast), SHAPE["hidden_size"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _add_remote_code(folder, "Qwen2ForPrmModel", "Qwen2PrmConfig", "qwen2_prm")
    return folder


def write_own_reward_model(folder: Path, model_type: str = "llama", *, seed: int = 0, separator: str = "\n") -> Path:
    """As ``nemo-edo train --config-name reward_model`` writes it."""
    fast = write_tokenizer(folder, cls_token="[CLS]", sep_token="[SEP]")
    shape = ENCODER_SHAPE if model_type == "modernbert" else SHAPE
    config = own_config(AutoConfig.for_model(model_type, vocab_size=len(fast), **shape), fast.pad_token_id)
    kind = own_class(config, "a test")
    _save(kind, config, folder, seed)
    write_own_settings(folder, OwnSettings("encoder" if model_type == "modernbert" else "decoder", separator))
    return folder


def _save(kind, config, folder: Path, seed: int) -> None:
    """Weights far from their usual start (biases 0, norms 1), so that one that is lost or misplaced shows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = kind._from_config(config)
        with torch.no_grad():
            for parameter in network.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
    network.save_pretrained(folder)


def _add_remote_code(folder: Path, model: str, config: str, suffix: str) -> None:
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    assert fields["architectures"] == [model] and fields["model_type"] == "qwen2"
    fields["auto_map"] = {"AutoConfig": f"configuration_{suffix}.{config}", "AutoModel": f"modeling_{suffix}.{model}"}
    path.write_text(json.dumps(fields))
    for name, defined in ((f"configuration_{suffix}", config), (f"modeling_{suffix}", model)):
        (folder / f"{name}.py").write_text(REMOTE_CODE.format(name=defined))


def score_rollouts(model, rollouts, questions, *, separator: str | None = None) -> list:
    """The scores of each response's steps, in order."""
    encoded = encode_responses(rollouts, questions, model.format, separator=separator)
    return scores_or_zeros(model, encoded, model.max_length)
