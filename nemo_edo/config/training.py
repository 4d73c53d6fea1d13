"""The sections of a config that train: the warm-up, and Algorithm 1 around each objective."""

from dataclasses import dataclass, field
from typing import Annotated, Optional, Union

from nemo_edo.config.checks import (
    MAY_BE_INFINITE,
    ImportPath,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Rules,
    Section,
    Share,
    above,
    one_of,
    within,
)
from nemo_edo.config.losses import CONTROLLERS, DPOLossConfig, GRPOLossConfig, ScheduleConfig

Decay = Annotated[float, within(0, 1, "[)")]


@dataclass
class OptimizerConfig(Section):
    """Megatron-core's Adam, with its learning-rate schedule."""

    lr: Positive = 1e-6  # The highest learning rate.
    min_lr: float = 0.0  # The learning rate that the decay ends at.
    schedule: Annotated[str, one_of("constant", "linear", "cosine")] = "constant"
    """constant, linear or cosine; the decay runs over the steps that the training announces, an upper bound where a
    collection may give fewer."""
    warmup_steps: NonNegativeInt = 0  # Steps in which the rate rises from 0 at the first to ``lr`` (Megatron's).
    weight_decay: NonNegative = 0.0  # Decoupled from the gradient, as in AdamW.
    adam_beta1: Decay = 0.9  # Decay of the running mean of the gradient.
    adam_beta2: Decay = 0.999  # Decay of the running mean of its square.
    adam_eps: Positive = 1e-8  # Added to the denominator of the step.
    clip_grad: NonNegative = 1.0  # Global gradient norm; 0 switches clipping off.

    def rules(self) -> Rules:
        yield 0 <= self.min_lr <= self.lr, "min_lr", f"a number in [0, lr = {self.lr}]"


@dataclass
class MicroBatchConfig(Section):
    """How a batch is cut into forward passes: memory and speed, never the result."""

    micro_batch_size: PositiveInt = 8
    """Responses of one forward pass on one rank, at most. With packing, micro_batch_tokens alone bounds them."""
    micro_batch_tokens: Optional[PositiveInt] = None
    """Tokens of one forward pass on one rank, padding included, at most: responses of like length share a pass. null:
    no such bound, and responses stay in their order."""
    packing: bool = False  # A forward pass's responses are one sequence without padding, up to micro_batch_tokens.
    share_prompts: bool = False
    """With packing: the responses to one prompt in a forward pass share it, and its tokens are computed once."""

    def rules(self) -> Rules:
        bounded = self.micro_batch_tokens is not None or not self.packing
        yield bounded, "packing", "false, or a number of micro_batch_tokens to a pack"
        yield from self.only_if(self.packing, "without packing: prompts are shared within packs", "share_prompts")


@dataclass
class SFTConfig(MicroBatchConfig):
    """The supervised warm-up. ``steps = 0`` leaves it out."""

    steps: NonNegativeInt = 0  # Optimizer steps; 0 leaves the warm-up out.
    batch_size: PositiveInt = 128  # Solutions of one optimizer step, over all data-parallel ranks.
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))


ONE_STEP = "one optimizer step for each collection"  # begins warnings of such a schedule, by which a report knows them


