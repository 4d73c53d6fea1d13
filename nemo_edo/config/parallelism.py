"""The sections of a config that say how a model is split over processes, and in which numbers it computes."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Optional

from nemo_edo.config.checks import (
    Constraint,
    NonNegative,
    NonNegativeInt,
    OneLine,
    Positive,
    PositiveInt,
    Rules,
    Section,
    Share,
    above,
    matching,
    one_of,
    require,
)

FP8_RECIPES = ("tensorwise", "delayed", "blockwise", "mxfp8")
RECOMPUTED = ("mlp", "moe", "moe_act", "layernorm", "core_attn", "mla_up_proj", "shared_experts")


@dataclass
class PrecisionConfig(Section):
    dtype: Annotated[str, one_of("fp32", "bf16")] = "fp32"
    """fp32, or bf16 with fp32 main weights. Log-probabilities and losses are fp32 in both."""
    tf32: bool = False
    """Whether GPUs may compute fp32 products in TF32, of 11 bits: several times as fast. Of a bf16 model it concerns
    what is kept in fp32."""
    fp8: Optional[Annotated[str, one_of("hybrid", "e4m3")]] = None
    """Number format of the layers' matrix products: hybrid, e4m3 forward and e5m2 for gradients; e4m3 for both; null:
    that of ``dtype``. It needs dtype bf16, Transformer Engine and a GPU that has them."""
    fp8_recipe: Annotated[str, one_of(*FP8_RECIPES)] = "tensorwise"
    """How tensors are scaled into FP8's range: tensorwise, each by its own maximum; delayed, by maxima of steps
    before; blockwise, in blocks of 128; mxfp8, in blocks of 32 (Blackwell)."""
    fp8_margin: NonNegativeInt = 0  # With recipe delayed: scales are smaller by 2^margin.
    fp8_amax_history_len: PositiveInt = 1024  # With recipe delayed: steps that the maximum is taken over.
    fp8_param_gather: bool = False  # Weights are kept, and gathered from the distributed optimizer, in FP8.
    bf16_layers_at_start: NonNegativeInt = 0  # Number of first layers that still compute in bf16.
    bf16_layers_at_end: NonNegativeInt = 0  # Number of last layers that still compute in bf16.

    def rules(self) -> Rules:
        fp8, delayed = self.fp8 is not None, self.fp8_recipe == "delayed"
        yield from self.only_if(fp8, "where precision.fp8 is null", "fp8_param_gather")
        yield not fp8 or self.dtype == "bf16", "dtype", f"bf16 with precision.fp8 {self.fp8}"
        # Transformer Engine reduces maxima once for all layers.
        ends = ("bf16_layers_at_start", "bf16_layers_at_end")
        yield from self.only_if(not (fp8 and delayed), "with fp8_recipe delayed", *ends)
        yield from self.only_if(not fp8 or delayed, f"with fp8_recipe {self.fp8_recipe}", "fp8_margin")


@dataclass
class ParallelismConfig(Section):
    """Megatron's splits, and what else decides how much of a model a process has. What remains is data-parallel."""

    tensor_model_parallel_size: Optional[PositiveInt] = 1
    """Processes that share each layer. null: as few as the model fits on by the doctor's estimate, usually one, with
    use_distributed_optimizer where it fits no other way; where several share it, sequence_parallel is on. The command
    finds it by the number of processes (parallelism=auto)."""
    pipeline_model_parallel_size: PositiveInt = 1  # Pipeline stages: groups of layers, each on separate processes.
    use_distributed_optimizer: bool = False  # Split the optimizer's state over the data-parallel ranks.
    sequence_parallel: bool = False
    """Tensor-parallel processes share the tokens too, where a layer works on each token alone (norms, residuals)."""
    virtual_pipeline_model_parallel_size: Optional[Annotated[int, above(1)]] = None
    """Interleaved groups of layers on each process of a pipeline: stages wait less and send more. null: one."""
    context_parallel_size: PositiveInt = 1
    """Processes that share a sequence's tokens in all layers, for long ones; needs Transformer Engine's attention."""
    expert_model_parallel_size: PositiveInt = 1
    """Data-parallel processes over which the experts of a mixture-of-experts model are split."""
    expert_tensor_parallel_size: Optional[PositiveInt] = None  # Processes per expert; null: tensor_model_parallel_size.
    overlap_grad_reduce: bool = False  # Sum gradients over data-parallel ranks during the backward pass.
    overlap_param_gather: bool = False  # Gather the distributed optimizer's changed weights in the next forward pass.
    recompute_granularity: Optional[Annotated[str, one_of("full", "selective")]] = None
    """Activations computed again in the backward pass rather than kept: full, of whole layers; selective, of
    recompute_modules. null: none."""
    recompute_modules: list[str] = field(default_factory=lambda: ["mlp"])
    """With selective, parts of a layer, by Megatron's names: mlp, moe, moe_act, layernorm, core_attn (which fused
    attention recomputes by itself), mla_up_proj, shared_experts."""
    recompute_method: Annotated[str, one_of("uniform", "block")] = "uniform"
    """With full: uniform, all layers, in pieces of recompute_num_layers; block, that many of each stage only."""
    recompute_num_layers: PositiveInt = 1  # Layers; see recompute_method.
    optimizer_offload_fraction: Share = 0.0
    """Share of the optimizer's state that is kept and updated in host memory. It needs
    use_distributed_optimizer, bf16, and a GPU with Transformer Engine."""

    def rules(self) -> Rules:
        staged = self.pipeline_model_parallel_size > 1
        one_stage = "where pipeline_model_parallel_size is 1"
        yield from self.only_if(staged, one_stage, "virtual_pipeline_model_parallel_size")
        for needed, names in {
            "use_distributed_optimizer": ("overlap_param_gather", "optimizer_offload_fraction"),
            "overlap_grad_reduce": ("overlap_param_gather",),
        }.items():
            yield from self.only_if(getattr(self, needed), f"without {needed}", *names)
        selective = self.recompute_granularity == "selective"
        unknown = set(self.recompute_modules) - set(RECOMPUTED)
        yield not unknown and (self.recompute_modules or not selective), "recompute_modules", ", ".join(RECOMPUTED)
        split = self.tensor_model_parallel_size != 1
        yield from self.only_if(split, "without tensor_model_parallel_size above 1", "sequence_parallel")

    @property
    def model_ranks(self) -> int:
        """Processes that one copy of the model is on."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def expert_ranks(self) -> int:
        """Processes that one copy of the experts is on."""
        tensor = self.expert_tensor_parallel_size or self.tensor_model_parallel_size
        return tensor * self.expert_model_parallel_size * self.pipeline_model_parallel_size


TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass
class LoRAConfig(Section):
    """LoRA (Hu et al. 2021), Megatron-Bridge's, for the warm-up and every arm. ``rank = 0`` trains all weights."""

    rank: NonNegativeInt = 0
    """Rank of the adapters, a multiple of parallelism.tensor_model_parallel_size; 0: none, all weights are trained."""
    alpha: Positive = 16.0  # Adapters add alpha / rank times their product. Not the alpha of the exploration term.
    targets: list[Annotated[str, one_of(*TARGETS)]] = field(default_factory=lambda: list(TARGETS))
    """The layers with adapters, by Megatron's names: linear_qkv (queries, keys and values), linear_proj (attention's
    output), linear_fc1 (gate and up projections), linear_fc2 (the down projection)."""
    dropout: float = 0.0
    """Must be 0: with dropout, log-probabilities of one policy would differ from pass to pass, and old and
    reference log-probabilities would be noise."""

    def rules(self) -> Rules:
        yield bool(self.targets), "targets", f"some of {', '.join(TARGETS)}"
        yield self.dropout == 0, "dropout", "0: with dropout, old and reference log-probabilities would be noise"


