"""An exported policy in the programs that people load it with: lm-eval, PEFT, transformers 4 and vLLM."""

import json
from pathlib import Path

import pytest
import torch
from helpers.cli import Cli

pytestmark = pytest.mark.peers
TRAINED = ["sft.steps=60", "sft.batch_size=16", "sft.micro_batch_size=16", "sampling.samples_per_prompt=2",
           "sampling.max_new_tokens=12", "evaluation.samples=2", "evaluation.rollouts=1", "evaluation.every=0", "~arms",
           "replicate_baseline=false", "grpo.iterations=1", "grpo.minibatch_size=8", "grpo.micro_batch_size=8",
           "grpo.problems_per_iteration=8", "grpo.optimizer.lr=1e-2", "grpo.optimizer.warmup_steps=0", "lora.rank=2"]
PAIRS = [["1 + 2 + 3 + 4", "\n1 + 2 = 3"], ["5 + 1 + 1 + 9", "\n#### 16"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A policy of LoRA, merged and as adapters."""
    here = tmp_path_factory.mktemp("exported")
    nemo_edo = Cli()
    nemo_edo.succeed("train", "--config-name", "quickstart", "name=run", f"output_dir={here}", *TRAINED)
    nemo_edo.succeed("export", str(here / "run"), str(here / "merged"))
    nemo_edo.succeed("export", str(here / "run"), str(here / "adapters"), "--adapter")
    (here / "pairs.json").write_text(json.dumps(PAIRS))
    return here


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict:
    """The sums of log-probabilities of the second texts, and 8 greedy tokens after the first, in transformers 5."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (kind.from_pretrained(folder / "merged") for kind in (AutoModelForCausalLM, AutoTokenizer))
    sums, texts = [], []
    for first, second in PAIRS:
        start, whole = (tokenizer(text, return_tensors="pt")["input_ids"] for text in (first, first + second))
        with torch.no_grad():
            logprobs = model(whole).logits[0, :-1].log_softmax(-1).gather(1, whole[0, 1:, None])
        sums.append(logprobs[start.shape[1] - 1 :].sum().item())
        tokens = model.generate(start, max_new_tokens=8, do_sample=False)[0, start.shape[1] :]
        texts.append(tokenizer.decode(tokens, skip_special_tokens=True))
    return {"sums": sums, "texts": texts}


def test_lm_eval_and_peft_compute_what_transformers_does(run_in_peer, folder: Path, expected: dict):
    run_in_peer("exports", "exported.py", *(folder / name for name in ("merged", "adapters", "pairs.json", "out.json")))
    found = json.loads((folder / "out.json").read_text())
    assert [score for score, _ in found["scored"]] == pytest.approx(expected["sums"], abs=1e-4)
    assert found["generated"] == [text.partition("\n\n")[0] for text in expected["texts"]]
    assert max(found["adapter_gaps"]) < 1e-4


def test_vllm_answers_greedily_as_transformers_does(run_in_peer, folder: Path, expected: dict):
    run_in_peer("vllm", "exported_vllm.py", folder / "merged", folder / "pairs.json", folder / "vllm.json")
    assert json.loads((folder / "vllm.json").read_text()) == expected["texts"]
