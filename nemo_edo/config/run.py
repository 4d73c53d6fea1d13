"""The sections of a run's config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from nemo_edo.config.checks import one_of, positive, require, share
from nemo_edo.config.losses import GRPOLossConfig


@dataclass
class OptimizerConfig:
    """Megatron-core's Adam, with its learning-rate schedule."""

    lr: float = 1e-6
    """The highest learning rate."""
    min_lr: float = 0.0
    """Where the decay ends."""
    schedule: str = "constant"
    """constant, linear or cosine; the decay runs over the whole of the training."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises to ``lr``, from 0 at the first one (Megatron's schedule)."""
    weight_decay: float = 0.0
    """Decoupled from the gradient, as in AdamW."""
    adam_beta1: float = 0.9
    """Decay of the running mean of the gradient."""
    adam_beta2: float = 0.999
    """Decay of the running mean of its square."""
    adam_eps: float = 1e-8
    """Added to the denominator of the step."""
    clip_grad: float = 1.0
    """Global gradient norm; 0 switches clipping off."""

    def __post_init__(self) -> None:
        positive(self, "optimizer", "lr", "adam_eps")
        one_of("optimizer.schedule", self.schedule, ("constant", "linear", "cosine"))
        require(0 <= self.min_lr <= self.lr, "optimizer.min_lr", self.min_lr, f"a number in [0, lr = {self.lr}]")
        for name in ("warmup_steps", "weight_decay", "clip_grad"):
            require(getattr(self, name) >= 0, f"optimizer.{name}", getattr(self, name), "a number of at least 0")


@dataclass
class ModelConfig:
    """Where the policy comes from: a Hugging Face folder, or an architecture with random weights."""

    path: Optional[str] = None
    """A folder with config.json, a tokenizer and safetensors weights."""
    architecture: Optional[dict[str, Any]] = None
    """Where ``path`` is null: the fields of a Hugging Face config, ``model_type`` among them; the weights are random
    and the tokenizer is the built-in task's."""
    seq_length: int = 1024
    """The longest sequence, prompt and response together, in tokens."""

    def __post_init__(self) -> None:
        positive(self, "model", "seq_length")
        if self.architecture is not None and "model_type" not in self.architecture:
            raise ValueError("model.architecture has no model_type (for example qwen2)")


@dataclass
class PrecisionConfig:
    dtype: str = "fp32"
    """fp32, or bf16 with fp32 main weights. Log-probabilities and losses are fp32 in both."""

    def __post_init__(self) -> None:
        one_of("precision.dtype", self.dtype, ("fp32", "bf16"))


@dataclass
class ParallelismConfig:
    """Megatron's splits. The data-parallel size is what remains of the world."""

    tensor_model_parallel_size: int = 1
    """Processes that share each layer."""
    pipeline_model_parallel_size: int = 1
    """Groups of layers, each on processes of its own."""
    use_distributed_optimizer: bool = False
    """Split the optimizer's state over the data-parallel ranks."""

    def __post_init__(self) -> None:
        positive(self, "parallelism", "tensor_model_parallel_size", "pipeline_model_parallel_size")


@dataclass
class ArithmeticConfig:
    """The built-in task: sum a few numbers, merging any two of those left in each step (``data.arithmetic``)."""

    num_operands: int = 4
    """Numbers to sum."""
    max_operand: int = 9
    """The largest of them; the smallest is 0."""
    warmup_problems: int = 4096
    """Problems with noisy solutions, for the warm-up."""
    train_problems: int = 1280
    """Problems that the policy samples responses to."""
    test_problems: int = 256
    """Problems that policies are evaluated on."""
    weak_fact_share: float = 0.25
    """Share of the addition facts that the warm-up data mostly gets wrong."""
    weak_fact_accuracy: float = 0.35
    """How often the warm-up data has a weak fact right."""
    step_noise: float = 0.1
    """Share of the warm-up data's other steps whose result is wrong."""
    seed: int = 0
    """Of the problems, apart from the run's seed: runs with other seeds see the same problems."""

    def __post_init__(self) -> None:
        require(self.num_operands >= 2, "data.arithmetic.num_operands", self.num_operands, "at least 2")
        positive(self, "data.arithmetic", "max_operand", "warmup_problems", "train_problems", "test_problems")
        share(self, "data.arithmetic", "weak_fact_share", "weak_fact_accuracy", "step_noise")


@dataclass
class DataConfig:
    """Problem files in GSM8K's JSONL format. All three null: the built-in task writes them into the run folder."""

    warmup: Optional[str] = None
    """Solutions for the supervised warm-up; null: ``train``."""
    train: Optional[str] = None
    """Problems that the policy samples responses to."""
    test: Optional[str] = None
    """Problems that policies are evaluated on; the file needs another name than ``train``'s."""
    prompt: str = "{question}\n"
    """The text that precedes a response; {question} is replaced."""
    on_bad_rows: str = "error"
    """error: the first bad rows stop the run; skip: they are left out and counted."""
    arithmetic: ArithmeticConfig = field(default_factory=ArithmeticConfig)

    def __post_init__(self) -> None:
        one_of("data.on_bad_rows", self.on_bad_rows, ("error", "skip"))
        require("{question}" in self.prompt, "data.prompt", self.prompt, "a text that contains {question}")
        if (self.train is None) != (self.test is None) or (self.warmup is not None and self.train is None):
            raise ValueError("data.train and data.test: give both, or neither for the built-in task")