@dataclass
class LoopConfig(MicroBatchConfig):
    """Algorithm 1 around an objective: what ED-GRPO and ED-iDPO share."""

    iterations: PositiveInt = 3  # T of Algorithm 1: collections from a frozen policy, each followed by many steps.
    problems_per_iteration: Optional[PositiveInt] = None
    """null: every iteration samples for the whole prompt set, as in the paper. A number: for this many problems, each
    pass over the set in a new order."""
    epochs: PositiveInt = 1  # Passes over an iteration's samples.
    allow_one_step: bool = False
    """Whether to explore where a collection gives one optimizer step, in which the term can only add noise."""
    reference: Annotated[str, one_of("initial", "previous", "ema")] = "initial"
    """The centre of the trust region: initial, the policy that the arm starts from; previous, the policy that
    collected the iteration's samples; ema, an exponential moving average of those."""
    ema_decay: Share = 0.9  # Share of the ema reference's weights that each iteration keeps.
    reference_placement: Annotated[str, one_of("host", "resident")] = "host"
    """Where the reference's copy of the weights is kept: host, in host memory, swapped with the policy's for each of
    its passes; resident, on the device as well, where no weight is copied. With LoRA and
    ``reference`` initial it is the policy with its adapters off, and there is no copy."""
    old_logprobs: Annotated[str, one_of("auto", "trainer", "sampler")] = "auto"
    """pi_old's log-probabilities of the samples: trainer, recomputed by one more forward pass over all of them;
    sampler, as the engine gave them. Then the trainer computes those of every tenth prompt only, to measure the gap
    between both, and before the first step the ratio is 1 up to this gap. auto: the sampler's in each collection where
    that gap is at most 1e-5 nats per token in the mean and 1e-3 at any token, otherwise the trainer's; with
    ``sampler_correction``, the trainer's."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def rules(self) -> Rules:
        schedule, weight = self.schedule, self.exploration_weight  # type: ignore[attr-defined]  # of both kinds
        low, high = schedule.min_weight, schedule.max_weight
        starts = schedule.kind not in CONTROLLERS or low <= weight <= high
        outside = f"exploration weight {weight:g} is outside [min_weight, max_weight] = [{low:g}, {high:g}]"
        yield starts, "schedule.kind", f"a kind that is no controller, as the {outside}"

    def explored_iteration(self, t: int) -> int:
        """The iteration whose samples the exploration term of iteration t runs over; below 0: there are none."""
        return t


@dataclass
class GRPOConfig(LoopConfig, GRPOLossConfig):
    """GRPO and ED-GRPO: the loss, the advantages and the loop around them."""

    entropy_coefficient: NonNegative = 0.0  # Weight of an entropy bonus, the plain baseline of the exploration term.
    advantage_scale: Annotated[str, one_of("std", "none")] = "std"
    """std: divided by the group's standard deviation; none: not divided (Dr.GRPO)."""
    advantage_baseline: Annotated[str, one_of("mean", "leave-one-out")] = "mean"
    """mean of the group's rewards, or leave-one-out: the mean of the others (RLOO)."""
    advantage_deviation: Annotated[str, one_of("population", "sample")] = "population"
    """The deviation that ``std`` divides by: population, with the group's size n in its denominator, or sample, with
    n - 1 (TRL, verl)."""
    advantage: Optional[ImportPath] = None
    """Import path of a function that computes the advantages, such as my_advantages:ranks
    (docs/data_and_rewards.md), in place of the three above. null: none."""
    pass_k: Optional[PositiveInt] = None
    """pass@k training: advantages of the best of k responses instead of the mean (rewards 0 or 1). null: off."""
    novelty_strength: NonNegative = 0.0
    """lambda of the novelty advantage: credit moves from repeated to rare correct solutions of a group. 0: off."""
    solution_paths: Annotated[str, one_of("arithmetic", "ngrams")] = "arithmetic"
    """How novelty and redundancy tell solutions apart: arithmetic, a parser of the built-in task; ngrams, clusters of
    texts that share word 4-grams."""
    redundancy_weighted: bool = False
    """The exploration term only pushes down correct solutions whose path others of their group took too."""
    explore_uninformative_groups: bool = True
    """False, a control: groups whose rewards are all equal are left out of the exploration term."""
    explore_solved_groups_only: bool = False
    """The exploration term runs only over groups whose responses all succeed, where nothing is left to learn. Ours, not
    the paper's."""
    exploration_samples: Annotated[str, one_of("own", "previous", "reference")] = "own"
    """The policy whose samples the exploration term runs over: own, the iteration's, as in the paper; previous, the one
    that the iteration before was sampled from (in the first one the term is 0); reference, the one that the arm starts
    from, all as sampled in training. Off-policy samples push in expectation, from the first step on. Ours, not the
    paper's."""
    dynamic_sampling: bool = False
    """Groups of equal rewards are dropped, and problems outside the collection sampled in their place (DAPO): none
    where ``problems_per_iteration`` takes all."""
    max_extra_rounds: NonNegativeInt = 3  # Rounds of sampling that dynamic_sampling may add to a collection.
    overlong_buffer: Optional[PositiveInt] = None
    """Tokens before sampling.max_new_tokens over which the reward falls linearly by 1 (DAPO). null: no penalty."""
    minibatch_size: PositiveInt = 512  # Responses of one optimizer step, over all data-parallel ranks.
    keep_groups: bool = False
    """An epoch shuffles prompts, and the responses to one stay in one minibatch, as far as it has room, so that
    share_prompts saves most. False: it shuffles responses."""

    def rules(self) -> Rules:
        trusts = self.sampler_correction == "none" or self.old_logprobs != "sampler"
        nothing = "none with old_logprobs=sampler, which leaves nothing to correct"
        yield trusts, "sampler_correction", nothing
        some = not self.explore_solved_groups_only or self.explore_uninformative_groups
        yield some, "explore_solved_groups_only", "false with explore_uninformative_groups=false"
        samples = self.exploration_samples
        stays = samples != "reference" or self.reference == "initial"
        yield stays, "exploration_samples", "own or previous with a grpo.reference that moves"
        of_groups = ("redundancy_weighted", "explore_uninformative_groups", "explore_solved_groups_only")
        no_groups = f"with exploration_samples={samples}, which have no groups here"
        yield from self.only_if(samples == "own", no_groups, *of_groups)
        kinds = ("advantage_scale", "advantage_baseline", "advantage_deviation")
        changed = [name for is_default, name, _ in self.only_if(False, "", "pass_k", *kinds) if not is_default]
        replaces = f"null with {' or '.join(changed)}, which it replaces"
        yield self.advantage is None or not changed, "advantage", replaces
        alone = "with pass_k, which takes no other"
        yield from self.only_if(self.pass_k is None, alone, "overlong_buffer", *kinds)

    def explored_iteration(self, t: int) -> int:
        others = {"previous": t - 1, "reference": 0} if self.exploration_weight else {}
        return others.get(self.exploration_samples, t)


