"""The sections of a run's config."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Optional

from nemo_edo.config.checks import folder_name, one_of, positive, require
from nemo_edo.config.cluster import ClusterConfig
from nemo_edo.config.data import DataConfig, RewardsConfig
from nemo_edo.config.generation import IN_PROCESS, GenerationConfig
from nemo_edo.config.parallelism import LoRAConfig, ParallelismConfig, PrecisionConfig
from nemo_edo.config.search import SearchLLMConfig
from nemo_edo.config.training import GRPOConfig, GuardsConfig, IDPOConfig, LoopConfig, SFTConfig

ALGORITHMS = ("grpo", "idpo")
"""The algorithms that an arm can have."""
SFT, NONE = "sft", "none"
"""The algorithms of runs without arms: the supervised training alone, and no training at all."""
FUSED_FROM_LOGITS = 2**26
"""Logits of a forward pass on a rank from which model.loss_head auto fuses: 256 MiB in fp32. Below, memory does not ask
for it, and the fused head's fourth matrix product is pure cost (docs/performance.md)."""


@dataclass
class ModelConfig:
    """Where the policy comes from: a Hugging Face folder, or an architecture with random weights."""

    path: Optional[str] = None
    """A folder with config.json, a tokenizer and safetensors weights."""
    architecture: Optional[dict[str, Any]] = None
    """Fields of a Hugging Face config, ``model_type`` among them. With ``path``: the sizes that the folder's model is
    expected to have; memory is estimated from them where the folder is not on this machine. Where ``path`` is null:
    the model; the weights are random and the tokenizer is the built-in task's."""
    seq_length: Optional[int] = None
    """The longest sequence, prompt and response together, in tokens. null: that of the run's problems, which is the
    longest prompt and sampling.max_new_tokens, or a longer solution that the warm-up learns; the run folder's config
    has the number."""
    attention: str = "auto"
    """te: Transformer Engine's, on a GPU; sdpa: torch's scaled_dot_product_attention; local: Megatron's, which keeps
    every score and takes no packed sequences. auto: te where it is installed and there is a GPU, otherwise sdpa, and
    local for a model that sdpa cannot compute."""
    loss_head: str = "auto"
    """logits: the output layer's logits are in memory for all response tokens of a micro-batch. fused: they never are,
    which takes a fraction of the memory and a fourth matrix product. auto: fused where a forward pass would have 2^26
    logits or more on a rank, which are response tokens times vocabulary entries."""

    def __post_init__(self) -> None:
        if self.seq_length is not None:
            positive(self, "model", "seq_length")
        one_of("model.attention", self.attention, ("auto", "te", "sdpa", "local"))
        one_of("model.loss_head", self.loss_head, ("auto", "logits", "fused"))
        if self.architecture is not None and "model_type" not in self.architecture:
            raise ValueError("model.architecture has no model_type (for example qwen2)")


@dataclass
class SamplingConfig:
    """How an iteration's responses are sampled."""

    samples_per_prompt: int = 10
    """Responses per problem: the size of a group."""
    temperature: float = 1.0
    """Temperature of sampling and of every log-probability in training."""
    top_p: float = 1.0
    """Below 1: only the most likely tokens that have this share of the probability are sampled."""
    max_new_tokens: int = 512
    """A response that has not ended after this many tokens counts as wrong."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a response as well. The end tokens of the tokenizer, of generation_config.json and of
    config.json always do."""

    def __post_init__(self) -> None:
        samples = self.samples_per_prompt
        require(samples >= 2, "sampling.samples_per_prompt", samples, "at least 2: advantages compare a group")
        positive(self, "sampling", "temperature", "max_new_tokens")
        require(0 < self.top_p <= 1, "sampling.top_p", self.top_p, "a number in (0, 1]")
        negative = [token for token in self.stop_token_ids if token < 0]
        require(not negative, "sampling.stop_token_ids", self.stop_token_ids, "token ids, which are 0 or more")


