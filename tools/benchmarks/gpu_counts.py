"""What training and decoding ask of a GPU, counted on the pretended device of tests/rehearsal: operators launched,
synchronisations, transfers, memory and collectives, next to a bare Megatron loop over the same model.

    python -m tests.rehearsal tools/benchmarks/gpu_counts.py --into docs/performance.md

writes the tables between that file's two marks. A number per micro-batch or token is the difference of two runs, of 1
and 2 micro-batches or of 4 and 8 tokens; what is left of them is the number per step. Models have 2 and 4 layers, and
each further layer asks for what the last two do.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest import mock

SHAPE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "max_position_embeddings": 64}
MODELS = {
    "Llama": ("llama", {}),
    # A token goes to all experts: how many have work, and so products, would otherwise depend on the numbers. Narrow,
    # as Triton's interpreter is slow.
    "Qwen3-MoE": (
        "qwen3_moe",
        {"hidden_size": 64, "num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
}
LAYERS = {"Llama": 32, "Qwen3-MoE": 48}
"""Of Llama-3-8B and Qwen3-30B-A3B."""
ROWS, LENGTH = 2, 10
"""Of a micro-batch, the same in each: so that none differs from another."""
LAYOUTS = {
    "two data-parallel": {"use_distributed_optimizer": True},
    "two tensor-parallel": {"tensor_model_parallel_size": 2},
}
PASSES = {"train_step": "nemo_edo, training", "logprobs": "nemo_edo, log pi_old",
          "reference_logprobs": "nemo_edo, log pi_ref", "bare": "Megatron, training"}  # fmt: skip
MARKS = ("<!-- gpu_counts -->", "<!-- end of gpu_counts -->")
COLUMNS = ("launches", "synchronizations", "bytes_to_device", "bytes_to_host", "collectives", "collective_bytes")


# --- counting, in a process with the device -------------------------------------------------------------------------


def totals() -> tuple[Counter[str], int]:
    """All that this process has asked for, and its peak of bytes since the last call."""
    import pretended_cuda

    now, number = pretended_cuda.counts(), pretended_cuda.collectives
    return Counter(
        {name: getattr(now, name) for name in COLUMNS[:4]}
        | {"collectives": number.total() - number["bytes"], "collective_bytes": number["bytes"]}
        | {f"operator {name}": count for name, count in pretended_cuda.operators().items()}
    ), now.peak


class Phases:
    """Counts by phase. A phase within another is not part of it."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self.peak = 0
        self._open, (self._before, _) = ["other"], totals()

    def _turn(self) -> None:
        now, peak = totals()
        self.peak = max(self.peak, peak)
        spent = self.counts.setdefault(self._open[-1], Counter())
        spent.update({name: count - self._before[name] for name, count in now.items()})
        self._before = now

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def of(self, name: str, function: Callable) -> Callable:
        @wraps(function)
        def call(*arguments, **named):
            with self.phase(name):
                return function(*arguments, **named)

        return call

    def finish(self) -> dict[str, Counter[str]]:
        self._turn()
        return self.counts


TRAINING = (
    ("megatron.packing:ModelInputs.to", "inputs"),
    ("megatron.forward_backward:_Readout.forward_step", "model, forward"),
    ("megatron.output_layer:LossHead.__call__", "output layer, log-probabilities"),
    ("models.megatron_gpt_exploring_model:MegatronGPTGRPOModel.loss", "loss and its metrics"),
    ("megatron.forward_backward:_Readout.__call__", "checks, division, sums"),
    ("megatron.forward_backward:_sum_gradients", "reduction of gradients"),
    ("megatron.forward_backward:_reduce_metrics", "metrics"),
    ("megatron.forward_backward:share_values", "metrics of tokens"),
    ("worker.worker:Worker._if_asked", "metrics of tokens"),
    ("models.megatron_gpt_exploring_model:MegatronGPTExploringModel.token_metrics", "logging"),
    ("models.megatron_gpt_model:MegatronGPTModel.prepare_for_training_step", "gradients to zero"),
    ("megatron.policy:MegatronPolicy.apply_gradients", "optimizer"),
    ("megatron.policy:any_rank", "guards"),
)
DECODING = (
    ("generation.megatron_engine:MegatronEngine._forward", "model"),
    ("generation.megatron_engine:MegatronEngine._choose", "sampling"),
    ("generation.megatron_engine:_Decoding.record", "stop tokens, lengths"),
    ("generation.megatron_engine:_Decoding.take_ended", "responses to the host"),
)


