"""What ``nemo-edo doctor`` prints and with which status it ends."""

import json
import re
from types import SimpleNamespace

import pytest
from helpers.problem_files import ROWS, write_rows
from helpers.tiny_models import write_tiny_model

from nemo_edo.checks import config_checks, installed, machine
from nemo_edo.cli import main

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


@pytest.fixture
def eight_gpus(monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: 8 * [H100])


def test_this_environment_is_sound_and_the_quickstart_fits_in_it(doctor):
    status, text = doctor("--config-name", "quickstart", "threads=1")
    assert (status, text.splitlines()[-1]) == (0, "ok")
    assert all(part in text for part in ("torch 2", "memory", "million parameters, fp32, one process"))


def test_the_doctor_takes_the_option_that_it_recommends_for_bad_rows(doctor, tmp_path):
    files = [f"data.{name}={write_rows(tmp_path / f'{name}.jsonl', [*rows, '{'])}"
             for name, rows in (("train", ROWS[:1]), ("test", ROWS[1:2]))]
    command = ["--config-name=grpo_gsm8k", f"model.path={write_tiny_model(tmp_path / 'model')}", *files]
    assert "--on-bad-rows=skip" in doctor(*command)[1]
    assert "bad rows" not in doctor(*command, "--on-bad-rows=skip")[1]


@pytest.fixture
def nvidia_smi(monkeypatch):
    """Lets the driver answer; returns the queries that it got."""
    def answers(**answer) -> list[list[str]]:
        queries = []
        monkeypatch.setattr(machine.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
        monkeypatch.setattr(machine.subprocess, "run",
                            lambda query, **_: queries.append(query) or SimpleNamespace(**answer))
        return queries

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return answers


@pytest.mark.parametrize(("chosen", "asked"), [
    (None, []), ("2,3", ["--id=2,3"]), ("GPU-c3", ["--id=GPU-c3"]), ("MIG-77", []), ("", None), ("-1", None)])
def test_gpus_are_those_that_the_driver_lists_and_the_process_may_use(nvidia_smi, monkeypatch, chosen, asked):
    queries = nvidia_smi(returncode=0, stdout=2 * "NVIDIA H100 80GB HBM3, 81559, 9.0\n", stderr="")
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert machine.gpus() == ([] if asked is None else 2 * [H100])
    assert [[option for option in query if option.startswith("--id")] for query in queries] == (
        [] if asked is None else [asked])


def test_a_driver_that_fails_is_a_problem(doctor, nvidia_smi):
    nvidia_smi(returncode=9, stdout="", stderr="Driver/library version mismatch")
    status, text = doctor()
    assert status == 2 and "nvidia-smi fails: Driver/library version mismatch" in text


@pytest.mark.parametrize(("needed", "message"), [
    ("no-such-package>=2", "no-such-package is not installed, needed is >=2: pip install 'no-such-package>=2'"),
    ("pyyaml<1", "pyyaml is 6"),
    ("megatron-bridge>=99", "pip install --no-deps 'megatron-bridge>=99'"),
    ("no-such-package>=2; python_version < '3'", "ok"),
])
def test_packages_that_do_not_satisfy_are_told_with_what_installs_them(doctor, monkeypatch, needed, message):
    monkeypatch.setattr(installed, "requires", lambda name: [needed])
    status, text = doctor()
    assert message in text
    assert status == (0 if message == "ok" else 2)


def test_a_config_that_fits_ends_with_zero_and_lists_what_it_lacks(doctor, eight_gpus):
    status, text = doctor(*FITS, "--gpus=8", "--gpu-memory=80GB")
    assert (status, text.splitlines()[-1]) == (0, "ok")
    assert "to be given  model.path, data.train, data.test" in text
    assert "7.62 billion parameters, bf16, tensor 2 x data 4" in text


def test_the_rows_of_auto_are_told_and_are_fewer_where_there_is_less_memory(doctor, eight_gpus):
    def rows(*arguments: str) -> str:
        told = doctor(*FITS, *arguments, "--gpus=8")[1]
        return re.search(r"^generation +(\d+ rows.*)$", told, re.MULTILINE)[1]

    auto = "generation.max_batch_size=auto"
    assert rows() == "64 rows at a time are counted (generation.max_batch_size=64)"
    most, fewer = (int(rows(auto, f"--gpu-memory={size}GB").split()[0]) for size in (140, 62))
    assert 1 < fewer < most == 512
    assert "PROBLEM" not in doctor(*FITS, auto, "--gpus=8", "--gpu-memory=62GB")[1]


def test_where_nothing_is_trained_the_weights_and_generation_alone_are_counted(doctor, eight_gpus):
    evaluation = ("--config-name", "experiment/ood/s1k_llama_cot")
    status, told = doctor(*evaluation)
    rows = dict(re.findall(r"^ *(\w[\w ]*\w) {2,}([0-9.]+)$", told, re.MULTILINE))
    assert status == 0 and "fullest in   evaluation" in told
    assert [float(rows[part]) for part in ("gradients", "optimizer", "activations", "loss layer")] == [0, 0, 0, 0]
    assert float(rows["weights"]) > 1 and float(rows["generation"]) > 1
    status, told = doctor(*evaluation, "generation=vllm", "generation.servers.urls=[http://node:8000]")
    assert status == 0 and "fullest in   nothing is trained: only servers load it" in told


def test_the_time_of_an_iteration_is_told_for_gpus_and_follows_their_number(doctor, eight_gpus):
    def seconds(*arguments: str) -> int:
        [line] = [line for line in doctor(*FITS, *arguments)[1].splitlines() if line.startswith("time ")]
        return int(line.partition("training ")[2].partition(" s")[0])

    assert seconds("--gpus=16") == pytest.approx(seconds() / 2, abs=1)
    assert "time  " not in doctor("--config-name=idpo_gsm8k", *FITS[1:3], "idpo.micro_batch_tokens=8192")[1]


@pytest.mark.parametrize(("arguments", "message"), [
    ([*FITS, "parallelism=tp8_sp"], "_size 8 does not divide the model's 28 attention heads and 4 query groups"),
    ([*FITS, "parallelism=tp2_sharded", "parallelism.pipeline_model_parallel_size=3"], "got 8"),
    ([*FITS, "model=hf"], "choose the model by its name"),
    ([*FITS, "grpo.alpha=-1"], "grpo.alpha"),
    ([*FITS, "grpo.alhpa=1"], "unknown key grpo.alhpa"),
    (["seed=1"], "seed=1: settings need --config-name"),
    *(([f"--gpu-memory={size}"], f"--gpu-memory is {size}") for size in ("80", "80MB", "-1GB")),
    ([*FITS, "--gpu-memory=40GB"], "does not fit: "), ([*FITS, "--gpu-memory=40GB"], "grpo.micro_batch_tokens=4096"),
])  # fmt: skip
def test_what_cannot_run_ends_with_two_and_says_what_to_change(doctor, arguments, message):
    status, text = doctor(*arguments, "--gpus=8")
    assert (status, message in text) == (2, True)


def test_sizes_come_from_the_models_folder_where_it_is_at_hand(doctor, tmp_path):
    fields = {"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
              "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    status, text = doctor(*FITS, "model=hf", f"model.path={tmp_path}", "--gpus=8")
    assert (status, "0.49 billion" in text) == (0, True)
    status, text = doctor(*FITS, f"model.path={tmp_path}", "--gpus=8")
    assert (status, "has num_hidden_layers 24, but model.architecture" in text) == (2, True)


def test_the_longest_sequence_is_that_of_the_problems_at_hand_and_otherwise_assumed(doctor, tmp_path):
    files = [f"model.path={write_tiny_model(tmp_path / 'model')}",
             *(f"data.{name}={write_rows(tmp_path / f'{name}.jsonl', rows)}"
               for name, rows in (("train", ROWS[:2]), ("test", [*ROWS[2:], told_sum(10)])))]
    whole = ["--config-name=grpo_gsm8k", "data.prompt='{question}'", "data.chat_template=false",
             "sampling.max_new_tokens=30"]
    assert "sequences    of 49 tokens at most (the longest prompt and sampl" in doctor(*whole, *files)[1]
    assert "sequences    of 60 tokens at most (model.seq_length)" in doctor(*whole, *files, "model.seq_length=60")[1]
    assert "sequences    of 230 tokens at most (prompts of 200 tokens are as" in doctor(*whole, *files[:2])[1]
    status, text = doctor(*whole, *files, "sampling.max_new_tokens=60")
    assert (status, "need 79 tokens, but" in text, "max_position_embeddings 64: lower sampl" in text) == (2, True, True)


@pytest.mark.parametrize(("family", "fields", "rows", "refused"), [
    ("mistral", {"sliding_window": 16}, ROWS, None),
    ("qwen3", {"attention_bias": True}, ROWS, "attention_bias is true"),
    ("llama", {"num_hidden_layers": 3}, ROWS, "model.layers.2."),
    ("llama", {}, [{"question": "1 + 1"}], "train.jsonl"),
])
def test_the_doctor_refuses_the_folder_and_the_data_that_a_run_refuses(doctor, tmp_path, family, fields, rows, refused):
    folder = write_tiny_model(tmp_path / "model", family)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "layer_types": None, **fields}))
    files = [f"data.{name}={write_rows(tmp_path / f'{name}.jsonl', some)}"
             for name, some in (("train", rows[:2]), ("test", ROWS[2:]))]
    status, text = doctor("--config-name=grpo_gsm8k", f"model.path={folder}", *files, "data.prompt='{question}'",
                          "data.chat_template=false", "sampling.max_new_tokens=10", "precision=fp32")
    assert (status, refused is None or refused in text) == (0 if refused is None else 2, True), text


