"""The NeMo scripts of examples/nemo run as they are described, in small."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow
SCRIPTS = Path(__file__).parents[2] / "examples" / "nemo"
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


def run(script: str, *arguments: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, str(SCRIPTS / script), *arguments], cwd=cwd, text=True, capture_output=True,
                          timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("script", "start"), [("gpt_sft.py", None), ("gpt_dpo.py", 0.6931)])
def test_the_model_classes_train_in_a_nemo_script_and_save_an_archive(folder: Path, script, start):
    said = run(script, "model.folder=model", "data.train=rows.jsonl", "trainer.max_steps=8",
               "model.precision.dtype=fp32", "model.training.optimizer.lr=1e-2", f"save_to={folder}/{script}.nemo",
               cwd=folder)
    losses = [float(loss) for loss in re.findall(r"^step \d loss (\S+)", said, re.MULTILINE)]
    assert len(losses) == 8 and losses[-1] < losses[0] and start in (None, losses[0])
    assert (folder / f"{script}.nemo").is_file()


@pytest.mark.parametrize("algorithm", ["grpo", "idpo"])
def test_hydra_runner_starts_a_whole_run(folder: Path, algorithm: str):
    run(f"gpt_{algorithm}.py", "model.path=model", *RUN, f"{algorithm}.iterations=1", f"+{algorithm}.minibatch_size=4",
        f"+{algorithm}.micro_batch_size=4",
        f"+{algorithm}.allow_one_step=true", cwd=folder)
    assert (folder / "runs" / f"gpt_{algorithm}" / "report.html").is_file()
