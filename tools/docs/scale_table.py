"""Writes the tables of docs/models.md: published runs with our estimates, and estimates for this project.

python tools/docs/scale_table.py
"""

from __future__ import annotations

from pathlib import Path

from generated import between_markers, model_section

from nemo_edo.checks.iteration_time import Iteration, generation_seconds, iteration_times
from nemo_edo.checks.memory import largest, workloads
from nemo_edo.config.compose import compose_incomplete
from nemo_edo.config.model_shape import ModelShape

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
PUBLISHED = ("<!-- published: written by tools/docs/scale_table.py -->", "<!-- end of published -->")
ESTIMATES = ("<!-- estimates: written by tools/docs/scale_table.py -->", "<!-- end of estimates -->")
PROMPT = 100
"""Assumed for OpenMathInstruct-2: the publication does not give the prompts' length."""


def shape(model: str) -> ModelShape:
    return ModelShape.from_hf(model_section(model)["architecture"], model)


def nemo_rl(model: str, gpus: int, server: int, length: int, *, overlapped: bool = False) -> Iteration:
    """A GRPO step of 2,048 responses; one step off policy, half of the GPUs are the servers'."""
    share = gpus // 2 if overlapped else gpus
    sizes = {"samples": 2048, "prompt": PROMPT, "response": length - PROMPT, "longest": 4096 - PROMPT}
    return Iteration(shape(model), share, share, server, overlapped=overlapped, **sizes)


# (what, plan, seconds of a step): NeMo RL 0.4's performance summary, DGX H100, BF16, GRPO on OpenMathInstruct-2.
STEPS = [
    ("Llama 3.1 8B, 16 GPUs", nemo_rl("llama3_1_8b", 16, 1, 1060), 97.7),
    ("Llama 3.1 8B, 16 GPUs, one step off", nemo_rl("llama3_1_8b", 16, 1, 1129, overlapped=True), 74.6),
    ("Qwen3 32B, 32 GPUs", nemo_rl("qwen3_32b", 32, 4, 3206), 393.0),
    ("Qwen3 32B, 64 GPUs, one step off", nemo_rl("qwen3_32b", 64, 4, 3207, overlapped=True), 215.0),
    ("Qwen3 30B-A3B, 32 GPUs", nemo_rl("qwen3_30b_a3b", 32, 4, 3154), 225.0),
]
# (what, plan, output tokens per second and GPU): TensorRT-LLM's performance overview, H100, FP8, 3,000 and 1,500
# requests at a time.
DECODING = [
    (
        "Llama 3.3 70B FP8, TP 2, 1,000 in and 1,000 out",
        Iteration(shape("llama3_1_70b"), 2, 2, 2, 3000, 1000, 1000, 1000, fp8=True, server_fp8=True),
        2209.0,
    ),
    (
        "Llama 3.3 70B FP8, TP 2, 8,192 in and 1,024 out",
        Iteration(shape("llama3_1_70b"), 2, 2, 2, 1500, 8192, 1024, 1024, fp8=True, server_fp8=True),
        398.0,
    ),
]


def published() -> list[tuple[str, str, float, float]]:
    """(What, unit, published, estimated)."""
    rows = [(what, "s a step", seconds, iteration_times(plan).total) for what, plan, seconds in STEPS]
    for what, plan, speed in DECODING:
        tokens = plan.samples * plan.response / plan.server_gpus
        rows.append((what, "tokens/s for each GPU", speed, tokens / generation_seconds(plan)))
    return rows


BASE = ["model=hf", "grpo.micro_batch_tokens=8192", "generation.max_batch_size=64"]
PLANS = [  # model, GPUs, parallelism, servers' tensor-parallel size, plan
    ("llama3_1_8b", 16, "tp2_sharded", 1),
    ("llama3_1_70b", 64, "tp8_pp2", 4),
    ("llama3_1_70b", 512, "tp8_pp2", 4),
]
JOBS = {
    "GSM8K, 5,120 responses of 200 tokens, 512 at most": {
        "samples": 5120,
        "prompt": 100,
        "response": 200,
        "longest": 512,
    },
    "reasoning, 5,120 responses of 4,000 tokens, 10,000 at most": {
        "samples": 5120,
        "prompt": 200,
        "response": 4000,
        "longest": 10_000,
    },
}


def estimates() -> list[list[str]]:
    rows = []
    for model, gpus, parallelism, server in PLANS:
        base = [
            "model=hf",
            "model.seq_length=4096",
            "grpo.micro_batch_tokens=8192",
            "generation.max_batch_size=64",
            f"parallelism={parallelism}",
        ]
        cfg, _ = compose_incomplete("grpo_gsm8k", base)
        loads = workloads(cfg, shape(model), gpus)
        memory = max(stage.total for stage in largest(loads)[1])
        for job, sizes in JOBS.items():
            times = iteration_times(Iteration(shape(model), gpus, gpus, server, **sizes))
            parts = (times.generation, times.logprobs, times.training, times.refit, times.total)
            numbers = [f"{seconds:,.1f}" for seconds in parts]
            cells = [f"`{model}`", f"{gpus}", f"`{parallelism}`", f"TP {server}", job, f"{memory / 1e9:.0f}", *numbers]
            rows.append([*cells, f"{times.tokens_per_gpu:,.0f}"])
    return rows


def updated(page: str) -> str:
    lines = [
        f"| {what} | {unit} | {there:,.1f} | {here:,.1f} | {here / there:.2f} |"
        for what, unit, there, here in published()
    ]
    head = ["| run | measure | published | estimated | ratio |", "|---|---|---|---|---|"]
    page = between_markers(page, *PUBLISHED, "\n".join([*head, *lines, ""]))
    columns = [
        "model",
        "GPUs",
        "trainer",
        "servers",
        "an iteration",
        "GB a GPU",
        "generation s",
        "log-probs s",
        "training s",
        "refit s",
        "all s",
        "tokens/s/GPU",
    ]
    lines = [columns, ["---"] * len(columns), *estimates()]
    return between_markers(page, *ESTIMATES, "\n".join([*(f"| {' | '.join(cells)} |" for cells in lines), ""]))


def main() -> None:
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