@contextlib.contextmanager
def counting(named: tuple[tuple[str, str], ...]) -> Iterator[Phases]:
    """named: functions of nemo_edo and their phases."""
    from megatron.core.pipeline_parallel import schedules

    phases = Phases()
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(
            schedules, "backward_step", phases.of("backward", schedules.backward_step)))  # fmt: skip
        for place, name in named:
            module, _, path = place.partition(":")
            *owners, attribute = path.split(".")
            owner = importlib.import_module(f"nemo_edo.{module}")
            for part in owners:
                owner = getattr(owner, part)
            function = phases.of(name, getattr(owner, attribute))
            patches.enter_context(mock.patch.object(owner, attribute, function))
        yield phases


def built(folder: Path, parallelism: dict[str, int]):
    """A policy in bf16 that trains with ED-GRPO, and its optimizer."""
    from helpers.training_settings import ED_GRPO
    from rehearsal.cases import build

    model = build(folder, replace(ED_GRPO, micro_batch_size=ROWS), parallelism=parallelism,
                  precision={"dtype": "bf16"})  # fmt: skip
    model.freeze_reference()
    model.start_training(100)
    return model


def batch_of(micro_batches: int):
    import torch

    from nemo_edo.types import TrainingBatch

    rows, generator = ROWS * micro_batches, torch.Generator().manual_seed(0)
    old, ref = (-4 - torch.rand(rows, LENGTH - 1, generator=generator) for _ in range(2))
    mask = torch.ones(rows, LENGTH - 1)
    mask[:, : LENGTH // 3] = 0
    return TrainingBatch(
        torch.randint(2, 128, (rows, LENGTH), generator=generator), mask, old_logprobs=old * mask,
        ref_logprobs=ref * mask, advantages=torch.randn(rows, generator=generator),
    )  # fmt: skip


class RankPolicy:
    """What a run's controller asks of one rank, with this rank's share of a batch."""

    def __init__(self, model) -> None:
        from megatron.core import parallel_state

        from nemo_edo.worker.worker import Worker

        self.model, self.worker, self.rank = model, Worker(), parallel_state.get_data_parallel_rank()
        self.worker.adopt(model)

    def logprobs(self, batch) -> None:
        self.worker.logprobs(self.model.shares(batch)[self.rank])

    def reference_logprobs(self, batch) -> None:
        self.worker.reference_logprobs(self.model.shares(batch)[self.rank])

    def train_step(self, batch) -> None:
        share = self.model.loss_shares(batch)[self.rank]
        metrics, tokens = self.worker.train_step(share, 0.1, math.inf)
        assert not metrics["skipped"] and math.isfinite(metrics["loss"])
        if tokens is not None:
            self.model.token_metrics(share.rows, *tokens)


def bare_step(policy, batch, phases: Phases) -> None:
    """Megatron's own training step of a language model (pretrain_gpt.py and megatron/training/training.py)."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config, unwrap_model

    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    micro_batches = [batch.rows(slice(at, at + ROWS)) for at in range(0, batch.size, ROWS)][rank::ranks]

    def forward_step(iterator, model):
        micro = next(iterator)
        with phases.phase("inputs"):
            positions = torch.arange(LENGTH - 1).expand_as(micro.mask)
            parts = (micro.tokens[:, :-1], micro.tokens[:, 1:], positions, micro.mask)
            tokens, labels, positions, mask = (
                part.contiguous().pin_memory().to(policy.device, non_blocking=True) for part in parts
            )
        with phases.phase("model, forward"):
            losses = model(tokens, positions, None, labels=labels)
        return losses, partial(loss, mask)

    def loss(mask, losses):
        with phases.phase("loss and its metrics"):
            total, count = (losses.float() * mask).sum(), mask.sum().int()
            return total, count, torch.stack([total.detach(), count])

    with phases.phase("gradients to zero"):
        policy.zero_grad()
    chunk = policy.built.training_chunks[0]
    get_model_config(chunk).finalize_model_grads_func = phases.of("reduction of gradients", finalize_model_grads)
    head, model = "output layer, log-probabilities", unwrap_model(chunk)
    with (
        mock.patch.object(model, "compute_language_model_loss", phases.of(head, model.compute_language_model_loss)),
        mock.patch.object(model.output_layer, "forward", phases.of(head, model.output_layer.forward)),
    ):
        stored = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iter(micro_batches), model=chunk,
            num_microbatches=len(micro_batches), seq_length=LENGTH - 1, micro_batch_size=ROWS, forward_only=False,
        )  # fmt: skip
    with phases.phase("optimizer"):
        policy.optimizer.step()
        policy.scheduler.step(increment=1)
    with phases.phase("metrics"):
        sums = torch.stack(stored).sum(0)
        torch.distributed.all_reduce(sums, group=parallel_state.get_data_parallel_group())
        float(sums[0] / sums[1])


def training(folder: Path, parallelism: dict[str, int]) -> dict[str, Any]:
    """Counts of each part's phases with 1 and 2 micro-batches a rank, and the peaks of memory with 2."""
    import pretended_cuda
    from megatron.core import parallel_state

    model = built(folder, parallelism)
    rank_policy, ranks = RankPolicy(model), parallel_state.get_data_parallel_world_size()
    found: dict[str, Any] = {}
    for name in ("train_step", "logprobs", "reference_logprobs", "bare"):
        for micro_batches in (1, 1, 2):  # the first one allocates what is kept
            batch = batch_of(micro_batches * ranks)
            before = pretended_cuda.counts().allocated
            with counting(TRAINING) as phases:
                if name == "bare":
                    bare_step(model.policy, batch, phases)
                else:
                    getattr(rank_policy, name)(batch)
            found[name, micro_batches], found[name, "peak"] = phases.finish(), phases.peak - before
    return found


def decoding(folder: Path, rows: int) -> dict[str, Any]:
    """Counts with 4 and 8 decoded tokens of ``rows`` responses, none of which ends before."""
    import torch
    from helpers.tiny_models import build_engine

    from nemo_edo.types import GenerationRequest, SamplingParams

    policy = built(folder, {}).policy
    engine = build_engine(policy, stop_ids=[10**6], max_batch_size=rows)
    requests = [GenerationRequest("p", row, tuple(range(20, 30)), row) for row in range(rows)]
    found: dict[str, Any] = {}
    for tokens in (4, 4, 8):
        with counting(DECODING) as phases:
            engine.generate(requests, SamplingParams(1.0, 1.0, tokens))
        found["generate", tokens] = phases.finish()
        with counting(()) as phases, torch.no_grad():
            bare_decoding(policy, rows, tokens)
        found["bare", tokens] = phases.finish()
    return found


def bare_decoding(policy, rows: int, tokens: int) -> None:
    """Megatron's forward passes with its cache, and the most likely tokens; nothing stops."""
    import torch
    from megatron.core.inference.contexts import StaticInferenceContext

    [chunk] = policy.chunks
    chunk.eval()
    context = StaticInferenceContext(rows, 10 + tokens)
    now = torch.full((rows, 10), 20, device=policy.device)
    positions = torch.arange(10, device=policy.device).expand_as(now)
    for _ in range(tokens):
        logits = chunk(now, positions, None, inference_context=context, runtime_gather_output=True)
        context.increment_sequence_len_offset(now.shape[1])
        now, positions = logits[:, -1:].argmax(-1), positions[:, -1:] + 1
    now.tolist()
    chunk.train()


def of_layers(found: dict[int, dict], layers: int) -> dict:
    """Results of ``training`` or ``decoding`` for so many layers, from those for 2 and 4; the peaks are those for 4."""

    def of_phase(few: Counter, many: Counter) -> Counter:
        return Counter({name: count + (layers - 4) / 2 * (count - few[name]) for name, count in many.items()})

    return {
        key: many
        if isinstance(many, int)
        else {phase: of_phase(found[2][key][phase], counts) for phase, counts in many.items()}
        for key, many in found[4].items()
    }


# --- tables ---------------------------------------------------------------------------------------------------------


def each_and_fixed(found: dict, name: str, few: int, many: int) -> tuple[dict[str, Counter], dict[str, Counter]]:
    """By phase: counts per micro-batch or token, and what does not depend on their number."""
    each, fixed = {}, {}
    for phase, counts in found[name, many].items():
        less = found[name, few].get(phase, Counter())
        each[phase] = Counter({key: (counts[key] - less[key]) / (many - few) for key in counts})
        fixed[phase] = Counter({key: less[key] - few * each[phase][key] for key in counts})
    return each, fixed


def total(phases: dict[str, Counter]) -> Counter:
    return Counter({key: sum(counts[key] for counts in phases.values()) for key in (*COLUMNS,)})


def write_model(folder: Path, name: str, layers: int, **fields: int) -> Path:
    from helpers.tiny_models import write_tiny_model

    kind, shape = MODELS[name]
    return write_tiny_model(folder, kind, **{**SHAPE, **shape, "num_hidden_layers": layers, **fields})


def table(head: list[str], rows: list[list[object]]) -> list[str]:
    def line(cells: list[object]) -> str:
        return f"| {' | '.join(f'{cell:,.0f}' if isinstance(cell, float) else str(cell) for cell in cells)} |"

    return [line(head), line(["---"] * len(head)), *map(line, rows), ""]


def training_tables(found: dict[str, dict]) -> list[str]:
    """found: results of ``training`` by model."""
    lines = []
    for what, place in (("a micro-batch", 0), ("the rest of an optimizer step", 1)):
        head, columns = [f"launches (synchronisations) of {what}"], []
        for model, results in found.items():
            for name, label in (("train_step", "nemo_edo"), ("bare", "Megatron")):
                head.append(f"{model}, {label}")
                columns.append(each_and_fixed(results, name, 1, 2)[place])
        names = dict.fromkeys(name for column in columns for name in column)
        rows: list[list[object]] = [[name, *(_cell(column.get(name)) for column in columns)] for name in names]
        rows = [row for row in rows if any(cell not in ("", "0") for cell in row[1:])]
        lines += table(head, [*rows, ["**all**", *(_cell(total(column)) for column in columns)]])
    rows = []
    for model, results in found.items():
        for name, label in PASSES.items():
            each, fixed = map(total, each_and_fixed(results, name, 1, 2))
            transfers = [each["bytes_to_device"], each["bytes_to_host"], fixed["bytes_to_device"]]
            rows.append([f"{model}, {label}", _cell(each), _cell(fixed), *map(float, transfers),
                         float(fixed["bytes_to_host"]), float(results[name, "peak"])])  # fmt: skip
    head = ["launches (synchronisations) and bytes", "a micro-batch", "the rest", "to the device, a micro-batch",
            "to the host", "to the device, the rest", "to the host", "peak"]  # fmt: skip
    return lines + table(head, rows)


def _cell(counts: Counter | None) -> str:
    if counts is None:
        return ""
    waits = counts["synchronizations"]
    return f"{counts['launches']:,.0f}" + (f" ({waits:,.0f})" if waits else "")


def collectives_table(found: dict[str, dict]) -> list[str]:
    """found: results of ``training`` on two ranks, by layout."""
    rows = []
    for layout, results in found.items():
        for name, label in (("train_step", "nemo_edo"), ("bare", "Megatron")):
            each, fixed = map(total, each_and_fixed(results, name, 1, 2))
            numbers = (counts[key] for counts in (each, fixed) for key in ("collectives", "collective_bytes"))
            rows.append([f"{layout}, {label}", *map(float, numbers), float(fixed["synchronizations"])])
    head = ["Llama on two ranks", "collectives, a micro-batch", "bytes", "collectives, the rest", "bytes",
            "synchronisations, the rest"]  # fmt: skip
    return table(head, rows)


def decoding_table(found: dict[str, dict]) -> list[str]:
    rows = []
    for model, results in found.items():
        for name, label in (("generate", "nemo_edo"), ("bare", "Megatron")):
            each, _ = each_and_fixed(results, name, 4, 8)
            counts = total(each)
            parts = ", ".join(f"{phase} {_cell(part)}" for phase, part in each.items() if part["launches"])
            rows.append([f"{model}, {label}", _cell(counts), parts, float(counts["bytes_to_device"]),
                         float(counts["bytes_to_host"])])  # fmt: skip
    return table(["a token of four rows", "launches (synchronisations)", "of these", "bytes to the device",
                  "bytes to the host"], rows)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--into", type=Path, help="a Markdown file with the two marks; otherwise the tables are printed"
    )
    options = parser.parse_args()
    from helpers.worker_pool import WorkerPool

    split, trained, decoded = {}, {}, {}
    with tempfile.TemporaryDirectory() as folder, WorkerPool(1, environment={}) as one:
        [path] = one.run("gpu_counts:write_model", folder=Path(folder) / "split", name="Llama", layers=2)
        with WorkerPool(2, environment={}) as two:
            for layout, parallelism in LAYOUTS.items():
                split[layout] = two.run("gpu_counts:training", folder=path, parallelism=parallelism)[0]
        for model, layers in LAYERS.items():
            name = f"{model}, {layers} layers"
            trained[name], decoded[name] = of_model(one, Path(folder) / model, model, layers)
            write(training_tables(trained) + collectives_table(split) + decoding_table(decoded), options.into)


def of_model(one, folder: Path, model: str, layers: int) -> list[dict]:
    """The results of ``training`` and of ``decoding``. one: a pool of one process."""
    few = {
        number: one.run("gpu_counts:write_model", folder=folder / str(number), name=model, layers=number)[0]
        for number in (2, 4)
    }
    results = []
    for case, how in (("training", {"parallelism": {}}), ("decoding", {"rows": 4})):
        print(f"{model}: {case}", file=sys.stderr, flush=True)
        found = {number: one.run(f"gpu_counts:{case}", folder=path, **how)[0] for number, path in few.items()}
        results.append(of_layers(found, layers))
    return results


def write(lines: list[str], into: Path | None) -> None:
    if into is None:
        print("\n".join(lines))
        return
    before, _, rest = into.read_text().partition(MARKS[0])
    _, mark, after = rest.partition(MARKS[1])
    if not mark:
        raise SystemExit(f"{into} lacks a line {' or '.join(MARKS)}")
    into.write_text(f"{before}{MARKS[0]}\n\n" + "\n".join(lines) + f"\n{MARKS[1]}{after}")


if __name__ == "__main__":
    main()
