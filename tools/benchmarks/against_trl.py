"""A GRPO cycle of nemo_edo against one of TRL's GRPOTrainer: the same model, job and precision, on the CPU.

A cycle generates responses to every prompt, scores them, computes their log-probabilities under the sampling policy and
takes optimizer steps, with the usual work of either library: nemo_edo runs Algorithm 1 and writes rollouts and metrics
to disk, TRL logs nothing. TRL has the version of requirements/trl, in a separate environment. Each
library has a persistent process; each round has one cycle of nemo_edo and one of TRL, and the ratio is the median over
the rounds. The first round is a warm-up, and with --cold, for jobs whose cycles take minutes, counts like the others.
Peak memory is that of the processes, imports included.

nemo_edo uses its fastest settings: responses to one prompt share it (share_prompts, keep_groups), and pi_old's
log-probabilities are the sampler's, of which it checks a tenth (old_logprobs=sampler). With --old-logprobs trainer it
recomputes all of them, as TRL does, since a generation serves several steps; auto is nemo_edo's default.
TRL generates all responses at once, without gradient checkpointing, and computes logits of response positions only
(its default). Its micro-batch is the fastest of those that divide a step (--rows takes one without looking): each is
tried, in a process, on a step's samples and at most two of the model's layers, in a second cycle after one to warm up.

    even    1,280 responses of 28 tokens, 4 steps of 320, 0.44M parameters: responses never end by themselves
    uneven  160 responses of 1 to 192 tokens, 4 steps of 40, 10M parameters: every token ends one with probability 1/64
    real    16 prompts of 40 to 150 tokens x 8 responses of 64 tokens, 4 steps of 32, the shape of SmolLM2-135M

    python tools/benchmarks/against_trl.py --job even --precision fp32
    python tools/benchmarks/against_trl.py --job real --precision bf16 --old-logprobs trainer --rounds 3
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

from llama import write_model
from peer_environment import peer_environment
from trl_jobs import JOBS, Job

MARK = "cycle "
"""Before a worker's report on its standard output, where libraries write too."""
LEARNING_RATE = 1e-5


class Turns:
    """A worker's side of the rounds: called at the end of each cycle, it reports and waits for its next turn."""

    def __init__(self) -> None:
        self.tokens = 0
        self._begun: tuple[float, float] | None = None

    def __call__(self) -> None:
        if self._begun is not None:
            wall, cpu = (now - then for now, then in zip(clocks(), self._begun, strict=True))
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            print(MARK + json.dumps({"wall": wall, "cpu": cpu, "tokens": self.tokens, "GiB": peak}), flush=True)
        if not sys.stdin.readline():
            raise SystemExit("there are no more rounds")
        self.tokens, self._begun = 0, clocks()

    def reward(self, response: Sequence[int]) -> float:
        """1 for an odd sum of tokens: hard for any policy, and the same for both libraries."""
        self.tokens += len(response)
        return float(sum(response) % 2)


def clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def ours(job: Job, folder: Path, args: argparse.Namespace) -> None:
    from transformers import AutoTokenizer

    from nemo_edo.algorithms.grpo import GRPO
    from nemo_edo.algorithms.iteration import run_iterations
    from nemo_edo.algorithms.plan import Plan
    from nemo_edo.algorithms.services import Services
    from nemo_edo.config import SamplingConfig
    from nemo_edo.generation.in_process import InProcessSync
    from nemo_edo.generation.megatron_engine import MegatronEngine
    from nemo_edo.rollouts.store import RolloutStore
    from nemo_edo.run.metrics_log import MetricsLog
    from nemo_edo.types import Problem, ScoredRollout
    from nemo_edo.utils.quiet import quiet_libraries
    from nemo_edo.worker.remote import policy_over

    quiet_libraries()
    training = our_training(job, args)
    model = our_model(folder, training, args)
    decode = AutoTokenizer.from_pretrained(folder).decode
    engine = MegatronEngine(
        model.built, stop_ids=[job.end], decode=decode, max_batch_size=job.samples, device=model.platform_device
    )
    turns = Turns()

    class OddSum:
        def begin(self, scored, expected) -> None:
            pass

        def score(self, rollouts, problems) -> list[ScoredRollout]:
            return [ScoredRollout(r, turns.reward(r.response_ids), None, True, "sum") for r in rollouts]

    problems = [Problem(f"p-{i}", str(i), "", "", "") for i in range(len(job.prompts))]
    with tempfile.TemporaryDirectory() as scratch:
        plan = Plan(
            config=training,
            problems=problems,
            prompts={problem.id: tuple(ids) for problem, ids in zip(problems, job.prompts, strict=True)},
            sampling=SamplingConfig(samples_per_prompt=job.group, max_new_tokens=job.new_tokens),
            seed=0,
        )
        services = Services(
            policy=policy_over(model),
            engine=engine,
            weight_sync=InProcessSync(engine),
            scorer=OddSum(),
            objective=GRPO(training, {}, job.new_tokens, pad_id=0),
            store=RolloutStore(scratch),
            log=partial(MetricsLog(Path(scratch) / "metrics.jsonl", lambda *_: None), arm="grpo"),
        )
        model.start_training(plan.total_steps)
        run_iterations(services, plan, lambda t: turns())


