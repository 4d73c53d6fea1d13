"""ED-GRPO as a NeMo script by hydra_runner: the whole run of ``nemo-edo train``, from rollouts to the report.

torchrun --nproc-per-node 8 examples/nemo/gpt_grpo.py model.path=/models/llama3-8b \
    data.train=/data/train.jsonl data.test=/data/test.jsonl
"""

import sys
import tempfile
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra
from nemo.core.config import hydra_runner
from omegaconf import DictConfig, OmegaConf

from nemo_edo.cli import main as nemo_edo


def run(cfg: DictConfig) -> None:
    """``nemo-edo train`` with the composed config; ends the process with its status."""
    with tempfile.TemporaryDirectory() as folder:
        OmegaConf.save(cfg, Path(folder) / "run.yaml")
        GlobalHydra.instance().clear()  # hydra_runner's, which is done: the run composes its config again
        status = nemo_edo(["train", "--config-path", folder, "--config-name", "run"])
    sys.exit(status)


@hydra_runner(config_path="conf", config_name="gpt_grpo")
def main(cfg: DictConfig) -> None:
    run(cfg)


if __name__ == "__main__":
    main()
