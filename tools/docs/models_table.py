"""Writes the tables of the models of conf/model/ into docs/models.md: their layouts on H100s, and the memory.

python tools/docs/models_table.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from generated import between_markers, model_section

from nemo_edo.checks.memory import Memory, largest, workloads
from nemo_edo.config import ModelConfig, ParallelismConfig, RunConfig
from nemo_edo.config.compose import compose_incomplete
from nemo_edo.config.model_shape import ModelShape
from nemo_edo.config.shipped import shipped_config_dir
from nemo_edo.errors import UserError
from nemo_edo.megatron.splits import check_splits, check_world

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN = "<!-- models: written by tools/docs/models_table.py -->"
END = "<!-- end of models -->"
GPU_BYTES = 80 * 10**9
GPUS = (8, 16, 64)
SEQUENCE = 4096
BASE = ["model=hf", f"model.seq_length={SEQUENCE}", "grpo.micro_batch_tokens=8192", "generation.max_batch_size=64"]
"""Settings of the config grpo_gsm8k that the tables apply to."""
RECOMPUTED = {"recompute_granularity": "full"}
LAYOUTS: list[tuple[str, dict[str, object]]] = [
    ("dp_sharded", {}),
    ("tp2_sharded", {}),
    ("tp4_sharded", {}),
    ("tp8_sp", {}),
    ("dp_sharded", RECOMPUTED),
    ("tp2_sharded", RECOMPUTED),
    ("tp4_sharded", RECOMPUTED),
    ("tp8_sp", RECOMPUTED),
    ("tp4_pp2", {}),
    ("tp8_pp2", {}),
    ("tp4_pp2", RECOMPUTED),
    ("tp8_pp2", RECOMPUTED),
    ("tp8_pp4", RECOMPUTED),
    ("tp8_sp", {**RECOMPUTED, "optimizer_offload_fraction": 1.0}),
]
"""Choices of conf/parallelism with changes, the fastest first: a model takes the first that fits."""
FAMILIES = ("qwen2_5", "qwen3", "llama3")


@dataclass(frozen=True)
class Row:
    """A model on a number of GPUs."""

    model: str
    parameters: int
    gpus: int
    overrides: list[str]
    memory: Memory
    host: int


def main() -> None:
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def updated(page: str, content: str | None = None) -> str:
    """The page with a new table (None: today's); raises ValueError as ``between_markers`` does."""
    return between_markers(page, BEGIN, END, table(list(rows())) if content is None else content)


def table(found: list[Row]) -> str:
    columns = ["weights", "gradients", "optimizer", "activations", "loss layer", "generation"]
    heads = ["model", "parameters", "GPUs", "settings", *columns, "at its highest", "host"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in found:
        parts = dict(row.memory.items())
        numbers = [_gb(parts[name]) for name in columns]
        settings = " ".join(f"`{override}`" for override in row.overrides)
        cells = [f"`{row.model}`", f"{row.parameters / 1e9:.2f} B", str(row.gpus), settings, *numbers]
        lines.append("| " + " | ".join([*cells, f"**{_gb(row.memory.total)}**", _gb(row.host)]) + " |")
    return "\n".join([*lines, ""])


def rows() -> Iterator[Row]:
    """For each model and number of GPUs, the first layout that fits. Raises ValueError where none does."""
    base, _ = compose_incomplete("grpo_gsm8k", BASE)
    for model, shape, cfg in sorted(models(base), key=lambda found: (_family(found[0]), found[1].parameters)):
        for gpus in GPUS:
            yield _row(model, shape, cfg, gpus)


def models(base: RunConfig) -> Iterator[tuple[str, ModelShape, RunConfig]]:
    """Each file of conf/model/ that names a pretrained model's sizes."""
    for path in sorted((shipped_config_dir() / "model").glob("*.yaml")):
        if path.stem.startswith(FAMILIES):
            config = ModelConfig(**model_section(path.stem), seq_length=SEQUENCE)
            yield path.stem, ModelShape.from_hf(config.architecture, path.name), replace(base, model=config)


def _row(model: str, shape: ModelShape, cfg: RunConfig, gpus: int) -> Row:
    for name, changes in LAYOUTS:
        text = (shipped_config_dir() / "parallelism" / f"{name}.yaml").read_text(encoding="utf-8")
        laid_out = replace(cfg, parallelism=ParallelismConfig(**{**yaml.safe_load(text), **changes}))
        try:
            check_world(laid_out.parallelism, gpus)
            check_splits(shape, laid_out.parallelism, shape.vocab_size)
        except UserError:
            continue
        loads = workloads(laid_out, shape, gpus)
        _, stages = largest(loads)
        fullest = max(stages, key=lambda memory: memory.total)
        if fullest.total <= GPU_BYTES:
            overrides = [f"parallelism={name}", *(f"parallelism.{key}={value}" for key, value in changes.items())]
            return Row(model, shape.parameters, gpus, overrides, fullest, max(stage.host for stage in stages))
    raise ValueError(f"no layout of {model} on {gpus} GPUs fits: add one to LAYOUTS")


def _family(model: str) -> int:
    return next(place for place, family in enumerate(FAMILIES) if model.startswith(family))


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f}"


if __name__ == "__main__":
    main()