@dataclass
class IDPOConfig(LoopConfig, DPOLossConfig):
    """Iterative DPO and ED-iDPO: the loss, the pairs and the loop around them."""

    pairs_per_prompt: PositiveInt = 4  # S: most pairs for a prompt, each of a success and a failure.
    exploration_samples: str = "all"
    """What the exploration term runs over: all responses to a prompt, those in pairs (paired), or a number of them."""
    minibatch_size: PositiveInt = 64  # Prompts of an optimizer step, over all ranks: all their pairs and samples.

    def rules(self) -> Rules:
        even = self.micro_batch_size % 2 == 0
        yield even, "micro_batch_size", "an even number: a pair is two responses of one pass"
        samples = self.exploration_samples
        known = samples in ("all", "paired") or (samples.isdecimal() and int(samples) > 0)
        yield known, "exploration_samples", "all, paired or a number above 0"


ArmConfig = Union[GRPOConfig, IDPOConfig]  # the section of an arm

Bound = Annotated[float, MAY_BE_INFINITE]


@dataclass
class BoundsConfig(Section):
    """Bounds on one measurement, and what happens once it has reached one of them."""

    floor: Optional[Bound] = None  # The guard fires at this value and below; null: no floor.
    ceiling: Optional[Bound] = None  # The guard fires at this value and above; null: no ceiling.
    in_a_row: PositiveInt = 1  # Measurements at or beyond a bound, one after another, before the guard fires.
    action: Annotated[str, one_of("warn", "stop")] = "warn"  # warn: log it; stop: save a checkpoint, end the run.

    def rules(self) -> Rules:
        apart = self.floor is None or self.ceiling is None or self.floor < self.ceiling
        yield apart, "floor", f"null or a number below the ceiling = {self.ceiling}"


@dataclass
class GuardsConfig(Section):
    """Guards of the numbers (steps that are skipped) and of the policy (bounds on what collections and steps measure).
    They may change between two starts of a run."""

    max_skipped_steps: PositiveInt = 3
    """Optimizer steps in a row that may be skipped, because the loss or the gradient norm is not finite (or is a spike,
    with ``on_grad_norm_spike`` skip); the last of them stops the run, with its batch kept for ``nemo-edo replay``."""
    grad_norm_spike: Optional[Annotated[float, above(1)]] = 20.0
    """A gradient norm is a spike above so many times the last 50 steps' median (once there are 20). null: no spikes."""
    on_grad_norm_spike: Annotated[str, one_of("warn", "skip", "stop")] = "warn"
    """warn: the step is taken; skip: it is not; stop: it is not, and the run ends with the batch kept for replay."""
    kl: BoundsConfig = field(default_factory=lambda: BoundsConfig(ceiling=10.0))
    """KL to the reference policy, nats per token: of a collection, and of a step if its loss has a KL."""
    entropy: BoundsConfig = field(default_factory=lambda: BoundsConfig(floor=0.01, ceiling=6.0))
    """Entropy, nats per token: of a collection, and of a step."""
    truncated: BoundsConfig = field(default_factory=lambda: BoundsConfig(ceiling=0.9))
    """Share of a collection's responses that ran into ``sampling.max_new_tokens``."""
    reward: BoundsConfig = field(default_factory=lambda: BoundsConfig(floor=0.0, ceiling=1.0, in_a_row=3))
    """Share of successes (``rewards.success_at``) in a collection: at 0 or 1 no response is better than another."""
    sampler_gap: BoundsConfig = field(default_factory=lambda: BoundsConfig(action="stop"))
    """Mean over a collection's tokens of |log pi_old - log pi_gen|, in nats: how far the engine's numbers are from the
    trainer's, which rounding alone opens. Its ceiling null: a few times what rounding gives at the model's precision
    and depth (docs/reliability.md); inf: no ceiling."""
    stale_gap: BoundsConfig = field(default_factory=lambda: BoundsConfig(ceiling=1.0, action="stop"))
    """The same where some responses are of an earlier policy: then the gap includes the policy's change since."""
