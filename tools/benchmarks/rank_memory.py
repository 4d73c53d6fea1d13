"""The memory of each rank while the controller takes a collection through log-probability passes and a training step.

Two processes over gloo, with a tiny model. Rank 0 is the controller and holds the collection; the others only ever hold
their rows of one call.

    OMP_NUM_THREADS=1 python tools/benchmarks/rank_memory.py --rollouts 5000 10000 --tokens 2000
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from llama import write_model

PROMPT, MINIBATCH = 16, 64
ARCHITECTURE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def resident_mib(worker) -> float:
    """A call: what this rank's process holds at most, since it began."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def control(folder: Path, rollouts: int, tokens: int) -> None:
    from nemo_edo.config import GRPOConfig, LoRAConfig, ParallelismConfig, PrecisionConfig
    from nemo_edo.types import TrainingBatch
    from nemo_edo.worker.dispatch import dismiss, workers
    from nemo_edo.worker.remote import RemotePolicy
    from nemo_edo.worker.worker import Worker

    settings = {
        "folder": folder,
        "parallelism": ParallelismConfig(),
        "precision": PrecisionConfig(),
        "lora": LoRAConfig(),
        "seed": 0,
        "threads": 1,
        "attention": "auto",
        "loss_head": "auto",
        "temperature": 1.0,
    }
    training = GRPOConfig(micro_batch_size=2)
    policy = RemotePolicy(workers(), workers().call(Worker.build, training, None, settings))
    begun = workers().call(resident_mib)
    policy.freeze_reference()
    policy.start_training(1)
    length = PROMPT + tokens
    batch = TrainingBatch(torch.randint(2, 64, (rollouts, length)), torch.ones(rollouts, length - 1))
    batch.mask[:, : PROMPT - 1] = 0
    batch = batch.with_fields(old_logprobs=policy.logprobs(batch)[0], ref_logprobs=policy.reference_logprobs(batch))
    step = batch.rows(slice(MINIBATCH)).with_fields(advantages=torch.randn(MINIBATCH))
    policy.train_step(step, exploration_weight=0.1)
    ended = workers().call(resident_mib)
    for rank, (before, after) in enumerate(zip(begun, ended, strict=True)):
        print(f"{rollouts} rollouts of {tokens} tokens, rank {rank}: {before:.0f} MiB at first, {after:.0f} at most")
    dismiss()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, nargs="+", default=[5000, 10000, 20000])
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--folder", type=Path, help="of the model: given to the processes of one measurement")
    args = parser.parse_args()
    if args.folder is None:
        for rollouts in args.rollouts:
            measure(rollouts, args.tokens)
        return
    from nemo_edo.utils.quiet import quiet_libraries

    quiet_libraries()
    if os.environ["RANK"] == "0":
        control(args.folder, args.rollouts[0], args.tokens)
    else:
        from nemo_edo.worker.serve import serve

        sys.exit(serve())


def measure(rollouts: int, tokens: int) -> None:
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        write_model(Path(folder), context=PROMPT + tokens, **ARCHITECTURE)
        port = str(free.getsockname()[1])
        free.close()
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": "2"}
        command = [sys.executable, __file__, "--folder", folder, "--rollouts", str(rollouts), "--tokens", str(tokens)]
        processes = [
            subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(2)
        ]
        if any(process.wait() for process in processes):
            sys.exit("a rank has failed")


if __name__ == "__main__":
    main()