def told_sum(terms: int) -> dict[str, str]:
    """A problem of 2 terms - 1 tokens."""
    return {"question": " + ".join("1" * terms), "answer": f"#### {terms}"}


def test_end_tokens_are_told_and_a_disagreement_of_the_models_files(doctor, tmp_path):
    write_tiny_model(tmp_path / "model", max_position_embeddings=4096)
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    _, text = doctor(*FITS, "model=hf", f"model.path={tmp_path / 'model'}", "--gpus=8")
    ends, disagreement = [line for line in text.splitlines() if "end token" in line][:2]
    assert all(str(token) in ends for token in (1, 7, 9)) and "disagree" in disagreement


def test_a_disk_without_room_is_a_problem_of_this_machine_only(doctor, monkeypatch, eight_gpus):
    monkeypatch.setattr(config_checks, "free_bytes", lambda folder: 10**9)
    status, text = doctor(*FITS)
    assert (status, "set output_dir to another file system" in text) == (2, True)
    assert doctor(*FITS, "--gpus=8")[0] == 0


def test_rollouts_of_a_file_at_hand_are_counted(doctor, tmp_path, eight_gpus):
    (tmp_path / "train.jsonl").write_text("{}\n" * 1000)
    text = doctor(*FITS, f"data.train={tmp_path / 'train.jsonl'}")[1]
    # 2 arms x 3 iterations x 1,000 problems x 10 samples of at most 3,584 + 512 tokens
    assert "1.4 GB of rollouts" in text
