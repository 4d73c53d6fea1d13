"""ED-iDPO (iterative DPO on pairs of the policy's samples) as a NeMo script, as gpt_grpo.py.

torchrun --nproc-per-node 8 examples/nemo/gpt_idpo.py model.path=/models/llama3-8b \
    data.train=/data/train.jsonl data.test=/data/test.jsonl
"""

from gpt_grpo import run
from nemo.core.config import hydra_runner
from omegaconf import DictConfig


@hydra_runner(config_path="conf", config_name="gpt_idpo")
def main(cfg: DictConfig) -> None:
    run(cfg)


if __name__ == "__main__":
    main()