@dataclass
class SamplingConfig:
    """How an iteration's responses are drawn."""

    samples_per_prompt: int = 10
    """Responses to each problem, which make its group."""
    temperature: float = 1.0
    """Of sampling and of every log-probability in training."""
    top_p: float = 1.0
    """Below 1: only the most likely tokens that hold this share of the probability are drawn."""
    max_new_tokens: int = 512
    """A response that has not ended by then counts as wrong."""

    def __post_init__(self) -> None:
        samples = self.samples_per_prompt
        require(samples >= 2, "sampling.samples_per_prompt", samples, "at least 2: advantages compare a group")
        positive(self, "sampling", "temperature", "max_new_tokens")
        require(0 < self.top_p <= 1, "sampling.top_p", self.top_p, "a number in (0, 1]")


@dataclass
class GenerationConfig:
    backend: str = "megatron"
    """megatron: in the trainer's own process."""
    max_batch_size: int = 512
    """Sequences decoded at a time on one data-parallel rank."""

    def __post_init__(self) -> None:
        one_of("generation.backend", self.backend, ("megatron",))
        positive(self, "generation", "max_batch_size")


@dataclass
class SFTConfig:
    """The supervised warm-up. ``steps = 0`` leaves it out."""

    steps: int = 0
    """Optimizer steps; 0 leaves the warm-up out."""
    batch_size: int = 128
    """Solutions of one optimizer step, over all data-parallel ranks."""
    micro_batch_size: int = 8
    """Solutions of one forward pass on one rank."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))

    def __post_init__(self) -> None:
        require(self.steps >= 0, "sft.steps", self.steps, "a number of at least 0")
        positive(self, "sft", "batch_size", "micro_batch_size")


@dataclass
class GRPOConfig(GRPOLossConfig):
    """GRPO and ED-GRPO: the loss, the advantages and the loop around them."""

    entropy_coefficient: float = 0.0
    """Weight of an entropy bonus, the plain rival of the exploration term."""
    advantage_scale: str = "std"
    """std: divided by the group's standard deviation; none: not divided (Dr.GRPO)."""
    advantage_baseline: str = "mean"
    """mean of the group's rewards, or leave-one-out: the mean of the others (RLOO)."""
    iterations: int = 3
    """T of Algorithm 1: collections from a frozen policy, each followed by many optimizer steps."""
    problems_per_iteration: Optional[int] = None
    """null: every iteration samples for the whole prompt set, as in the paper. A number: for so many problems, each
    pass over the set in a new order."""
    epochs: int = 1
    """Passes over an iteration's samples."""
    minibatch_size: int = 512
    """Responses of one optimizer step, over all data-parallel ranks."""
    micro_batch_size: int = 8
    """Responses of one forward pass on one rank: memory and speed, never the result."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.entropy_coefficient >= 0, "grpo.entropy_coefficient", self.entropy_coefficient, "at least 0")
        one_of("grpo.advantage_scale", self.advantage_scale, ("std", "none"))
        one_of("grpo.advantage_baseline", self.advantage_baseline, ("mean", "leave-one-out"))
        positive(self, "grpo", "iterations", "epochs", "minibatch_size", "micro_batch_size")
        some = self.problems_per_iteration
        require(some is None or some > 0, "grpo.problems_per_iteration", some, "null or a number above 0")


@dataclass
class EvaluationConfig:
    """Greedy accuracy, self-consistency, pass@k and diversity on the test problems."""

    samples: int = 10
    """Responses for each problem and rollout, at temperature 1: votes are taken over them, pass@k goes up to it."""
    rollouts: int = 3
    """Independent sets of ``samples`` responses, averaged."""
    every: int = 0
    """A short evaluation (greedy, and one rollout) before every so many iterations, for the curves; 0: none."""
    bootstrap: int = 2000
    """Resamples of the problems for the 95 % intervals."""

    def __post_init__(self) -> None:
        positive(self, "evaluation", "samples", "rollouts", "bootstrap")
        require(self.every >= 0, "evaluation.every", self.every, "a number of at least 0")


@dataclass
class RunConfig:
    """A run: an optional warm-up, then one training of the policy for each arm, each from the same start."""

    name: str = "run"
    """The run's folder is ``output_dir/name``."""
    output_dir: str = "runs"
    """The folder that runs stand in."""
    seed: int = 42
    """Of the model's random weights, of sampling and of the order of the samples."""
    threads: Optional[int] = None
    """CPU threads of each process; null: torch's choice (torchrun sets one)."""
    model: ModelConfig = field(default_factory=ModelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Variants trained from the same start: for each, its name and its differences from ``grpo``. Empty: one arm,
    ``policy``, with ``grpo`` as it is."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    exp_manager: dict[str, Any] = field(default_factory=lambda: {"create_tensorboard_logger": True})
    """Passed on to NeMo's exp_manager (TensorBoard, W&B, MLflow)."""

    def __post_init__(self) -> None:
        require(bool(self.name) and "/" not in self.name, "name", self.name, "a folder name")
        require(self.threads is None or self.threads > 0, "threads", self.threads, "null or a number above 0")
        require(self.seed >= 0, "seed", self.seed, "a number of at least 0")
        if (self.model.path is None) == (self.model.architecture is None):
            raise ValueError("model.path and model.architecture: give exactly one of them (the other null)")
        needed = self.sampling.max_new_tokens + 1
        require(
            self.model.seq_length >= needed,
            "model.seq_length",
            self.model.seq_length,
            f"room for a prompt and sampling.max_new_tokens = {self.sampling.max_new_tokens} tokens",
        )
