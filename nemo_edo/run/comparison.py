"""Before a model is trained, its log-probabilities are compared with transformers': it is the folder's, or refused."""

import math
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_edo.config import ParallelismConfig, PrecisionConfig
from nemo_edo.data.model_folder import parameters, read_fields, write_truncated
from nemo_edo.errors import UserError
from nemo_edo.types import TrainingBatch
from nemo_edo.utils.memory import available_bytes
from nemo_edo.utils.processes import end_with
from nemo_edo.worker.remote import RemotePolicy

RECORD = "comparison.json"
"""The file in the run's folder that has the comparison's result."""
ROWS, LENGTH = 2, 128
MOST_BYTES = 40 * 10**9
"""The largest model, in fp32, that is compared whole: 10 billion parameters. A larger one takes a CPU minutes."""
SINGLE, BF16_NOISES, FP8 = 0.002, 3.0, 0.06
"""Constants of ``deviation``."""


class FolderComparison:
    """A comparison that has begun: another process computes transformers' side."""

    def __init__(
        self, folder: Path, precision: PrecisionConfig, parallelism: ParallelismConfig, length: int, scratch: Path
    ) -> None:
        """folder: the model's. length: tokens that a sequence may have. scratch: for a few files, and a part of the
        model if the whole has no room; every rank sees it."""
        self._precision, self._source, self._scratch = precision, folder, scratch
        self.folder, self.layers = folder, None
        fields, needed = read_fields(folder), 4 * parameters(folder)
        if needed > min(MOST_BYTES, available_bytes() // 2):
            stages = parallelism.pipeline_model_parallel_size
            chunks = stages * (parallelism.virtual_pipeline_model_parallel_size or 1)
            self.folder = scratch / "truncated"
            self.layers = write_truncated(folder, self.folder, chunks)
        self._depth = len(self.layers or range(fields["num_hidden_layers"]))
        self._tokens = tokens(fields["vocab_size"], min(LENGTH, length))
        torch.save(self._tokens, scratch / "tokens.pt")
        rounded = "bf16" if precision.dtype == "bf16" else ""
        command = [sys.executable, "-m", "nemo_edo.run.comparison", str(self.folder), str(scratch), rounded]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # the GPUs' memory is the run's
        with (scratch / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def finish(self, policy: RemotePolicy) -> dict[str, Any]:
        """What was found. policy: of the model in ``folder``. Raises UserError where it computes something else than
        transformers, and where transformers cannot."""
        found = policy.logprobs(batch(self._tokens), temperature=1.0)[0]
        if self._process.wait():
            lines = (self._scratch / "log").read_text(encoding="utf-8", errors="replace").split("\n")
            why = next((line for line in reversed(lines) if line.strip()), f"status {self._process.returncode}")
            raise UserError(
                f"model.path is {self._source}: transformers, which its log-probabilities are compared with, cannot "
                f"compute them: {why}; model.verify=false leaves the comparison out"
            )
        value, most = deviation(found, torch.load(self._scratch / "logprobs.pt"), self._precision, self._depth)
        how = "at most" if self._precision.dtype == "fp32" else "on average"
        result = {
            "nats": value, "of": how, "bound": most, "tokens": found.numel(), "precision": self._precision.dtype,
            "layers": self.layers or self._depth, "transformers": version("transformers"),
        }  # fmt: skip
        if not value <= most:  # NaN is too far
            raise UserError(
                f"model.path is {self._source}: the log-probabilities that Megatron computes differ from transformers' "
                f"by {value:.2g} nats {how}, and rounding explains {most:.2g}: another model than the folder's would "
                "be trained; see to its config.json and to the versions (nemo-edo doctor), or set model.verify=false"
            )
        return result

    def close(self) -> None:
        """Ends the other process, and removes the files."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)


def in_words(found: dict[str, Any]) -> str:
    how = f"{found['nats']:.1e} nats {found['of']}, bound {found['bound']:.1e}"
    return f"log-probabilities of {found['tokens']} tokens are transformers' ({how})"


def deviation(found: Tensor, dense: Tensor, precision: PrecisionConfig, layers: int) -> tuple[float, float]:
    """Nats by which log-probabilities differ from transformers', and by which they may. dense: transformers' in fp32,
    and in bf16 where that is the precision.

    Rounding errors of layers are independent: those of L layers add up to sqrt(L) times one layer's.

    - fp32: the largest of all tokens. On a CPU it is below 1e-4. TF32 (precision.tf32) has numbers of 11 bits and bf16
      of 8, so that a layer's error is an eighth of bf16's 0.015 (docs/reliability.md): at most 0.002 sqrt(L), which is
      0.018 for 80 layers. Another model, at 0.05, is above.
    - bf16: the mean, since a router that rounding tips gives a token other experts. What rounding costs depends on the
      weights, so transformers' own loss from fp32 to bf16 is measured. Megatron rounds at other places: at most three
      times as much, or fp32's bound.
    - FP8: the mean, at most the ceiling of the sampler gap's guard.
    """
    far, single = (found - dense[0]).abs(), SINGLE * math.sqrt(layers)
    if precision.dtype == "fp32":
        return float(far.max()), single
    most = FP8 * math.sqrt(layers) if precision.fp8 else BF16_NOISES * float((dense[1] - dense[0]).abs().mean())
    return float(far.mean()), max(single, most)


def tokens(vocab_size: int, length: int) -> Tensor:
    """Token ids [ROWS, length]. Each row is the same random text twice: what a pretrained model predicts of the second
    depends on where the first was, so that wrong positions show."""
    half = torch.randint(vocab_size, (ROWS, math.ceil(length / 2)), generator=torch.Generator().manual_seed(0))
    return half.repeat(1, 2)[:, :length]


def batch(ids: Tensor) -> TrainingBatch:
    """All tokens but the first count."""
    return TrainingBatch(ids, torch.ones(len(ids), ids.shape[1] - 1))


def main(folder: str, out: str, rounded: str) -> None:
    """In a separate process, which takes the memory of transformers' copy with it: of the token ids in
    ``out``/tokens.pt, writes [1 or 2, B, T - 1] in fp32, followed by those in bf16 where ``rounded`` is not empty, to
    ``out``/logprobs.pt."""
    end_with(os.getppid())
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))  # torchrun leaves its processes one
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.load(Path(out) / "tokens.pt")
    found = [logprobs(model, tokens)]
    if rounded:
        found.append(logprobs(model.to(torch.bfloat16), tokens))
    torch.save(torch.stack(found), Path(out) / "logprobs.pt")


@torch.no_grad()
def logprobs(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    """Log-probabilities [B, T - 1] of tokens[:, 1:]."""
    log_p = model(tokens, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    return log_p.gather(-1, tokens[:, 1:, None]).squeeze(-1)


if __name__ == "__main__":
    main(*sys.argv[1:])
