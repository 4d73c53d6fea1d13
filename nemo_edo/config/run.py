"""The sections of a run's config."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Optional

from nemo_edo.config.checks import (
    FolderName,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Rules,
    Section,
    SettingError,
    at_least,
    one_of,
    require,
    within,
)
from nemo_edo.config.data import DataConfig, RewardsConfig
from nemo_edo.config.generation import IN_PROCESS, PLAIN, GenerationConfig
from nemo_edo.config.parallelism import ClusterConfig, LoRAConfig, ParallelismConfig, PrecisionConfig
from nemo_edo.config.reward_model import SearchLLMConfig
from nemo_edo.config.training import ArmConfig, GRPOConfig, GuardsConfig, IDPOConfig, SFTConfig

ALGORITHMS = ("grpo", "idpo")  # the algorithms that an arm can have
SFT, NONE = "sft", "none"  # the algorithms of runs without arms: the supervised training alone, and no training at all
FUSED_FROM_LOGITS = 2**26
"""Logits of a forward pass on a rank from which model.loss_head auto fuses: 256 MiB in fp32. Below, memory does not ask
for it, and the fused head's fourth matrix product is pure cost (docs/performance.md)."""


@dataclass
class ModelConfig(Section):
    """Where the policy comes from: a Hugging Face folder, or an architecture with random weights."""

    path: Optional[str] = None  # A folder with config.json, a tokenizer and safetensors weights.
    architecture: Optional[dict[str, Any]] = None
    """Fields of a Hugging Face config, ``model_type`` among them. With ``path``: the sizes that the folder's model is
    expected to have; memory is estimated from them where the folder is not on this machine. Where ``path`` is null:
    the model; the weights are random and the tokenizer is the built-in task's."""
    seq_length: Optional[PositiveInt] = None
    """The longest sequence, prompt and response together, in tokens. null: that of the run's problems: the longest
    prompt and sampling.max_new_tokens, or a longer solution of the warm-up; the run folder's config has it."""
    attention: Annotated[str, one_of("auto", "te", "sdpa", "local")] = "auto"
    """te: Transformer Engine's, on a GPU; sdpa: torch's scaled_dot_product_attention; local: Megatron's, which keeps
    every score and takes no packed sequences. auto: te where it is installed and there is a GPU, otherwise sdpa, and
    local for a model that sdpa cannot compute."""
    loss_head: Annotated[str, one_of("auto", "logits", "fused")] = "auto"
    """logits: the output layer's logits are in memory for all response tokens of a micro-batch. fused: they never are,
    which takes a fraction of the memory and a fourth matrix product. auto: fused where a forward pass would have 2^26
    logits or more on a rank, which are response tokens times vocabulary entries."""
    verify: bool = True
    """Before the training of a model that ``path`` names, compare its log-probabilities with those of transformers, and
    refuse one that differs by more than rounding. A model without room is compared by its first and last layers."""

    def rules(self) -> Rules:
        typed = self.architecture is None or "model_type" in self.architecture
        yield typed, "architecture", "fields with a model_type, for example qwen2"


@dataclass
class SamplingConfig(Section):
    """How an iteration's responses are sampled."""

    samples_per_prompt: Annotated[int, at_least(2, ": advantages compare a group")] = 10
    """Responses per problem: the size of a group."""
    temperature: Positive = 1.0  # Temperature of sampling and of every log-probability in training.
    top_p: Annotated[float, within(0, 1, "(]")] = 1.0
    """Below 1: only the most likely tokens that have this share of the probability are sampled."""
    max_new_tokens: PositiveInt = 512  # A response that has not ended after this many tokens counts as wrong.
    stop_token_ids: list[NonNegativeInt] = field(default_factory=list)
    """Tokens that end a response, besides those of the tokenizer, generation_config.json and config.json."""


@dataclass
class TrainConfig:
    """What the arms are trained on."""

    rollouts: Optional[str] = None
    """Train from stored rollouts alone: a folder with iter_00000 and so on (another run's rollouts/ARM, or what
    ``collect`` wrote), or such a folder for each arm. null: every iteration generates its samples."""
    seed: Optional[NonNegativeInt] = None
    """Seed of the arms' samples and their order; null: the run's. Runs that differ in it alone share their warm-up."""