def our_training(job: Job, args: argparse.Namespace):
    from nemo_edo.config import GRPOConfig, OptimizerConfig

    return GRPOConfig(
        alpha=0.0,
        beta=0.0,
        iterations=cycles(args),
        minibatch_size=job.minibatch,
        optimizer=OptimizerConfig(lr=LEARNING_RATE, warmup_steps=0, schedule="constant"),
        old_logprobs=args.old_logprobs,
        **job.ours,
    )


def our_model(folder: Path, training, args: argparse.Namespace):
    from nemo_edo.config import ParallelismConfig, PrecisionConfig
    from nemo_edo.models import MegatronGPTGRPOModel
    from nemo_edo.models.megatron_gpt_model import model_config

    config = model_config(
        folder,
        parallelism=ParallelismConfig(),
        precision=PrecisionConfig(dtype=args.precision),
        seed=0,
        training=training,
        threads=args.threads,
    )
    return MegatronGPTGRPOModel(config)


def theirs(job: Job, folder: Path, args: argparse.Namespace) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    torch.set_num_threads(args.threads)
    turns = Turns()

    def reward(completion_ids, **_) -> list[float]:
        return [turns.reward(response) for response in completion_ids]

    class AtEnds(TrainerCallback):
        def on_train_begin(self, *_, **__) -> None:
            turns()

        def on_step_end(self, args, state, control, **_) -> None:
            if state.global_step % job.steps == 0:
                turns()

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    texts = [" ".join(map(str, ids)) for ids in job.prompts]
    if tokenizer(texts).input_ids != job.prompts:
        raise SystemExit("TRL's prompts would not be ours: the tokenizer reads other tokens from their texts")
    with tempfile.TemporaryDirectory() as scratch:
        GRPOTrainer(
            str(folder),
            reward,
            args=their_training(job, args, scratch),
            train_dataset=Dataset.from_dict({"prompt": texts}),
            processing_class=tokenizer,
            callbacks=[AtEnds()],
        ).train()


def their_training(job: Job, args: argparse.Namespace, folder: str):
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=args.precision == "bf16",
        max_steps=job.steps * cycles(args),
        per_device_train_batch_size=args.rows,
        gradient_accumulation_steps=job.minibatch // args.processes // args.rows,
        generation_batch_size=job.samples,
        num_generations=job.group,
        max_completion_length=job.new_tokens,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        loss_type="grpo",
        beta=0.0,
        gradient_checkpointing=False,  # TRL's default would compute every forward pass twice
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


SETTINGS = ("job", "precision", "processes", "threads", "rounds", "old_logprobs", "layers", "rows")
FLAGS = ("cold", "trial")
SIDES: dict[str, Callable[..., None]] = {"ours": ours, "TRL": theirs}