_VARIABLE = matching(r"[A-Za-z_][A-Za-z0-9_]*", "the name of a variable")
_SECRET = re.compile(r"(?i)(^|_)(api_?key|key|token|secret|password|passwd|credentials?)($|_)")
"""Names of variables that hold keys; none of NCCL's or torch's is like these."""
SlurmTime = Annotated[
    str, matching(r"(\d+-)?\d{1,3}:\d\d(:\d\d)?|\d+(-\d+)?", "a time as Slurm writes it: MM, HH:MM:SS or D-HH:MM:SS")
]


def slurm_seconds(time: str) -> int:
    """M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    days, _, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if not days and len(parts) < 3:
        parts = [0, *parts]
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


@dataclass
class ContainerConfig(Section):
    """What the tasks of a job run in."""

    kind: Annotated[str, one_of("none", "pyxis", "apptainer")] = "none"
    """none: the cluster's nodes as they are. pyxis: Slurm's plugin for enroot (srun --container-image). apptainer."""
    image: Optional[str] = None  # pyxis: a registry's image (nvcr.io#... or a .sqsh file); apptainer: a .sif file.
    mounts: list[Annotated[str, Constraint(lambda mount: ":" in mount, "FROM:TO")]] = field(default_factory=list)
    """FROM:TO, in addition to the folders of the run and the snapshot, which keep their paths inside."""

    def rules(self) -> Rules:
        yield (self.image is not None) == (self.kind != "none"), "image", "an image, or kind none"


@dataclass
class ClusterConfig(Section):
    """``nemo-edo launch``: the scheduler's job. It changes no number of a run."""

    kind: Annotated[str, one_of("local", "slurm")] = "local"
    """local: launch refuses, use train. slurm: an sbatch script is written and submitted."""
    nodes: PositiveInt = 1  # Nodes of the trainer.
    processes_per_node: PositiveInt = 8  # Trainer processes on each node: one for each GPU.
    server_nodes: NonNegativeInt = 0  # Nodes of generation servers, in the same job; the job has nodes + server_nodes.
    gpus_per_node: Optional[PositiveInt] = None
    """GPUs requested with --gpus-per-node; null: none are requested, as nodes include theirs or have none."""
    launcher: Annotated[str, one_of("torchrun", "srun")] = "torchrun"
    """torchrun: one task per node, whose torchrun starts the processes. srun: one task per process."""
    time_limit: Optional[SlurmTime] = None  # Slurm's --time, such as 04:00:00; null: the partition's.
    account: Optional[OneLine] = None
    partition: Optional[OneLine] = None
    qos: Optional[OneLine] = None
    options: dict[str, Any] = field(default_factory=dict)
    """Other options of sbatch: {exclusive: true, mem: 0} becomes --exclusive and --mem=0."""
    container: ContainerConfig = field(default_factory=ContainerConfig)
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of every task. They are written into the job's script: keys belong into ``secrets``."""
    secrets: list[Annotated[str, _VARIABLE]] = field(default_factory=list)
    """Names of variables, such as WANDB_API_KEY, that the job takes from ``secrets_file`` or from the shell that
    submits it. Their values are written nowhere."""
    secrets_file: Optional[str] = None
    """A file with lines NAME=VALUE, as a shell reads them, that its owner alone may read; where the site does not hand
    on the environment of the shell."""
    setup: list[str] = field(default_factory=list)  # Shell lines that begin the job, such as module load cuda.
    python: Optional[str] = None  # The tasks' interpreter; null: the one that launches, or python3 in a container.
    stop_before_s: NonNegativeInt = 300
    """Seconds before the time limit at which the run is asked to save and end; it is then queued again. 0: never."""
    requeues: NonNegativeInt = 20
    """Times that a job is queued again, after its time limit or a failure that the run did not cause. With 0, or where
    the cluster does not allow requeueing, use chain."""
    chain: PositiveInt = 1  # Jobs that are submitted one after another, each resuming where the last one ended.
    array_limit: Optional[PositiveInt] = None  # Members of a sweep at a time; null: as many as the cluster takes.
    stalled_after_s: Optional[Positive] = None
    """A run that finishes no optimizer step and no response for so many seconds is ended: every process writes its
    stack traces, and the job is queued again. With servers at least the time that a response may take. null: never. It
    also applies to train."""
    health_limit_s: NonNegative = 60.0  # Seconds for the health check of all nodes before the run; 0: no check.
    shared_folder: Optional[str] = None  # The folder that every node's health check writes to; null: the launch's.

    def rules(self) -> Rules:
        limit = None if self.time_limit is None else slurm_seconds(self.time_limit)
        expected = f"more than cluster.stop_before_s={self.stop_before_s} seconds (a number alone is of minutes)"
        yield limit is None or limit > self.stop_before_s, "time_limit", expected
        for key, value in self.options.items():
            fits = re.fullmatch(r"[a-z][a-z-]*", key) is not None and str(value).isprintable()
            require(fits, "options", f"{key}: {value}", "an option of sbatch without its dashes, on one line")
        for name in self.environment:
            require(_VARIABLE.holds(name), "environment", name, _VARIABLE.expected)
            expected = "no key, which files of the job would hold; name it in cluster.secrets"
            require(_SECRET.search(name) is None, "environment", name, expected)