@dataclass
class CheckpointConfig(Section):
    """What a killed run resumes from, and which policies are kept."""

    every_steps: PositiveInt = 50  # Optimizer steps between two checkpoints; one precedes each iteration as well.
    keep: PositiveInt = 2
    """Checkpoints kept of the arm in training: where the newest is damaged, the one before it is used. Of a finished
    arm, the final policy alone is kept."""
    best: Optional[str] = None
    """A metric of the evaluations, such as greedy_accuracy: the policy with the highest is kept too, as
    checkpoints/ARM.best. It needs evaluation.every. null: none is kept."""
    best_count: PositiveInt = 1
    """Policies kept by that metric; the second best and so on are checkpoints/ARM.best_iter_00003, by iteration."""
    best_mode: Annotated[str, one_of("max", "min")] = "max"  # max: the highest values are the best; min: the lowest.
    asynchronous: bool = True
    """Write checkpoints during the training, by a separate process for each rank; the ranks' copies of their shares
    stay in host memory until then. false: the next step waits until they are written."""
    reshardable: bool = True
    """Keep a distributed optimizer's state so that the run can resume at another layout. false: in Megatron's own
    buffers, which resume at the same layout only."""


@dataclass
class EarlyStopConfig(Section):
    """Ends an arm's training where its evaluations no longer improve; it is then finished, with the policy that it has
    there. ``checkpoint.best`` keeps the best one."""

    metric: Optional[str] = None
    """A metric of the evaluations, such as greedy_accuracy; it needs evaluation.every. null: arms train to the end."""
    mode: Annotated[str, one_of("max", "min")] = "max"  # max: a higher value is an improvement; min: a lower one.
    patience: PositiveInt = 3  # Evaluations in a row without improvement after which the training ends.
    min_delta: NonNegative = 0.0  # A change of at most so much is no improvement.


@dataclass
class ProfileConfig(Section):
    """A trace of where the time of an optimizer step goes."""

    steps: Optional[list[int]] = None
    """[2,4]: each arm's optimizer steps 2 and 3 (the first is 0), with what is between them, are traced by torch's
    profiler into profile/ARM.json.gz; on a GPU they are an NVTX range as well. null: no trace."""

    def rules(self) -> Rules:
        steps = self.steps
        fits = steps is None or (len(steps) == 2 and 0 <= steps[0] < steps[1])
        yield fits, "steps", "null or [FIRST, LAST] with 0 <= FIRST < LAST"


