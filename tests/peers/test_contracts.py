"""The adapters of trainers that cannot be installed here, against what contracts/README.md says of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.peers
HERE = Path(__file__).parent
COEFFICIENT = 0.3  # as in contract_adapters.py
CASES = [(peer, name) for peer, names in {
    "nemo_rl": ("token level", "tis", "icepop", "seq-mask-tis", "weights of sequences"),
    "slime": ("means of samples", "tokens", "tis", "sampler"),
    "prime_rl": ("plain", "weights"), "rllm": ("rows", "one response"),
    "skyrl": ("sequence mean", "length norm", "tis"),
}.items() for name in names]  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    """In a fresh interpreter, with the stand-ins, or with the real sources that PEER_SOURCES leads to."""
    file = tmp_path_factory.mktemp("contracts") / "results.pt"
    sources = os.environ.get("PEER_SOURCES", str(HERE / "contracts"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), sources])}
    command = [sys.executable, HERE / "scripts" / "contract_adapters.py", file]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {**torch.load(file, weights_only=True), "stderr": done.stderr}


@pytest.mark.parametrize(("peer", "case"), CASES)
def test_with_coefficient_0_all_is_the_peers_to_the_last_bit_and_without_a_token_all_is_zero(results, peer, case):
    stock, zero, masked = (results[peer][case][name] for name in ("stock", "zero", "masked"))
    assert torch.equal(stock["loss"], zero["loss"]) and torch.equal(stock["gradient"], zero["gradient"])
    assert {name: zero["metrics"][name] for name in stock["metrics"]} == stock["metrics"]
    assert zero["metrics"]["exploration"] != 0
    assert masked["loss"] == 0 and not masked["gradient"].any()


@pytest.mark.parametrize(("peer", "case"), CASES)
def test_added_gradient_is_the_peers_own_on_policy_with_advantages_of_minus_1_and_the_floor_stops_it(
    results, peer, case
):
    found = results[peer][case]
    there = found.get("at_sampler", found)  # slime's leaf is the logits
    added = (there["explored"]["gradient"] - there["stock"]["gradient"]) / COEFFICIENT
    assert added.abs().max() > 1e-3
    torch.testing.assert_close(added, found["minus_one"]["gradient"], rtol=1e-4, atol=1e-6)
    assert found["explored"]["metrics"]["floor_share"] == 0 < found["floored"]["metrics"]["floor_share"]
    assert found["floored"]["metrics"]["exploration"] > found["explored"]["metrics"]["exploration"]
    gradients = [found[name]["gradient"] - found["stock"]["gradient"] for name in ("floored", "explored")]
    assert gradients[0].norm() < gradients[1].norm()


def test_a_schedule_of_one_step_for_each_collection_is_refused_by_its_settings(results):
    nemo_rl, slime = results["nemo_rl_launched"], results["slime_refused"]
    assert nemo_rl["several"] == ""
    for words in ("policy.train_global_batch_size (now 512)", "grpo.num_generations_per_prompt (now 512)"):
        assert words in nemo_rl["one"]
    assert "loss_fn.force_on_policy_ratio" in nemo_rl["forced"]
    assert "--num-steps-per-rollout" in slime["one"] and "--global-batch-size (now 32)" in slime["one"]
    assert "loss_fn.exploration_coefficient is missing" in nemo_rl["missing"]
    assert "did you mean loss_fn.log_ratio_floor" in nemo_rl["misspelled"]
    assert "--custom-config-path" in slime["missing"]
    assert "trainer.policy_mini_batch_size (now 2)" in results["skyrl_refused"]["one"]
    assert "orchestrator.max_off_policy_steps" in results["stderr"]  # prime-rl shows its schedule to no loss


def test_rllm_and_skyrl_refuse_settings_with_which_the_term_would_be_missing_or_another(results):
    rllm, skyrl = results["rllm_refused"], results["skyrl_refused"]
    assert "algorithm.loss_params.exploration_coefficient is missing" in rllm["missing"]
    assert "algorithm.loss_params.base_loss is ed_grpo_rllm" in rllm["itself"]
    assert "base_loss is gspo" in rllm["fixed"] and "seq-mean-token-mean" in rllm["fixed"]
    assert "policy_loss_type is 'kl_cov'" in skyrl["uncorrected"] and "off_policy_correction" in skyrl["uncorrected"]
    assert "loss_reduction is 'token_mean'" in skyrl["reduction"] and "sequence_mean" in skyrl["reduction"]
    assert "policy_loss_type is 'dppo'" in skyrl["base"] and "log pi_old" in skyrl["base"]


def test_launcher_runs_nemo_rls_script_with_our_loss_and_check_and_refuses_what_would_train_nemo_rls_own(results):
    launched = results["nemo_rl_launched"]
    assert (launched["loss"], launched["setup"]) == ("EDGRPOLossFn", "nemo_edo.adapters.nemo_rl")
    for script, found in (("run_ppo", "algorithms.ppo"), ("run_grpo_single_controller", "SingleControllerActor"),
                          ("run_sft", "does not import that")):  # fmt: skip
        assert f"{script}.py" in launched["scripts"][script] and found in launched["scripts"][script]
    assert "without the exploration term" in launched["stock"]
