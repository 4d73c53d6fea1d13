"""Runs adapters of trainers that are not installed on small batches: python contract_adapters.py RESULTS.pt.

RESULTS.pt: {case: the peer's own loss and gradient, ours with coefficient 0 and with COEFFICIENT, and the peer's
gradient on-policy with advantages of -1, which is that of the log-probabilities under its denominators and weights}.
"""

import runpy
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

COEFFICIENT, FLOOR = 0.3, -0.02
LENGTHS, WIDTH = [4, 2, 3, 1], 5
MASK = (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None] + 1).float()  # a prompt of one token before the response
MASK[:, 0] = 0


def random(seed: int, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def differentiated(compute: Callable[[Tensor], tuple[Tensor, dict]], leaf: Tensor) -> dict:
    leaf = leaf.clone().requires_grad_()
    loss, metrics = compute(leaf)
    [gradient] = torch.autograd.grad(loss, leaf)
    return {"loss": loss.detach(), "gradient": gradient, "metrics": {k: float(v) for k, v in metrics.items()}}


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def compared(loss_of: Callable[..., Callable], at: Tensor, on_policy: Tensor) -> dict:
    """loss_of(coefficient or None for the peer's own, floor, **changes of the batch) gives a function of the leaf."""
    return {
        "stock": differentiated(loss_of(None), at),
        "zero": differentiated(loss_of(0.0), at),
        "explored": differentiated(loss_of(COEFFICIENT), at),
        "floored": differentiated(loss_of(COEFFICIENT, FLOOR), at),
        "minus_one": differentiated(loss_of(None, minus_one=True), on_policy),
        "masked": differentiated(loss_of(COEFFICIENT, masked=True), at),
    }


# --- NeMo-RL -------------------------------------------------------------------------------------------------------

NEMO_RL = {
    "token level": {},
    "tis": {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 1.1},
    "icepop": {"truncated_importance_sampling_type": "icepop", "truncated_importance_sampling_ratio": 1.2,
               "truncated_importance_sampling_ratio_min": 0.8},
    "seq-mask-tis": {"truncated_importance_sampling_type": "seq-mask-tis", "truncated_importance_sampling_ratio": 1.05,
                     "truncated_importance_sampling_ratio_min": 0.9},
    "weights of sequences": {"use_importance_sampling_correction": True, "token_level_loss": False,
                             "sequence_level_importance_ratios": True},
}  # fmt: skip


def nemo_rl(changes: dict) -> dict:
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn

    from nemo_edo.adapters.nemo_rl import EDGRPOLossFn

    correction = {"use_importance_sampling_correction": True} if "truncated_importance_sampling_type" in changes else {}
    old = -random(0, 4, WIDTH)

    def loss_of(coefficient, floor=None, minus_one=False, masked=False):
        extra = {} if coefficient is None else {"exploration_coefficient": coefficient, "log_ratio_floor": floor}
        cfg = ClippedPGLossConfig(**{"reference_policy_kl_penalty": 0.0, **correction, **changes, **extra})
        loss_fn = (ClippedPGLossFn if coefficient is None else EDGRPOLossFn)(cfg)
        mask = torch.zeros_like(MASK) if masked else MASK
        data = {
            "token_mask": mask, "sample_mask": torch.tensor([1.0, 1.0, 0.0, 1.0]) * (0 if masked else 1),
            "advantages": torch.full((4, WIDTH), -1.0) if minus_one else random(1, 4, WIDTH) - 0.5,
            "prev_logprobs": old, "generation_logprobs": old + 0.4 * (random(2, 4, WIDTH) - 0.5),
        }  # fmt: skip
        counts = torch.tensor(6.0), torch.tensor(14.0)  # of two micro-batches
        return lambda logprobs: loss_fn(logprobs, data=data, global_valid_seqs=counts[0], global_valid_toks=counts[1])

    return compared(loss_of, -random(3, 4, WIDTH - 1), old[:, 1:])


SCRIPTS = {
    "run_ppo": "from nemo_rl.algorithms.ppo import MasterConfig, ppo_train, setup",
    "run_grpo_single_controller": "from nemo_rl.algorithms.grpo import MasterConfig\n"
    "from nemo_rl.algorithms.single_controller import SingleControllerActor",
    "run_sft": "def main():\n    from nemo_rl.algorithms.sft import setup",
}
"""The imports of NeMo-RL's scripts whose losses are made elsewhere."""


def nemo_rl_launched() -> dict:
    """The launcher with a script that is like run_grpo.py: it imports ``setup`` and calls it."""
    import nemo_rl.algorithms.grpo
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn

    from nemo_edo.adapters.nemo_rl import check_schedule, main

    def exit_of(script: Path, text: str) -> str:
        script.write_text(f"{text}\nraise AssertionError('it ran')\n")
        try:
            main([str(script)])
        except SystemExit as error:
            return str(error)
        return ""

    def config(batch: int, **extra: float) -> SimpleNamespace:
        return SimpleNamespace(
            grpo={"num_prompts_per_step": 32, "num_generations_per_prompt": 16},
            policy={"train_global_batch_size": batch}, loss_fn=ClippedPGLossConfig(**extra),
        )  # fmt: skip

    folder = Path(tempfile.mkdtemp())
    (folder / "run.py").write_text(
        "import sys\nfrom nemo_rl.algorithms.grpo import setup\nfrom pathlib import Path\n"
        "Path(sys.argv[1]).write_text(setup.__module__)\n"
    )
    before = sys.argv
    sys.argv = ["adapter", str(folder / "run.py"), str(folder / "out")]
    runpy.run_module("nemo_edo.adapters.nemo_rl", run_name="__main__")
    sys.argv = before
    explored = {"exploration_coefficient": COEFFICIENT}
    return {
        "loss": nemo_rl.algorithms.grpo.ClippedPGLossFn.__name__,
        "setup": (folder / "out").read_text(),
        "one": refusal(lambda: check_schedule(config(512, **explored))),
        "several": refusal(lambda: check_schedule(config(128, **explored))),
        "missing": refusal(lambda: check_schedule(config(128))),
        "misspelled": refusal(lambda: check_schedule(config(128, **explored, log_ratio_flor=-1.0))),
        "stock": refusal(lambda: ClippedPGLossFn(ClippedPGLossConfig(**explored))),
        "scripts": {name: exit_of(folder / f"{name}.py", text) for name, text in SCRIPTS.items()},
        "forced": refusal(lambda: nemo_rl.algorithms.grpo.ClippedPGLossFn(
            ClippedPGLossConfig(**explored, force_on_policy_ratio=True))),
    }  # fmt: skip


# --- slime ---------------------------------------------------------------------------------------------------------

SLIME = {
    "means of samples": {},
    "tokens": {"calculate_per_token_loss": True},
    "tis": {"use_tis": True, "tis_clip": 1.1, "tis_clip_low": 0.0},
    "sampler": {"use_rollout_logprobs": True},
}
VOCABULARY = 7


def slime(changes: dict) -> dict:
    from slime.backends.megatron_utils import loss as slime_loss

    from nemo_edo.adapters.slime import ed_grpo_loss

    totals = [length + 1 for length in LENGTHS]
    tokens = [torch.arange(total) % VOCABULARY for total in totals]
    own = random(4, 1, sum(totals), VOCABULARY)
    _, on_policy = slime_loss.get_log_probs_and_entropy(
        own, args=slime_args({}), unconcat_tokens=tokens, total_lengths=totals, response_lengths=LENGTHS
    )

    def loss_of(coefficient, floor=None, minus_one=False, masked=False):
        args = slime_args(changes)
        if coefficient is not None:
            args.exploration_coefficient, args.log_ratio_floor = coefficient, floor
        near = [x - 0.4 * (random(5 + i, len(x)) - 0.5) for i, x in enumerate(on_policy["log_probs"])]
        masks = [torch.zeros(n) if masked else (torch.arange(n) != 1).float() for n in LENGTHS]
        batch = {
            "unconcat_tokens": tokens, "total_lengths": totals, "response_lengths": LENGTHS, "loss_masks": masks,
            "log_probs": on_policy["log_probs"],
            "rollout_log_probs": on_policy["log_probs"] if minus_one and args.use_rollout_logprobs else near,
            "rollout_mask_sums": [mask.sum() for mask in masks],
            "advantages": [torch.full((n,), -1.0) if minus_one else random(9 + n, n) - 0.5 for n in LENGTHS],
        }  # fmt: skip
        lengths = totals, LENGTHS
        reducer = slime_loss.get_sum_of_sample_mean(
            *lengths, masks, batch["rollout_mask_sums"], args.calculate_per_token_loss
        )
        function = slime_loss.policy_loss_function if coefficient is None else ed_grpo_loss
        return lambda logits: function(args, batch, logits, reducer)

    # The gradient for the log-probabilities is compared where it can be: at the same logits.
    results = compared(loss_of, own + 0.5 * random(6, *own.shape), own)
    results["at_sampler"] = {name: differentiated(loss_of(c), own) for name, c in (("stock", None), ("explored", 0.3))}
    return results


def slime_args(changes: dict) -> Namespace:
    return Namespace(**{
        "use_rollout_logprobs": False, "use_tis": False, "get_mismatch_metrics": False, "use_opsm": False,
        "advantage_estimator": "grpo", "eps_clip": 10.0, "eps_clip_high": 10.0, "eps_clip_c": None,
        "entropy_coef": 0.0, "use_kl_loss": False, "custom_tis_function_path": None, "rollout_top_p": 1.0,
        "calculate_per_token_loss": False, "rollout_temperature": 1.0, "log_probs_chunk_size": -1,
        "allgather_cp": False, "rollout_batch_size": 8, "n_samples_per_prompt": 4, "global_batch_size": 16, **changes,
    })  # fmt: skip


def slime_refused() -> dict:
    from nemo_edo.adapters.slime import ed_grpo_loss

    one = slime_args({"global_batch_size": 32, "exploration_coefficient": COEFFICIENT})
    return {
        "one": refusal(lambda: ed_grpo_loss(one, {}, torch.zeros(1), sum)),
        "missing": refusal(lambda: ed_grpo_loss(slime_args({}), {}, torch.zeros(1), sum)),
    }


# --- prime-rl ------------------------------------------------------------------------------------------------------


def prime_rl(weighted: bool) -> dict:
    from prime_rl.configs.trainer import DefaultLossConfig
    from prime_rl.trainer.rl.loss import LossInputs, default_loss_fn

    from nemo_edo.adapters.prime_rl import ed_grpo

    old, default = -random(0, WIDTH), {"kl_tau": 0.01}

    def loss_of(coefficient, floor=None, minus_one=False, masked=False):
        def compute(logprobs):
            inputs = LossInputs(
                logprobs, old, None, torch.full((WIDTH,), -1.0) if minus_one else random(1, WIDTH) - 0.5,
                torch.zeros(WIDTH, dtype=torch.bool) if masked else torch.arange(WIDTH) > 1,
                random(2, WIDTH) if weighted else None,
            )  # fmt: skip
            if coefficient is None:
                outputs = default_loss_fn(inputs, DefaultLossConfig(**default))
            else:
                outputs = ed_grpo(
                    inputs, exploration_coefficient=coefficient, log_ratio_floor=floor, default_loss=default
                )
            return outputs.loss, outputs.metrics

        return compute

    return compared(loss_of, -random(3, WIDTH), old)


# --- rLLM ----------------------------------------------------------------------------------------------------------


def rllm(rows: bool) -> dict:
    """rows: all responses at once, as on verl's backend; else one response, as the other backends give it."""
    from rllm.trainer.algorithms.loss import LossContext, get_loss

    from nemo_edo.adapters.rllm import LOSS

    shape = MASK.shape if rows else (WIDTH,)
    old, mask = -random(0, *shape), MASK if rows else MASK[0]

    def loss_of(coefficient, floor=None, minus_one=False, masked=False):
        ours = {"exploration_coefficient": coefficient, "log_ratio_floor": floor}

        def compute(logprobs):
            ctx = LossContext(
                logp_curr=logprobs, logp_old=old, action_mask=torch.zeros(shape) if masked else mask,
                advantages=torch.full(shape, -1.0) if minus_one else random(1, *shape) - 0.5,
                obs_mask=torch.zeros(shape), aggregate=lambda x, m, mode=None: (x * m).sum() / m.sum().clamp(min=1),
                params={"eps_clip": 10.0, **({} if coefficient is None else ours)},
            )  # fmt: skip
            return get_loss("ppo_clip" if coefficient is None else LOSS)(ctx)

        return compute

    return compared(loss_of, -random(3, *shape), old)


def rllm_refused() -> dict:
    from rllm.trainer.algorithms.loss import LossContext, get_loss

    from nemo_edo.adapters.rllm import LOSS

    def with_settings(**params):
        row = -random(0, WIDTH)
        context = LossContext(row, row, row, MASK[0], MASK[0], torch.sum, params={"eps_clip": 0.2, **params})
        return refusal(lambda: get_loss(LOSS)(context))

    return {"missing": with_settings(), "itself": with_settings(exploration_coefficient=0.1, base_loss=LOSS),
            "fixed": with_settings(exploration_coefficient=0.1, base_loss="gspo")}  # fmt: skip


# --- SkyRL ---------------------------------------------------------------------------------------------------------

SKYRL = {
    "sequence mean": {"loss_reduction": "sequence_mean"},
    "length norm": {"loss_reduction": "seq_mean_token_sum_norm", "max_seq_len": 7},
    "tis": {"loss_reduction": "sequence_mean"},
}


def skyrl_config(batch: int = 8, **algorithm) -> SimpleNamespace:
    from skyrl.train.config import AlgorithmConfig

    correction = AlgorithmConfig().off_policy_correction or SimpleNamespace()
    correction.tis_ratio_type, correction.token_tis_ratio_clip_high = "token", 1.2
    algorithm = {"policy_loss_type": "regular", "loss_reduction": "sequence_mean", **algorithm}
    trainer = SimpleNamespace(
        algorithm=AlgorithmConfig(eps_clip_low=10.0, eps_clip_high=10.0, off_policy_correction=correction, **algorithm),
        update_epochs_per_batch=1, train_batch_size=batch, policy_mini_batch_size=2,
    )  # fmt: skip
    return SimpleNamespace(
        trainer=trainer,
        generator=SimpleNamespace(n_samples_per_prompt=4, step_wise_trajectories=False,
                                  sampling_params=SimpleNamespace(top_p=1.0, top_k=-1, min_p=0.0)),
    )


def skyrl(name: str) -> dict:
    """A micro-batch of 4 responses of a mini-batch of 8."""
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry

    from nemo_edo.adapters.skyrl import LOSS, register_ed_grpo

    old = -random(0, *MASK.shape)
    sampler = old - 0.5 * random(7, *MASK.shape) if name == "tis" else None
    counts = 7 if name == "length norm" else MASK.sum(-1, keepdim=True)

    def loss_of(coefficient, floor=None, minus_one=False, masked=False):
        cfg = skyrl_config(**SKYRL[name])
        loss = PolicyLossRegistry.get("regular")
        if coefficient is not None:
            if LOSS in PolicyLossRegistry.list_available():
                PolicyLossRegistry.unregister(LOSS)
            register_ed_grpo(cfg, coefficient, floor)
            loss = PolicyLossRegistry.get(LOSS)
        advantages = torch.full(MASK.shape, -1.0) if minus_one else random(1, *MASK.shape) - 0.5
        scaled = advantages / (8 * counts)  # as SkyRL's trainer does over the mini-batch
        mask = torch.zeros_like(MASK) if masked else MASK
        return lambda logprobs: loss(
            logprobs, old, scaled, config=cfg.trainer.algorithm, loss_mask=mask, rollout_logprobs=sampler
        )

    return compared(loss_of, -random(3, *MASK.shape), old)


def skyrl_refused() -> dict:
    from nemo_edo.adapters.skyrl import register_ed_grpo

    cases = {"reduction": {"loss_reduction": "token_mean"}, "one": {"batch": 2}, "base": {"policy_loss_type": "dppo"},
             "uncorrected": {"policy_loss_type": "kl_cov"}}  # fmt: skip
    return {name: refusal(partial(register_ed_grpo, skyrl_config(**case), 0.1)) for name, case in cases.items()}


def main(results: str) -> None:
    torch.save(
        {
            "nemo_rl": {name: nemo_rl(changes) for name, changes in NEMO_RL.items()},
            "nemo_rl_launched": nemo_rl_launched(),
            "slime": {name: slime(changes) for name, changes in SLIME.items()},
            "slime_refused": slime_refused(),
            "prime_rl": {"plain": prime_rl(False), "weights": prime_rl(True)},
            "rllm": {"rows": rllm(True), "one response": rllm(False)},
            "rllm_refused": rllm_refused(),
            "skyrl": {name: skyrl(name) for name in SKYRL},
            "skyrl_refused": skyrl_refused(),
        },
        results,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