@dataclass
class EvaluationConfig(Section):
    """Greedy accuracy, self-consistency, pass@k and diversity on the test problems."""

    limit: Optional[PositiveInt] = None  # The first so many test problems alone; null: all.
    samples: PositiveInt = 10  # Responses for each problem and rollout: votes are over them, pass@k goes up to it.
    temperature: list[float] = field(default_factory=lambda: [1.0])
    """Temperatures of the sampled responses and of their entropy, whatever ``sampling.temperature`` is. Metrics at the
    first, which evaluations in training use alone, have plain names, at others a suffix: vote@10/t0.6."""
    tuning_problems: NonNegativeInt = 0
    """Training problems, the first ones, on which a final evaluation compares the temperatures by their votes; metrics
    of the test problems at the best one get the suffix /best. 0: none."""
    rollouts: PositiveInt = 3  # Independent sets of ``samples`` responses, averaged.
    every: NonNegativeInt = 0  # A short evaluation (greedy, one rollout) before every so many iterations; 0: none.
    bootstrap: PositiveInt = 2000  # Random weights, or resamples, of the problems for the 95 % intervals.
    aggregation: Annotated[str, one_of("last", "min", "product", "mean")] = "last"
    """A response's score from a reward model's scores of its steps: last (the paper's), min, product or mean."""
    vote_subsets: PositiveInt = 256
    """Subsets of k stored responses that a vote's expectation is estimated from, at least, for each problem and k."""

    def rules(self) -> Rules:
        shown = {f"{temperature:g}" for temperature in self.temperature}
        fits = bool(shown) and min(self.temperature) > 0 and len(shown) == len(self.temperature)
        yield fits, "temperature", "different numbers above 0, for example [1.0,0.6]"
        nothing = "with a single evaluation.temperature: there is nothing to choose"
        yield from self.only_if(len(shown) > 1, nothing, "tuning_problems")

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of what an evaluation measures at the first temperature."""
        sampled = ("accuracy", f"vote@{self.samples}", *(f"pass@{k}" for k in range(1, self.samples + 1)))
        distinct = (*(f"distinct_{n}" for n in range(1, 5)), "distinct_4_pooled", "distinct_answers")
        return ("greedy_accuracy", *sampled, *distinct, "answer_entropy", "entropy", "well_formed", "response_length")


@dataclass
class RunConfig(Section):
    """A run: an optional warm-up, then one training of the policy for each arm, each from the same start."""

    name: FolderName = "run"  # The run's folder is ``output_dir/name``.
    output_dir: str = "runs"  # Parent folder of the runs.
    experiment: Optional[str] = None
    """What the run reproduces: the file of ``conf/experiment/`` that it is composed from, such as
    main/gsm8k_llama3_grpo; the tables of ``tools/paper_tables`` look for it. Another, or null: a custom run."""
    seed: NonNegativeInt = 42  # Seed of the model's random weights, of sampling and of the samples' order.
    threads: Optional[PositiveInt] = None  # CPU threads of each process; null: torch's choice (torchrun sets one).
    model: ModelConfig = field(default_factory=ModelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    algorithm: Annotated[str, one_of(NONE, SFT, *ALGORITHMS)] = "grpo"
    """grpo (GRPO, ED-GRPO, DAPO) or idpo (ETO, ED-iDPO): the section that the arms start from. sft: the supervised
    training alone, without arms. none: the model is evaluated as it is."""
    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    idpo: IDPOConfig = field(default_factory=IDPOConfig)
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Variants trained from the same start: for each, its name and its differences from the section of its algorithm
    (the key ``algorithm`` of an arm chooses another one). Empty: one arm, ``policy``, with that section as it is."""
    replicate_baseline: bool = False
    """Train the baseline (the first arm that is plain GRPO or ETO, otherwise the first) once more as arm
    ``replicate``, from the same start and with another seed for its samples and their order. How far the two lie apart
    is the noise of training, which the report shows next to the differences of one seed. With train.rollouts it trains
    on the folder ``replicate`` if there is one, and otherwise differs in the order alone."""
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    search: SearchLLMConfig = field(default_factory=SearchLLMConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    allow_changed: list[str] = field(default_factory=list)
    """Inputs that may have other content than when the run began, by the setting that names them, such as data.test:
    a run resumes all the same, and its report says so."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    exp_manager: dict[str, Any] = field(default_factory=lambda: {"create_tensorboard_logger": True})
    """Passed on to NeMo's exp_manager (TensorBoard, W&B, MLflow)."""

    def rules(self) -> Rules:
        given = self.model.path is not None or self.model.architecture is not None
        yield given, "model.path", "a folder, or null and a model.architecture: give at least one of them"
        alone = f"none with algorithm {self.algorithm} (take them out with '~arms')"
        require(self.has_arms or not self.arms, "arms", list(self.arms), alone)
        yield self.algorithm != SFT or self.sft.steps > 0, "sft.steps", "a number above 0 with algorithm sft"
        nothing, untrained = self.algorithm == NONE, "with algorithm none: nothing is trained"
        yield from self.only_if(not nothing, untrained, "sft.steps", "generation.placement")
        both = nothing or self.data.source is not None or (self.data.train is None) == (self.data.test is None)
        yield both, "data.train", "a file with data.test, or neither for the built-in task"
        backend, sampling = self.generation.backend, self.sampling
        splits = ("parallelism.context_parallel_size", "parallelism.expert_model_parallel_size")
        yield from self.only_if(backend != IN_PROCESS, f"with generation.backend {IN_PROCESS}", *splits)
        plain = f"none with generation.backend {PLAIN}: it returns no log-probabilities, which training needs"
        yield backend != PLAIN or self.algorithm == NONE, "algorithm", plain
        in_fp8, gathered = self.precision.fp8_param_gather, "with precision.fp8_param_gather"
        mxfp8 = in_fp8 and self.precision.fp8_recipe == "mxfp8"
        # Only Megatron's own training loop would then copy the optimizer's weights to where they are gathered.
        lost = f"{gathered} and fp8_recipe mxfp8: a step's weights would not reach the model"
        yield from self.only_if(not mxfp8, lost, "parallelism.overlap_param_gather")
        yield from self.only_if(not in_fp8, f"{gathered}: FP8 weights lose what adapters add to them", "lora.rank")
        recorded = self.generation.routing_replay and backend == IN_PROCESS
        whole = f"with generation.routing_replay and backend {IN_PROCESS}: a stage knows only its layers' experts"
        yield from self.only_if(not recorded, whole, "parallelism.pipeline_model_parallel_size")
        length, longest = self.model.seq_length, sampling.max_new_tokens
        room = f"room for a prompt and sampling.max_new_tokens = {longest} tokens"
        yield length is None or length > longest, "model.seq_length", room
        if backend == "trtllm" or (backend == "vllm" and sampling.top_p < 1):
            # Servers have log-probabilities before the temperature, or after the cut; trtllm the former alone.
            where = f"with generation.backend {backend}"
            where += f" and sampling.top_p {sampling.top_p}" if sampling.top_p < 1 else ""
            whole = f"{where}: only there is its log-probability that of the whole distribution that is sampled"
            yield from self.only_if(False, whole, "sampling.temperature")
            yield from self.only_if(False, f"{where}: its servers know no other", "evaluation.temperature")
        for section in ("sft", "grpo", "idpo"):
            self.check_training(getattr(self, section), section)
        if self.has_arms and not self.arms:
            self.check_arm(getattr(self, self.algorithm), self.algorithm)
        metrics = self.evaluation.metrics
        for name, metric in (("checkpoint.best", self.checkpoint.best), ("early_stop.metric", self.early_stop.metric)):
            yield metric is None or metric in metrics, name, f"null or one of {', '.join(metrics)}"
            yield from self.only_if(self.has_arms, f"with algorithm {self.algorithm}, which trains no arm", name)
            during = "null, or evaluations during the training: set evaluation.every"
            yield metric is None or self.evaluation.every > 0, name, during

    @property
    def has_arms(self) -> bool:
        """Whether the run trains arms; the single unnamed arm counts."""
        return self.algorithm in ALGORITHMS

    def check_arm(self, training: ArmConfig, section: str) -> None:
        """Raises ValueError where an arm would train on responses of an earlier policy as if they were its own."""
        ahead = self.generation.one_step_off
        if not ahead and self.generation.stale != "correct":
            return  # only the policy's own responses are trained on
        stale = "generation.one_step_off" if ahead else "generation.stale=correct"
        if isinstance(training, IDPOConfig):
            algorithm = "algorithm" if section in ALGORITHMS else f"{section}.algorithm"
            raise SettingError(algorithm, "idpo", f"grpo with {stale}: iterative DPO has no importance correction")
        correction = training.sampler_correction
        require(correction != "none", f"{section}.sampler_correction", correction, f"a correction with {stale}")
        generates = self.train.rollouts is None or not ahead
        require(generates, "generation.one_step_off", True, "false with train.rollouts: nothing is generated")

    def check_training(self, training: SFTConfig | GRPOConfig | IDPOConfig, section: str) -> None:
        """Raises ValueError where a section that trains, or an arm made from it, does not fit the rest of the run."""
        tokens, length = training.micro_batch_tokens, self.model.seq_length
        if tokens is not None and length is not None:
            sequences = 2 if isinstance(training, IDPOConfig) else 1  # a pair is in one forward pass
            expected = f"null or at least {sequences} * model.seq_length = {sequences * length}"
            require(tokens >= sequences * length, f"{section}.micro_batch_tokens", tokens, expected)
        if not isinstance(training, GRPOConfig):
            return
        # With k equal to the group's size every advantage is 0.
        k, samples = training.pass_k, self.sampling.samples_per_prompt
        expected = f"null or a number below sampling.samples_per_prompt = {samples}"
        require(k is None or k < samples, f"{section}.pass_k", k, expected)
        told_apart = training.novelty_strength > 0 or training.redundancy_weighted
        parsed = not told_apart or training.solution_paths == "ngrams" or self.data.is_built_in
        expected = "ngrams: arithmetic tells apart solutions of the built-in task alone"
        require(parsed, f"{section}.solution_paths", training.solution_paths, expected)
        buffer, limit = training.overlong_buffer, self.sampling.max_new_tokens
        expected = f"null or at most sampling.max_new_tokens = {limit}"
        require(buffer is None or buffer <= limit, f"{section}.overlong_buffer", buffer, expected)


PLAIN_LABELS = ("GRPO", "ETO")  # arms without exploration or another change: what the others are compared with
START = "warmup"  # the name under which the policy that every arm starts from is evaluated
BEST = ".best"  # ends the names of an arm's best policies; none of an arm's names has it
REPLICATE = "replicate"  # the arm that ``replicate_baseline`` adds: the baseline, trained again with another seed
REPLICATE_SEED_DISTANCE = 10**9  # from the run's seed: further than the seeds of runs that anyone compares


def baseline_arm(arms: Mapping[str, ArmConfig]) -> str | None:
    """The first arm that is plain GRPO or ETO, otherwise the first; None where there is no arm."""
    plain = (name for name, settings in arms.items() if name != REPLICATE and arm_label(settings) in PLAIN_LABELS)
    return next(plain, next(iter(arms), None))


def training_seed(cfg: RunConfig) -> int:
    """The seed that tells a run's trainings from those of other runs."""
    return cfg.seed if cfg.train.seed is None else cfg.train.seed


def arm_seed(training_seed: int, arm: str) -> int:
    """The seed of an arm's samples in training, and of their order. All arms are evaluated with the run's."""
    return training_seed + (REPLICATE_SEED_DISTANCE if arm == REPLICATE else 0)


def arm_label(settings: ArmConfig) -> str:
    """What an arm is, from its settings: "GRPO", "ED-GRPO α=0.001", "GRPO, entropy bonus 0.03"."""
    plain, exploring = ("ETO", "ED-iDPO") if isinstance(settings, IDPOConfig) else ("GRPO", "ED-GRPO")
    parts = [plain]
    if settings.exploration_weight:
        alpha, coefficient = settings.effective_alpha, settings.exploration_coefficient
        parts = [f"{exploring} α={alpha:g}" if alpha is not None else f"{exploring} αβ={coefficient:g}"]
        if settings.log_ratio_floor is not None:
            parts.append(f"floor {settings.log_ratio_floor:g}")
        if settings.schedule.kind != "constant":
            parts.append(f"{settings.schedule.kind} schedule")
    if not isinstance(settings, GRPOConfig):
        return ", ".join(parts)
    explores, samples = settings.exploration_weight, settings.exploration_samples
    labels = {  # variants of the term only where it explores, then how the arm differs from GRPO otherwise
        "pure noise": explores and settings.exploration_control == "noise",
        "redundancy-weighted": explores and settings.redundancy_weighted,
        "without zero-advantage groups": explores and not settings.explore_uninformative_groups,
        "solved groups only": explores and settings.explore_solved_groups_only,
        f"on samples of the {samples} policy": explores and samples != "own",
        f"first {settings.exploration_tokens} tokens": explores and settings.exploration_tokens,
        f"entropy bonus {settings.entropy_coefficient:g}": settings.entropy_coefficient,
        settings.covariance_control: settings.covariance_control != "none",
        f"pass@{settings.pass_k}": settings.pass_k,
        f"novelty {settings.novelty_strength:g}": settings.novelty_strength,
        "dynamic sampling": settings.dynamic_sampling,
        settings.surrogate: settings.surrogate != "clip",
        "sequence ratios": settings.importance_sampling_level == "sequence",
    }
    return ", ".join(parts + [label for label, present in labels.items() if present])
