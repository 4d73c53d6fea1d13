"""What ``nemo-edo doctor`` prints and with which status it ends."""

import json
import subprocess
from types import SimpleNamespace

import pytest
from helpers.problem_files import ROWS, problem_overrides
from helpers.tiny_models import write_tiny_model

from nemo_edo.checks import machine
from nemo_edo.cli import main
from nemo_edo.errors import UserError

H100 = machine.Gpu("NVIDIA H100 80GB HBM3", 81559 * 2**20, "9.0")
FITS = ["--config-name=grpo_gsm8k", "model=qwen2_5_7b", "parallelism=tp2_sharded", "grpo.micro_batch_tokens=8192",
        "generation.max_batch_size=64", "model.seq_length=4096"]


@pytest.fixture
def doctor(monkeypatch, tmp_path, capsys):
    """Runs the command; returns its status and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)

    def run(*arguments: str) -> tuple[int, str]:
        status = main(["doctor", *arguments])
        return status, "".join(capsys.readouterr())

    return run


def test_this_environment_is_sound_and_the_quickstart_fits_in_it(doctor):
    status, text = doctor("--config-name", "quickstart", "threads=1")
    assert (status, text.splitlines()[-1]) == (0, "ok")
    assert all(part in text for part in ("torch 2", "memory", "million parameters, fp32, one process"))


@pytest.mark.parametrize(("chosen", "asked"), [
    (None, []), ("2,3", ["--id=2,3"]), ("GPU-c3", ["--id=GPU-c3"]), ("MIG-77", []), ("", None), ("-1", None)])
def test_gpus_are_those_that_the_driver_lists_and_the_process_may_use(monkeypatch, chosen, asked):
    queries = []
    answer = SimpleNamespace(returncode=0, stdout=2 * "NVIDIA H100 80GB HBM3, 81559, 9.0\n", stderr="")
    monkeypatch.setattr(machine.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(machine.subprocess, "run", lambda query, **_: queries.append(query) or answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert machine.gpus() == ([] if asked is None else 2 * [H100])
    assert [[option for option in query if option.startswith("--id")] for query in queries] == (
        [] if asked is None else [asked])


def test_a_gpu_that_shares_the_hosts_memory_has_all_of_it_and_a_driver_that_hangs_is_a_message(monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    spark = SimpleNamespace(returncode=0, stdout="NVIDIA GB10, [N/A], 12.1\n", stderr="")
    monkeypatch.setattr(machine.subprocess, "run", lambda query, **_: spark)
    assert machine.gpus() == [machine.Gpu("NVIDIA GB10", machine.total_bytes(), "12.1")]

    def hangs(query, timeout, **_):
        raise subprocess.TimeoutExpired(query, timeout)

    monkeypatch.setattr(machine.subprocess, "run", hangs)
    with pytest.raises(UserError, match="nvidia-smi does not answer within 60 s"):
        machine.gpus()


def test_a_config_that_fits_ends_with_zero_and_lists_what_it_lacks(doctor, monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: 8 * [H100])
    status, text = doctor(*FITS, "--gpus=8", "--gpu-memory=80GB")
    assert (status, text.splitlines()[-1]) == (0, "ok")
    assert "to be given  model.path, data.train, data.test" in text
    assert "7.62 billion parameters, bf16, tensor 2 x data 4" in text
    # 2 bytes for each weight of a rank's half, and a quarter of 12 for each.
    assert "19.0 while it writes or reads a checkpoint: 213.2 GB for the 8 of a node" in " ".join(text.split())


LLAMA_70B = ["--config-name=grpo_gsm8k", "model=llama3_1_70b", "generation=vllm", "grpo.micro_batch_tokens=null",
             "sampling.max_new_tokens=32000", "--gpus=32"]  # fmt: skip


@pytest.mark.parametrize(("arguments", "said"), [
    # A sequence whose length is not known yet fits into a micro-batch.
    (["--config-name=quickstart", "model.seq_length=null", "grpo.micro_batch_size=1", "grpo.micro_batch_tokens=128"],
     "million parameters"),
    ([*LLAMA_70B, "generation.servers.tensor_parallel_size=2", "--gpu-memory=141GB"], "an iteration of"),
    ([*LLAMA_70B, "generation.servers.tensor_parallel_size=2", "--gpu-memory=80GB"], "2 GPUs of 80 GB hold no weights"),
    # FP8 is the trainer's: servers have the weights in bf16.
    ([*LLAMA_70B, "generation.servers.tensor_parallel_size=1", "precision=fp8", "--gpu-memory=141GB"],
     "1 GPUs of 141 GB hold no weights"),
])  # fmt: skip
def test_lengths_and_generation_are_estimated_for_the_devices_that_are_given(doctor, arguments, said):
    assert said in doctor(*arguments)[1]


def test_an_iteration_is_of_the_problems_that_there_are(doctor, tmp_path):
    rows = [json.dumps({"question": f"{n} + 1?", "answer": f"#### {n + 1}"}) for n in range(3000)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows) + "\n")
    text = doctor(*FITS, "--gpus=8", "--gpu-memory=80GB", "data.train=train.jsonl")[1]
    assert "for 30,000 responses" in text


@pytest.mark.parametrize(("arguments", "message"), [
    ([*FITS, "parallelism=tp8_sp"], "_size 8 does not divide the model's 28 attention heads and 4 query groups"),
    ([*FITS, "parallelism=tp2_sharded", "parallelism.pipeline_model_parallel_size=3"], "got 8"),
    ([*FITS, "model=hf"], "choose the model by its name"), ([*FITS, "grpo.alhpa=1"], "unknown key grpo.alhpa"),
    (["seed=1"], "seed=1: settings need --config-name"),
    *(([f"--gpu-memory={size}"], f"--gpu-memory is {size}") for size in ("80", "80MB", "-1GB")),
    ([*FITS, "--gpu-memory=40GB"], "grpo.micro_batch_tokens=4096"),
])  # fmt: skip
def test_what_cannot_run_ends_with_two_and_says_what_to_change(doctor, arguments, message):
    status, text = doctor(*arguments, "--gpus=8")
    assert (status, message in text) == (2, True)


@pytest.mark.parametrize(("status", "words"), [(0, "126 tokens are transformers'"), (2, "another model")])
def test_the_numbers_of_a_model_at_hand_are_compared_with_transformers(doctor, tmp_path, monkeypatch, status, words):
    def run(self, call, cfg, scratch, limit_s):
        if status:
            raise machine.CheckError("another model than the folder's; its output is in /log")
        return {"nats": 1e-6, "of": "at most", "bound": 3e-3, "tokens": 126}

    monkeypatch.setattr(machine.Machine, "run", run)
    path = f"model.path={write_tiny_model(tmp_path / 'model')}"
    found, text = doctor("--config-name=quickstart", path, "model.architecture=null", "threads=1",
                         *problem_overrides(tmp_path, train=ROWS[:2], test=ROWS[2:]), "grpo.allow_one_step=true")
    assert (found, words in text, "/log" in text) == (status, True, False)


@pytest.mark.parametrize(("family", "fields", "rows", "refused"), [
    ("mistral", {"sliding_window": 16}, ROWS, None),
    ("qwen3", {"attention_bias": True}, ROWS, "attention_bias is true"),
    ("llama", {"num_hidden_layers": 3}, ROWS, "model.layers.2."),
    ("llama", {}, [{"question": "1 + 1"}], "train.jsonl"), ("qwen3_moe", {}, ROWS, None),
])
def test_the_doctor_refuses_the_folder_and_the_data_that_a_run_refuses(doctor, tmp_path, family, fields, rows, refused):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48} if "moe" in family else {}
    folder = write_tiny_model(tmp_path / "model", family, **experts)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "layer_types": None, **fields}))
    files = problem_overrides(tmp_path, train=rows[:2], test=ROWS[2:])
    status, text = doctor("--config-name=grpo_gsm8k", f"model.path={folder}", *files, "data.prompt='{question}'",
                          "data.chat_template=false", "sampling.max_new_tokens=10", "precision=fp32",
                          "model.verify=false", "grpo.allow_one_step=true")
    assert (status, refused is None or refused in text) == (0 if refused is None else 2, True), text
    assert ("the model has 4 experts, and generation.routing_replay is false" in text) == bool(experts)