@dataclass
class TrainConfig:
    """What the arms are trained on."""

    rollouts: Optional[str] = None
    """Train from stored rollouts alone: a folder with iter_00000 and so on (another run's rollouts/ARM, or what
    ``collect`` wrote), or such a folder for each arm. null: every iteration generates its samples."""


@dataclass
class CheckpointConfig:
    """What a killed run resumes from, and which policies are kept."""

    every_steps: int = 50
    """Optimizer steps between two checkpoints; there is one before each iteration as well."""
    keep: int = 2
    """Checkpoints kept of the arm in training: where the newest is damaged, the one before it is used. Of a finished
    arm, the final policy alone is kept."""
    best: Optional[str] = None
    """A metric of the evaluations, such as greedy_accuracy: the policy with the highest is kept too, as
    checkpoints/ARM.best. It needs evaluation.every. null: none is kept."""
    best_count: int = 1
    """Policies kept by that metric; the second best and so on are checkpoints/ARM.best_iter_00003, by iteration."""
    best_mode: str = "max"
    """max: the highest values are the best; min: the lowest."""
    asynchronous: bool = True
    """Write checkpoints during the training, by a separate process for each rank; the ranks' copies of their shares
    stay in host memory until then. false: the next step waits until they are written."""
    reshardable: bool = True
    """Keep a distributed optimizer's state so that the run can resume at another layout. The first data-parallel rank
    gathers that of all of them in host memory. false: each rank writes its own part, which is faster and resumes at
    the same layout only."""

    def __post_init__(self) -> None:
        positive(self, "checkpoint", "every_steps", "keep", "best_count")
        one_of("checkpoint.best_mode", self.best_mode, ("max", "min"))


@dataclass
class EarlyStopConfig:
    """Ends an arm's training where its evaluations no longer improve; it is then finished, with the policy that it has
    there. ``checkpoint.best`` keeps the best one."""

    metric: Optional[str] = None
    """A metric of the evaluations, such as greedy_accuracy. It needs evaluation.every. null: every arm trains to its
    last iteration."""
    mode: str = "max"
    """max: a higher value is an improvement; min: a lower one."""
    patience: int = 3
    """Evaluations in a row without improvement after which the training ends."""
    min_delta: float = 0.0
    """A change of at most so much is no improvement."""

    def __post_init__(self) -> None:
        positive(self, "early_stop", "patience")
        one_of("early_stop.mode", self.mode, ("max", "min"))
        fits = math.isfinite(self.min_delta) and self.min_delta >= 0
        require(fits, "early_stop.min_delta", self.min_delta, "a number of at least 0")


@dataclass
class ProfileConfig:
    """A trace of where the time of an optimizer step goes."""

    steps: Optional[list[int]] = None
    """[2,4]: each arm's optimizer steps 2 and 3 (the first is 0), with what is between them, are traced by torch's
    profiler into profile/ARM.json.gz; on a GPU they are an NVTX range as well. null: no trace."""

    def __post_init__(self) -> None:
        steps = self.steps
        fits = steps is None or (len(steps) == 2 and 0 <= steps[0] < steps[1])
        require(fits, "profile.steps", steps, "null or [FIRST, LAST] with 0 <= FIRST < LAST")


