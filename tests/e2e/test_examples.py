"""The scripts of examples/ run as they are described, those of NeMo in small."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cli import Cli, script
from helpers.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str, cwd: Path) -> str:
    return Cli(script).succeed(str(EXAMPLES / name), *arguments, cwd=cwd)


def test_own_reward_raises_its_reward(tmp_path: Path):
    said = run("own_reward.py", cwd=tmp_path)
    rewards = [float(value) for value in re.findall(r"^\d: reward (\d\.\d+)", said, re.MULTILINE)]
    assert len(rewards) == 6 and rewards[-1] > rewards[0]


def test_train_gpt_grpo_trains_an_arm_on_gsm8k_rows_and_writes_the_report(tmp_path: Path):
    for name, others in (("train", (3, 4)), ("test", (5, 6))):
        rows = [{"question": f"{a} + {b}", "answer": f"{a} + {b} = {a + b}\n#### {a + b}"}
                for a in (1, 2) for b in others]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = write_tiny_model(tmp_path / "model", "llama", max_position_embeddings=4096)
    run("train_gpt_grpo.py", "name=small", f"output_dir={tmp_path}", f"model.path={model}", "data.train=train.jsonl",
        "data.test=test.jsonl", "data.prompt='{question} = '", "model.seq_length=64", "parallelism=single",
        "precision=fp32", "threads=1", "sampling.max_new_tokens=4",
        "sampling.samples_per_prompt=2", "grpo.iterations=1", "grpo.minibatch_size=4", "grpo.micro_batch_size=4",
        "evaluation.samples=2", "evaluation.rollouts=1", "evaluation.bootstrap=10", cwd=tmp_path)
    arms = {json.loads(line)["arm"] for line in (tmp_path / "small" / "metrics.jsonl").read_text().splitlines()}
    assert {"grpo", "ed_grpo"} <= arms and (tmp_path / "small" / "report.html").is_file()


TINY = [
    "sft.steps=4", "sft.batch_size=8", "sft.micro_batch_size=8", "grpo.iterations=1", "grpo.minibatch_size=8",
    "grpo.micro_batch_size=8", "grpo.problems_per_iteration=4", "sampling.samples_per_prompt=4",
    "sampling.max_new_tokens=6", "evaluation.samples=2",
    "evaluation.rollouts=1", "evaluation.bootstrap=50", "data.arithmetic.warmup_problems=32",
    "data.arithmetic.train_problems=8", "data.arithmetic.test_problems=4", "arms=[grpo,ed_grpo]",
]  # fmt: skip


def test_the_notebook_trains_twice_in_one_kernel_which_warns_of_nothing(tmp_path: Path):
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    code, shortened = re.subn(r"^SHORT = .*$", f"SHORT = {TINY}", code, flags=re.MULTILINE)
    assert shortened == 1
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=tmp_path, text=True, capture_output=True,
                          timeout=500)
    assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
    assert len(list(tmp_path.glob("runs/notebook_*/report.html"))) == 2


# --- examples/nemo ------------------------------------------------------------------------------------------------


RUN = ["data.train=train.jsonl", "data.test=test.jsonl", "+output_dir=runs", "precision.dtype=fp32", "+threads=1",
       "parallelism.tensor_model_parallel_size=1", "+model.seq_length=128", "sampling.max_new_tokens=4",
       "sampling.samples_per_prompt=2", "+evaluation.samples=2", "+evaluation.rollouts=1", "+evaluation.bootstrap=10"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    here = tmp_path_factory.mktemp("nemo")
    write_tiny_model(here / "model", "llama", max_position_embeddings=4096)
    rows = [{"prompt": f"{a} + {b} = ", "response": str(a + b), "chosen": str(a + b), "rejected": str(a + b + 1)}
            for a in range(4) for b in range(4)]
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, last in (("train", (1, 2)), ("test", (3, 4))):
        (here / f"{name}.jsonl").write_text("".join(
            json.dumps({"question": f"{a} + {b}", "answer": f"#### {a + b}"}) + "\n" for a in (1, 2) for b in last))
    return here


@pytest.mark.parametrize(("name", "start"), [("gpt_sft.py", None), ("gpt_dpo.py", 0.6931)])
def test_the_model_classes_train_in_a_nemo_script_and_save_an_archive(folder: Path, name, start):
    said = run(f"nemo/{name}", "model.folder=model", "data.train=rows.jsonl", "trainer.max_steps=8",
               "model.precision.dtype=fp32", "model.training.optimizer.lr=1e-2", f"save_to={folder}/{name}.nemo",
               cwd=folder)
    losses = [float(loss) for loss in re.findall(r"^step \d loss (\S+)", said, re.MULTILINE)]
    assert len(losses) == 8 and losses[-1] < losses[0] and start in (None, losses[0])
    assert (folder / f"{name}.nemo").is_file()


@pytest.mark.parametrize("algorithm", ["grpo", "idpo"])
def test_hydra_runner_starts_a_whole_run(folder: Path, algorithm: str):
    run(f"nemo/gpt_{algorithm}.py", "model.path=model", *RUN, f"{algorithm}.iterations=1",
        f"+{algorithm}.minibatch_size=4", f"+{algorithm}.micro_batch_size=4", f"+{algorithm}.allow_one_step=true",
        cwd=folder)
    assert (folder / "runs" / f"gpt_{algorithm}" / "report.html").is_file()
