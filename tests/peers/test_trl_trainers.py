"""TRL's own trainers with the exploration term: a few steps of a tiny Llama, in the oldest and the newest TRL."""

from collections.abc import Callable
from functools import cache

import pytest
import torch

pytestmark = pytest.mark.peers
FLOOR = -0.5  # as in trl_trainers.py
MAX_LENGTH = 6
# TRL's environment, loss types, processes. The reduction differs between 1.5 and 1.9.1 for the token means.
RUNS = {
    "newest": ("trl", ["grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "vespo", "luspo"], 1),
    "oldest": ("trl-oldest", ["dapo", "luspo"], 1),
    "newest in two processes": ("trl", ["dapo"], 2),
}
CASES = [(run, loss_type) for run, (_, loss_types, _) in RUNS.items() for loss_type in loss_types]
close = dict(rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def results(run_in_peer, tmp_path_factory) -> Callable[[str], dict]:
    """Of one of RUNS, from one start of the script: importing TRL is slow."""
    folder = tmp_path_factory.mktemp("trl_trainers")

    @cache
    def of_run(run: str) -> dict:
        environment, loss_types, processes = RUNS[run]
        launcher = [] if processes == 1 else ["-m", "torch.distributed.run", "--standalone",
                                              f"--nproc-per-node={processes}"]  # fmt: skip
        run_in_peer(environment, "trl_trainers.py", ",".join(loss_types), folder / f"{run}.pt", launcher=launcher)
        return torch.load(folder / f"{run}.pt", weights_only=True)

    return of_run


@pytest.mark.parametrize(("run", "loss_type"), CASES)
def test_with_coefficient_0_weights_and_logs_are_trls_to_the_last_bit(results, run, loss_type):
    stock, zero = results(run)["grpo"][loss_type]["stock"], results(run)["grpo"][loss_type]["zero"]
    assert torch.equal(stock["weights"], zero["weights"])
    ours = {"exploration", "floor_share"}
    assert stock["logs"] == [{k: v for k, v in line.items() if k not in ours} for line in zero["logs"]]
    assert any(ours <= set(line) and line["exploration"] != 0 for line in zero["logs"])


def reduced(loss_type: str, log_ratio: torch.Tensor, mask: torch.Tensor, probe: dict, rescaled: bool) -> torch.Tensor:
    """The mean log-ratio, with two accumulated micro-batches of four for each collection."""
    rows, lengths = log_ratio.sum(1), mask.sum(1)
    tokens = probe["num_items"] / probe["processes"]
    return {
        "grpo": (rows / lengths.clamp(min=1)).mean() / 2,
        "bnpo": rows.sum() / lengths.sum() / 2,
        "dr_grpo": rows.mean() / MAX_LENGTH / 2,
        "luspo": rows.mean() / 2,
        "dapo": rows.sum() / (tokens * 2 / 4 if rescaled else tokens),
    }[{"sapo": "grpo", "cispo": "dapo", "vespo": "dapo"}.get(loss_type, loss_type)]


@pytest.mark.parametrize(("run", "loss_type"), CASES)
def test_added_term_is_the_mean_log_ratio_with_trls_own_denominators(results, run, loss_type):
    """With all advantages -1 and the policy at its sampler TRL's gradient is that of the log-probabilities, reduced."""
    case = results(run)["grpo"][loss_type]
    probe = case["probe"]
    assert probe["gradient_of_trl"].abs().max() > 1e-3, "nothing to compare"
    torch.testing.assert_close(probe["added_gradient"], probe["gradient_of_trl"], **close)
    assert not torch.equal(case["explored"]["weights"], case["stock"]["weights"])
    assert case["explored"]["weights"].isfinite().all()
    assert run != "newest" or case["masked_micro_batches"] > 0  # it was trained on such without a token, too
    mask = probe["mask"].bool()
    log_ratio = torch.where(mask, probe["logprobs"] - probe["old"], 0.0)
    assert log_ratio.abs().max() > 1e-3, "the batch is off-policy"
    torch.testing.assert_close(probe["added"], reduced(loss_type, log_ratio, mask, probe, "newest" in run), **close)


@pytest.mark.parametrize("run", ["newest", "oldest"])
def test_a_schedule_of_one_step_for_each_collection_is_refused_and_the_pages_example_logs_what_to_watch(results, run):
    for words in ("num_iterations (now 1)", "steps_per_generation (now 2)", "zero-mean noise"):
        assert words in results(run)["refused"]
    assert "num_train_epochs" in results(run)["dpo"]["refused"]
    assert "give ref_model" in results(run)["dpo"]["other reference"]
    assert {"exploration", "floor_share", "entropy", "reward"} <= set(results(run)["example"])


@pytest.mark.parametrize("run", ["newest", "oldest"])
def test_ed_dpo_adds_the_mean_of_floored_token_sums_of_both_responses(results, run):
    dpo = results(run)["dpo"]
    assert torch.equal(dpo["stock"]["weights"], dpo["zero"]["weights"])
    assert not torch.equal(dpo["stock"]["weights"], dpo["explored"]["weights"])
    torch.testing.assert_close(dpo["sampler_given"]["weights"], dpo["explored"]["weights"], **close)
    batch = dpo["batch"]
    logprobs, old = (
        x.log_softmax(-1)[:, :-1].gather(-1, batch["ids"][:, 1:, None]).squeeze(-1) for x in batch["logits"]
    )
    floored = (logprobs - old).clamp(min=FLOOR) * batch["mask"][:, 1:]
    assert (floored == FLOOR).any()
    torch.testing.assert_close(dpo["added"], floored.sum(1).mean(), **close)
    assert all({"exploration", "floor_share"} <= set(line) for line in dpo["explored"]["logs"])


@pytest.mark.parametrize("run", RUNS)
def test_novelty_moves_advantage_within_groups_from_repeated_to_rare_correct_paths(results, run):
    changed = 0
    for seen in results(run)["novelty"]:
        groups = (seen[name].split(4) for name in ("before", "after", "paths", "correct"))
        for before, after, paths, correct in zip(*groups, strict=True):
            right = [int(path) for path, is_right in zip(paths, correct, strict=True) if is_right]
            shares = [(right.count(path) - 1) / (len(right) - 1) for path in right] if len(right) > 1 else []
            expected = before.clone()
            if shares:
                expected[correct] -= 0.5 * (torch.tensor(shares) - sum(shares) / len(shares))
            torch.testing.assert_close(after, expected, **close)
            changed += int(not torch.equal(before, after))
    assert changed > 0


@pytest.mark.parametrize("run", ["newest", "oldest"])
def test_by_command_and_config_the_settings_are_recorded_and_compared_on_resume(results, run):
    found = results(run)["command"]
    assert found["first"] == found["same"] == ""
    if run == "newest":  # the script of TRL 1.5 does not resume
        assert "out/checkpoint-2/exploration.json" in found["other"] and "0.2" in found["other"]
    coefficient = 0.1 if run == "newest" else 0.2
    assert found["kept"] == {"exploration_coefficient": coefficient, "log_ratio_floor": -0.5}
    assert "log_ratio_flor" in found["misspelled"] and found["args"] == "0.1"
    for words in ("ED-GRPO", "Exploration-Driven Optimization", "`exploration_coefficient`: 0.1"):
        assert words in found["card"]
