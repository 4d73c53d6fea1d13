"""A real vLLM server as the policy of an evaluation, and as its judge."""

import json
from pathlib import Path

import pytest
import torch

from nemo_edo.config.compose import compose_run
from nemo_edo.generation import servers
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.run.build import Builder
from nemo_edo.run_folder import RunFolder

pytestmark = [pytest.mark.servers, pytest.mark.timeout(1800)]
CHARACTERS = "verdict: coin0123456789"
"""A verdict and numbers can be written, and little else: random weights end a response within a few tokens."""
KEY = "key-of-the-test-0123456789"
PROBLEMS, SAMPLES = 12, 4


def write_model(folder: Path) -> Path:
    """A random model of single characters, with a chat template that passes the text on."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = ["<unk>", "<end>", *dict.fromkeys(CHARACTERS)]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>", pad_token="<unk>",
        chat_template="{{ messages[0]['content'] }}",
    ).save_pretrained(folder)  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=64, intermediate_size=128, max_position_embeddings=2048, initializer_range=0.08, bos_token_id=None,
        eos_token_id=1, pad_token_id=0, tie_word_embeddings=False,
    )).save_pretrained(folder)  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> tuple[Path, list[str]]:
    """A folder, and the settings that all evaluations here have in common."""
    folder = tmp_path_factory.mktemp("judge")
    rows = [{"question": f"{i} {i + 1}", "answer": f"#### {i}"} for i in range(PROBLEMS)]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder, [
        f"model.path={write_model(folder / 'model')}", f"data.test={folder / 'test.jsonl'}",
        "data.prompt='{question} '", "data.chat_template=false",
        "data.answer_format=pattern", "data.answer_pattern='[0-9]+'", "model.seq_length=1536", "precision=fp32",
        "sampling.max_new_tokens=32", f"evaluation.samples={SAMPLES}", "threads=1", f"output_dir={folder / 'runs'}",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def server(vllm_environment: Path, inputs):
    """One server, asked for responses and for verdicts."""
    folder, common = inputs
    cfg = compose_run("evaluate", [*common, "generation=vllm", f"generation.servers.python={vllm_environment}"])
    replicas = Builder(cfg, RunFolder(folder)).replicas(cfg.generation, folder / "servers", 0, key=KEY)
    servers.start(replicas, cfg.model.seq_length)
    yield replicas[0]
    replicas[0].stop()


@pytest.fixture(scope="module")
def evaluate(nemo_edo):
    """evaluate(*overrides): what the command says."""

    def run(*overrides: str) -> str:
        done = nemo_edo("evaluate", "--config-name", "evaluate", *overrides,
                        before=[("helpers.cli:export", {"SERVER_KEY": KEY})])
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def at(server) -> list[str]:
    key = "generation.servers.api_key_variable=SERVER_KEY"
    return ["generation=vllm", f"generation.servers.urls=[{server.url}]", key]


def stored(folder: Path, name: str, kind: str) -> list:
    return RolloutStore(folder / "runs" / name / "evaluations" / "warmup" / kind).read(0)


def metrics(folder: Path, name: str) -> dict[str, float]:
    found = json.loads((folder / "runs" / name / "test_time" / "warmup.json").read_text())["metrics"]
    return {name: sum(one["sum"]) / sum(one["count"]) for name, one in found.items() if sum(one["count"])}


def test_a_served_model_is_evaluated_as_the_same_model_in_process(server, inputs, evaluate):
    folder, common = inputs
    evaluate(*common, "name=served", *at(server))
    evaluate(*common, "name=inside")
    texts = {name: [one.rollout.text for one in stored(folder, name, "greedy")] for name in ("served", "inside")}
    assert texts["served"] == texts["inside"] and len(texts["served"]) == PROBLEMS
    assert len(stored(folder, "served", "sampled")) == PROBLEMS * SAMPLES
    found = {name: json.loads((folder / "runs" / name / "evaluations" / "warmup.json").read_text())["metrics"]
             for name in ("served", "inside")}  # fmt: skip
    assert "entropy" in found["inside"] and "entropy" not in found["served"]
    exact = sum(found["inside"]["entropy"]["sum"]) / sum(found["inside"]["entropy"]["count"])
    assert metrics(folder, "served")["entropy_sampled"] == pytest.approx(exact, rel=0.1)
    assert not (folder / "runs" / "served" / "kernels.json").exists()  # no model was built
    assert (folder / "runs" / "served" / "report.html").is_file()


def test_structured_output_makes_any_model_give_verdicts(server, inputs, evaluate):
    folder, common = inputs
    judge = {"url": f"{server.url}/v1", "model": "policy", "api_key_variable": "SERVER_KEY",
             "structured_output": "choice", "prompt_price": 1, "completion_price": 2}  # fmt: skip
    said = evaluate(*common, "name=structured", *at(server), "rewards.verifier=judge",
                    *(f"rewards.judge.{name}={value}" for name, value in judge.items()))
    lines = map(json.loads, (folder / "runs" / "structured" / "metrics.jsonl").read_text().splitlines())
    line = next(line for line in lines if line["kind"] == "judge")
    answered = [one for kind in ("greedy", "sampled") for one in stored(folder, "structured", kind) if one.answer]
    assert (line["abstained"], line["judged"]) == (0, len(answered)) and line["compared"] == len(answered)
    assert line["cost"] == pytest.approx((line["prompt_tokens"] + 2 * line["completion_tokens"]) / 1e6)
    found = metrics(folder, "structured")
    assert "Cohen" in said and 0 <= found["judge_agreement"] <= 1 and "abstained" not in found


def test_no_key_is_in_what_a_run_leaves(server, inputs):
    folder, _ = inputs
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 20 and not [path for path in files if KEY.encode() in path.read_bytes()]
