"""What ``nemo-edo doctor`` prints and with which status it ends."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from nemo_edo.cli import main
from nemo_edo.doctor import machine, report

H100 = "NVIDIA H100 80GB HBM3, 81559, 9.0\n"
FITS = ["--config-name=grpo_gsm8k", "model=qwen2_5_7b", "parallelism=tp2_sharded", "grpo.micro_batch_tokens=8192",
        "generation.max_batch_size=64"]


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
    monkeypatch.setattr(machine, "gpus", lambda: machine.parse_gpus(8 * H100))


# --- the machine ----------------------------------------------------------------------------------------------------


def test_this_environment_is_sound(doctor):
    status, text = doctor()
    assert (status, text.splitlines()[-1]) == (0, "ok")
    assert "torch 2" in text and "memory" in text


def test_gpus_are_those_that_the_driver_lists():
    assert machine.parse_gpus(2 * H100) == 2 * [machine.Gpu("NVIDIA H100 80GB HBM3", 81559 * 2**20, "9.0")]
    assert machine.parse_gpus("\n") == []


@pytest.mark.parametrize(("answer", "status", "message"), [
    (SimpleNamespace(returncode=0, stdout=H100, stderr=""), 0, "NVIDIA H100 80GB HBM3, 85.5 GB"),
    (SimpleNamespace(returncode=9, stdout="", stderr="Driver/library version mismatch"), 2, "nvidia-smi fails: Driver"),
])
def test_a_driver_that_fails_is_a_problem(doctor, monkeypatch, answer, status, message):
    monkeypatch.setattr(machine.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(machine.subprocess, "run", lambda *args, **kwargs: answer)
    assert doctor()[0] == status
    assert message in doctor()[1]


@pytest.mark.parametrize(("needed", "message"), [
    ("no-such-package>=2", "no-such-package is not installed, needed is >=2: pip install 'no-such-package>=2'"),
    ("pyyaml<1", "pyyaml is 6"),
    ("megatron-bridge>=99", "pip install --no-deps 'megatron-bridge>=99'"),
    ("no-such-package>=2; python_version < '3'", "ok"),
])
def test_packages_that_do_not_satisfy_are_told_with_what_installs_them(doctor, monkeypatch, needed, message):
    monkeypatch.setattr(machine, "requires", lambda name: [needed])
    status, text = doctor()
    assert message in text
    assert status == (0 if message == "ok" else 2)


# --- a config -------------------------------------------------------------------------------------------------------


def test_the_quickstart_fits_on_this_machine(doctor):
    status, text = doctor("--config-name", "quickstart", "threads=1")
    assert status == 0, text
    assert "million parameters, fp32, one process" in text


def test_a_config_that_fits_ends_with_zero_and_lists_what_it_lacks(doctor, eight_gpus):
    status, text = doctor(*FITS, "--gpus=8", "--gpu-memory=80GB")
    assert (status, text.splitlines()[-1]) == (0, "ok")
    assert "to be given  model.path, data.train, data.test" in text
    assert "7.62 billion parameters, bf16, tensor 2 x data 4" in text


def test_where_nothing_is_trained_the_weights_and_generation_alone_are_counted(doctor, eight_gpus):
    evaluation = ("--config-name", "experiment/ood/s1k_llama_cot")
    status, told = doctor(*evaluation)
    rows = dict(re.findall(r"^(\w[\w ]*\w) {2,}([0-9.]+)$", told, re.MULTILINE))
    assert status == 0 and "fullest in   evaluation\n" in told
    assert [float(rows[part]) for part in ("gradients", "optimizer", "activations", "loss layer")] == [0, 0, 0, 0]
    assert float(rows["weights"]) > 1 and float(rows["generation"]) > 1
    status, told = doctor(*evaluation, "generation=vllm", "generation.servers.urls=[http://node:8000]")
    assert status == 0 and "servers alone hold it" in told and "fullest" not in told


def test_the_time_of_an_iteration_is_told_for_gpus_and_follows_their_number(doctor, eight_gpus):
    def seconds(*arguments: str) -> int:
        [line] = [line for line in doctor(*FITS, *arguments)[1].splitlines() if line.startswith("time ")]
        return int(line.partition("training ")[2].partition(" s")[0])

    assert seconds("--gpus=16") == pytest.approx(seconds() / 2, abs=1)
    assert "time  " not in doctor("--config-name=idpo_gsm8k", *FITS[1:3], "idpo.micro_batch_tokens=8192")[1]


def test_a_config_that_does_not_fit_ends_with_two_and_says_what_to_change(doctor):
    status, text = doctor(*FITS, "--gpus", "8", "--gpu-memory", "40GB")
    assert status == 2
    assert "does not fit: " in text and "GB of 40.0. What to change:" in text
    assert "grpo.micro_batch_tokens=4096" in text and "with all of it:" in text


@pytest.mark.parametrize(("overrides", "message"), [
    (["parallelism=tp8_sp"], "_size 8 does not divide the model's 28 attention heads and 4 query groups; 1, 2, 4 "),
    (["parallelism=tp2_sharded", "parallelism.pipeline_model_parallel_size=3"], "8 processes cannot be split"),
    (["model=hf"], "choose the model by its name"),
    (["grpo.alpha=-1"], "grpo.alpha"),
    (["grpo.alhpa=1"], "unknown key grpo.alhpa"),
])
def test_what_cannot_run_is_told_in_one_message(doctor, overrides, message):
    status, text = doctor(*FITS, *overrides, "--gpus=8")
    assert status == 2
    assert message in text


def test_sizes_come_from_the_models_folder_where_it_is_at_hand(doctor, tmp_path):
    fields = {"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
              "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    status, text = doctor(*FITS, "model=hf", f"model.path={tmp_path}", "--gpus=8")
    assert (status, "0.49 billion" in text) == (0, True)
    status, text = doctor(*FITS, f"model.path={tmp_path}", "--gpus=8")
    assert (status, "has num_hidden_layers 24, but model.architecture" in text) == (2, True)


def test_a_disk_without_room_is_a_problem_of_this_machine_only(doctor, monkeypatch, eight_gpus):
    monkeypatch.setattr(report, "free_bytes", lambda folder: 10**9)
    status, text = doctor(*FITS)
    assert (status, "set output_dir to another file system" in text) == (2, True)
    assert doctor(*FITS, "--gpus=8")[0] == 0


def test_rollouts_of_a_file_at_hand_are_counted(doctor, tmp_path, eight_gpus):
    (tmp_path / "train.jsonl").write_text("{}\n" * 1000)
    text = doctor(*FITS, f"data.train={tmp_path / 'train.jsonl'}")[1]
    # 2 arms x 3 iterations x 1,000 problems x 10 samples of at most 3,584 + 512 tokens
    assert "1.4 GB of rollouts" in text


def test_overrides_without_a_config_are_refused(doctor):
    status, text = doctor("seed=1")
    assert (status, "Name it with --config-name" in text) == (2, True)


@pytest.mark.parametrize(("text", "size"), [("80GB", 80 * 10**9), ("80 GiB", 80 * 2**30), ("0.5gb", 5 * 10**8)])
def test_sizes_are_decimal_or_binary_as_written(text: str, size: int):
    assert report.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["80", "GB", "80MB", "-1GB"])
def test_other_sizes_are_refused(text: str):
    with pytest.raises(ValueError, match="is not a size such as 80GB"):
        report.parse_bytes(text)


def test_many_stages_show_the_first_and_the_last():
    parts = report.Memory(*8 * [10**9])
    lines = report.memory_table(16 * [parts], 10**10)
    assert lines[0].split()[1:] == [word for place in (0, 1, 2, 3, 12, 13, 14, 15) for word in ("stage", str(place))]


def test_a_config_is_diagnosed_without_torch(tmp_path):
    code = ("import sys; from nemo_edo.cli import main; status = main(sys.argv[1:]); "
            "sys.exit(status or ('torch' in sys.modules and 'torch') or 0)")
    command = [sys.executable, "-c", code, "doctor", *FITS, "--gpus=8"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