def start(side: str, python: Path | str, folder: Path, args: argparse.Namespace) -> list[subprocess.Popen]:
    """Starts the processes of one side with the environment that torchrun would set."""
    from nemo_edo.generation.replica import free_port

    settings = [f"--{n.replace('_', '-')}={getattr(args, n)}" for n in SETTINGS]
    settings += [f"--{name}" for name in FLAGS if getattr(args, name)]
    environment = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": str(args.threads)}
    if args.processes > 1:
        host = "127.0.0.1"
        environment |= {"MASTER_ADDR": host, "MASTER_PORT": str(free_port(host)), "WORLD_SIZE": str(args.processes)}
    return [
        subprocess.Popen(
            [python, __file__, *settings, f"--side={side}", f"--folder={folder}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment, **({"RANK": rank, "LOCAL_RANK": rank} if args.processes > 1 else {})},
        )
        for rank in map(str, range(args.processes))
    ]


def cycle(side: str, workers: Sequence[subprocess.Popen]) -> dict[str, float]:
    """Gives a side its turn and waits for the reports of its processes."""
    give_turn(workers)
    reports = [report(side, worker) for worker in workers]
    together = {key: sum(one[key] for one in reports) for key in ("cpu", "tokens", "GiB")}
    return {"wall": max(one["wall"] for one in reports), **together}


def give_turn(workers: Sequence[subprocess.Popen]) -> None:
    for worker in workers:
        worker.stdin.write("\n")
        worker.stdin.flush()


def report(side: str, worker: subprocess.Popen) -> dict[str, float]:
    for line in worker.stdout:
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    raise SystemExit(f"{side} ended before its cycle did, with status {worker.wait()}")


def chosen(args: argparse.Namespace) -> Job:
    job = JOBS[args.job]
    layers = args.layers or job.architecture["num_hidden_layers"]
    job = replace(job, architecture={**job.architecture, "num_hidden_layers": layers})
    return job.trial if args.trial else job


def cycles(args: argparse.Namespace) -> int:
    return args.rounds + (not args.cold)


def timed(args: argparse.Namespace, interpreters: dict[str, Path | str]) -> dict[str, list[dict[str, float]]]:
    """The reports of each side's rounds."""
    job = chosen(args)
    found: dict[str, list[dict[str, float]]] = {side: [] for side in interpreters}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), context=max(map(len, job.prompts)) + job.new_tokens, end=job.end, **job.architecture)
        workers = {side: start(side, python, Path(folder), args) for side, python in interpreters.items()}
        for number in range(cycles(args)):
            for side, processes in workers.items():
                took = cycle(side, processes)
                print(f"round {number}, {side}: {took}", file=sys.stderr, flush=True)
                if number or args.cold:
                    found[side].append(took)
        for processes in workers.values():
            give_turn(processes)  # every cycle is reported; the workers end together
            for worker in processes:
                worker.communicate(timeout=120)
    return found


def fastest_rows(args: argparse.Namespace, python: Path) -> int:
    """TRL's fastest micro-batch of those that divide a process's share of a step."""
    job = chosen(args)
    fitting = [rows for rows in job.rows if job.minibatch // args.processes % rows == 0]
    seconds = {}
    for rows in fitting:
        trial = argparse.Namespace(**{**vars(args), "rows": rows, "rounds": 1, "trial": True, "cold": False})
        [report] = timed(trial, {"TRL": python})["TRL"]
        seconds[rows] = report["wall"]
    print("TRL's micro-batches: " + ", ".join(f"{rows} rows {one:.2f} s" for rows, one in seconds.items()), flush=True)
    return min(seconds, key=seconds.__getitem__)


def compare(args: argparse.Namespace) -> None:
    interpreters: dict[str, Path | str] = {"ours": sys.executable}
    if not args.ours_only:
        interpreters["TRL"] = peer_environment("trl")
        args.rows = args.rows or fastest_rows(args, interpreters["TRL"])
    found = timed(args, interpreters)
    print(
        f"{args.job}, {chosen(args).architecture['num_hidden_layers']} layers, {args.precision}, "
        f"{args.processes} processes of {args.threads} threads, {args.rounds} rounds, "
        f"pi_old by ours' {args.old_logprobs}, torch {version('torch')}"
    )
    for side, reports in found.items():
        middle = {key: statistics.median(report[key] for report in reports) for key in reports[0]}
        print(
            f"{side:5} {middle['wall']:7.2f} s, {middle['cpu']:7.2f} CPU s per cycle, {middle['tokens']:,.0f} tokens, "
            f"peak {middle['GiB']:.2f} GiB"
        )
    for measure in ("wall", "cpu", "GiB") if len(found) == 2 else ():
        ratios = [a[measure] / b[measure] for a, b in zip(*found.values(), strict=True)]
        low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
        print(f"ours / TRL's, {measure:4} {middle:.2f} ({low:.2f} to {high:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=sorted(JOBS), default="even")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--processes", type=int, default=1, help="data-parallel processes of each library")
    parser.add_argument("--threads", type=int, default=2, help="threads of each process")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--old-logprobs", choices=("auto", "sampler", "trainer"), default="sampler")
    parser.add_argument("--layers", type=int, default=0, help="fewer than the job's model has, for a quick look")
    parser.add_argument("--rows", type=int, default=0, help="of TRL's micro-batches; default: the fastest found")
    parser.add_argument("--cold", action="store_true", help="no round to warm up")
    parser.add_argument("--ours-only", action="store_true", help="no TRL: to compare numbers of processes")
    parser.add_argument("--trial", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        SIDES[args.side](chosen(args), args.folder, args)
    else:
        compare(args)


if __name__ == "__main__":
    main()
