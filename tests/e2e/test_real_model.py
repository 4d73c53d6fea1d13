"""``make real`` with a tiny model in SmolLM2's place: its config, its export, and its check of the export."""

from pathlib import Path

import pytest
from helpers.cli import Cli, script
from helpers.reward_models import write_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tools.real_model.convert import plain

pytestmark = pytest.mark.slow
ANSWER = Path(__file__).parents[2] / "tools" / "real_model" / "answer.py"
SMALL = [
    "precision=fp32", "arms={ed_grpo_floor: {algorithm: grpo, alpha: 300, log_ratio_floor: -0.1}}", "sft.steps=2",
    "sft.optimizer.lr=0.02", "data.source_args.train_problems=16", "data.source_args.test_problems=6",
    "sft.batch_size=4", "grpo.iterations=1", "grpo.problems_per_iteration=2", "grpo.minibatch_size=4",
    "sampling.samples_per_prompt=4", "evaluation.samples=2", "evaluation.bootstrap=10",
]  # fmt: skip


def write_llama(folder: Path) -> Path:
    tokenizer = write_tokenizer(folder)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=len(tokenizer), **shape, num_key_value_heads=1, max_position_embeddings=1024,
        tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, bos_token_id=None, initializer_range=0.15,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_an_export_of_it_answers_in_transformers_as_in_the_run_and_another_model_does_not(tmp_path, nemo_edo):
    model, exported = write_llama(tmp_path / "model"), tmp_path / "exported"
    command = ("train", "--config-name", "real", f"model.path={model}", f"output_dir={tmp_path}", "name=real", *SMALL)
    nemo_edo.succeed(*command)
    nemo_edo.succeed("export", str(tmp_path / "real"), str(exported), "--arm", "ed_grpo_floor")
    check = [str(ANSWER), str(tmp_path / "real"), "ed_grpo_floor"]
    said = Cli(script).succeed(*check, str(exported))
    assert "Reply only with a name." in said
    assert "6 of 6 greedy responses are the run's own, token by token" in said
    assert Cli(script)(*check, str(model)).returncode == 1


def test_a_tokenizer_from_gguf_becomes_the_published_one():
    """As transformers converts it, it adds a token in front, and decodes as Llama's does, without a leading space."""
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(letters | {"<|im_start|>": 256, "<|im_end|>": 257}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")])
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 256)]
    )
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    found = plain(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_start|>", bos_token="<|im_start|>"))
    ids = found.encode(" Zoë likes\ntea.")
    assert found.decode(ids) == " Zoë likes\ntea." and 256 not in ids
    assert found.eos_token == "<|im_end|>" and found.bos_token is None
    assert set(found("a")) == {"input_ids", "attention_mask"}