@dataclass
class EvaluationConfig:
    """Greedy accuracy, self-consistency, pass@k and diversity on the test problems."""

    samples: int = 10
    """Responses for each problem and rollout: votes are taken over them, pass@k goes up to it."""
    temperature: list[float] = field(default_factory=lambda: [1.0])
    """Temperatures of the sampled responses and of their entropy, whatever ``sampling.temperature`` is. Metrics at the
    first have plain names, at any other its suffix: vote@10/t0.6. Evaluations during the training use the first
    alone."""
    tuning_problems: int = 0
    """Training problems, the first ones, on which a final evaluation compares the temperatures by their votes; metrics
    of the test problems at the best one get the suffix /best. 0: none."""
    rollouts: int = 3
    """Independent sets of ``samples`` responses, averaged."""
    every: int = 0
    """A short evaluation (greedy, and one rollout) before every so many iterations, for the curves; 0: none."""
    bootstrap: int = 2000
    """Random weights, or resamples, of the problems for the 95 % intervals."""
    aggregation: str = "last"
    """The one score of a response from a reward model's scores of its steps: last (the paper's), min, product or
    mean."""
    vote_subsets: int = 256
    """Subsets of k stored responses that a vote's expectation is estimated from, at least, for each problem and k."""

    def __post_init__(self) -> None:
        positive(self, "evaluation", "samples", "rollouts", "bootstrap", "vote_subsets")
        one_of("evaluation.aggregation", self.aggregation, ("last", "min", "product", "mean"))
        for name in ("every", "tuning_problems"):
            require(getattr(self, name) >= 0, f"evaluation.{name}", getattr(self, name), "a number of at least 0")
        shown = [f"{temperature:g}" for temperature in self.temperature]
        fits = bool(shown) and min(self.temperature) > 0 and len({*shown}) == len(shown)
        require(fits, "evaluation.temperature", self.temperature, "different numbers above 0, for example [1.0,0.6]")
        tunes, several = self.tuning_problems > 0, len(shown) > 1
        expected = "0 with a single evaluation.temperature: there is nothing to choose"
        require(several or not tunes, "evaluation.tuning_problems", self.tuning_problems, expected)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of what an evaluation measures at the first temperature."""
        sampled = ("accuracy", f"vote@{self.samples}", *(f"pass@{k}" for k in range(1, self.samples + 1)))
        diversity = ("distinct_4", "distinct_4_pooled", "distinct_answers", "answer_entropy", "entropy")
        return ("greedy_accuracy", *sampled, *diversity, "well_formed", "response_length")


@dataclass
class RunConfig:
    """A run: an optional warm-up, then one training of the policy for each arm, each from the same start."""

    name: str = "run"
    """The run's folder is ``output_dir/name``."""
    output_dir: str = "runs"
    """Parent folder of the runs."""
    experiment: Optional[str] = None
    """What the run reproduces: the file of ``conf/experiment/`` that it is composed from, such as
    main/gsm8k_llama3_grpo; the tables of ``nemo-edo report --table`` look for it. Another name, or null: a custom
    run."""
    seed: int = 42
    """Seed of the model's random weights, of sampling and of the samples' order."""
    threads: Optional[int] = None
    """CPU threads of each process; null: torch's choice (torchrun sets one)."""
    model: ModelConfig = field(default_factory=ModelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    algorithm: str = "grpo"
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
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    exp_manager: dict[str, Any] = field(default_factory=lambda: {"create_tensorboard_logger": True})
    """Passed on to NeMo's exp_manager (TensorBoard, W&B, MLflow)."""

    def __post_init__(self) -> None:
        folder_name("name", self.name)
        require(self.threads is None or self.threads > 0, "threads", self.threads, "null or a number above 0")
        require(self.seed >= 0, "seed", self.seed, "a number of at least 0")
        one_of("algorithm", self.algorithm, (NONE, SFT, *ALGORITHMS))
        self._check_algorithm()
        if self.model.path is None and self.model.architecture is None:
            raise ValueError("model.path and model.architecture: give at least one of them")
        self._check_generation()
        for section in ("sft", "grpo", "idpo"):
            self.check_training(getattr(self, section), section)
        if self.has_arms and not self.arms:
            self.check_arm(getattr(self, self.algorithm), self.algorithm)
        for key, metric in (("checkpoint.best", self.checkpoint.best), ("early_stop.metric", self.early_stop.metric)):
            self._check_metric(key, metric)

    def _check_metric(self, key: str, metric: str | None) -> None:
        """A metric by which an arm is watched in its training."""
        metrics = self.evaluation.metrics
        require(metric is None or metric in metrics, key, metric, f"null or one of {', '.join(metrics)}")
        if metric is not None and not self.has_arms:
            raise ValueError(f"{key} is for arms, and algorithm {self.algorithm} trains none")
        if metric is not None and not self.evaluation.every:
            raise ValueError(f"{key} needs evaluation.every: there are no evaluations during the training without it")

    @property
    def has_arms(self) -> bool:
        """Whether the run trains arms; the single unnamed arm counts."""
        return self.algorithm in ALGORITHMS

    def _check_algorithm(self) -> None:
        """What the run trains, and on which data."""
        if not self.has_arms:
            alone = f"none with algorithm {self.algorithm} (take them out with '~arms')"
            require(not self.arms, "arms", list(self.arms), alone)
        if self.algorithm == SFT:
            require(self.sft.steps > 0, "sft.steps", self.sft.steps, "a number above 0 with algorithm sft")
        if self.algorithm == NONE:
            untrained = "with algorithm none: nothing is trained"
            require(self.sft.steps == 0, "sft.steps", self.sft.steps, f"0 {untrained}")
            placement = self.generation.placement
            require(placement == "apart", "generation.placement", placement, f"apart {untrained}")
        elif self.data.train is None and self.data.test is not None and self.data.source is None:
            raise ValueError("data.train and data.test: give both, or neither for the built-in task")

    def _check_generation(self) -> None:
        """What the engine can do, and whether the model has room for a response."""
        backend, sampling = self.generation.backend, self.sampling
        for name in ("context_parallel_size", "expert_model_parallel_size"):
            size = getattr(self.parallelism, name)
            fits = size == 1 or backend != IN_PROCESS
            require(fits, f"parallelism.{name}", size, f"1 with generation.backend {IN_PROCESS}")
        length, longest = self.model.seq_length, sampling.max_new_tokens
        room = f"room for a prompt and sampling.max_new_tokens = {longest} tokens"
        require(length is None or length > longest, "model.seq_length", length, room)
        if backend == "trtllm" or (self.generation.is_served and sampling.top_p < 1):
            # Servers have log-probabilities before the temperature, or after the cut; trtllm the former alone.
            where = f"with generation.backend {backend}"
            where += f" and sampling.top_p {sampling.top_p}" if sampling.top_p < 1 else ""
            expected = f"1 {where}: only there is its log-probability that of the whole distribution that is sampled"
            require(sampling.temperature == 1, "sampling.temperature", sampling.temperature, expected)
            tested = self.evaluation.temperature
            require(tested == [1.0], "evaluation.temperature", tested, f"[1.0] {where}: its servers know no other")

    def check_arm(self, training: LoopConfig, section: str) -> None:
        """Raises ValueError where an arm would train on responses of an earlier policy as if they were its own."""
        generation = self.generation
        if not generation.one_step_off and generation.stale != "correct":
            return  # only the policy's own responses are trained on
        stale = "generation.one_step_off" if generation.one_step_off else "generation.stale=correct"
        is_idpo = isinstance(training, IDPOConfig)
        correction = None if is_idpo else training.sampler_correction
        algorithm = "algorithm" if section in ALGORITHMS else f"{section}.algorithm"
        rules = (  # (refused where, key, its value, what would be right and why)
            (is_idpo, algorithm, "idpo", f"grpo with {stale}: iterative DPO has no importance correction"),
            (correction == "none", f"{section}.sampler_correction", correction, f"a correction with {stale}"),
            (
                generation.one_step_off and self.train.rollouts is not None,
                "generation.one_step_off",
                True,
                "false with train.rollouts: nothing is generated",
            ),
        )
        for refused, key, value, expected in rules:
            require(not refused, key, value, expected)

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
        buffer, limit = training.overlong_buffer, self.sampling.max_new_tokens
        expected = f"null or at most sampling.max_new_tokens = {limit}"
        require(buffer is None or buffer <= limit, f"{section}.overlong_buffer", buffer, expected)
