"""verl's own loss function, config and estimators with the plugin, in an interpreter that imports verl alone."""

import tomllib
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.peers
ROOT = Path(__file__).parents[2]
COEFFICIENT, FLOOR = 0.3, -0.2  # as in verl_losses.py
ROWS, MICRO_BATCH_TOKENS, WIDTH = 4, 10, 4
AGGREGATIONS = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
PROMPT = 2


@pytest.fixture(scope="module")
def theirs(run_in_peer, tmp_path_factory) -> dict:
    """The plugin is found as in an installed wheel: by the entry points of pyproject.toml."""
    folder = tmp_path_factory.mktemp("verl")
    metadata = folder / "nemo_edo-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: nemo-edo\nVersion: 0\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    plugins = [f"{name} = {value}" for name, value in project["entry-points"]["verl.plugins"].items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[verl.plugins]", *plugins, ""]))
    run_in_peer("verl", "verl_losses.py", folder / "results.pt", path=folder)
    return torch.load(folder / "results.pt", weights_only=True)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_with_coefficient_0_all_is_verls_to_the_last_bit_and_a_micro_batch_without_a_token_gives_zero(theirs, mode):
    stock, zero, masked = (theirs["aggregated"][mode][name] for name in ("stock", "zero", "masked"))
    assert torch.equal(stock["loss"], zero["loss"]) and torch.equal(stock["gradient"], zero["gradient"])
    assert zero["metrics"].items() > stock["metrics"].items()
    assert masked["loss"] == masked["metrics"]["actor/exploration"] == 0 and not masked["gradient"].any()


def aggregated(values: torch.Tensor, mask: torch.Tensor, mode: str) -> torch.Tensor:
    """One of two micro-batches of the same size."""
    rows = values.sum(1)
    return {
        "token-mean": rows.sum() / (2 * MICRO_BATCH_TOKENS),
        "token-sum": rows.sum(),
        "seq-mean-token-sum": rows.sum() / (2 * ROWS),
        "seq-mean-token-mean": (rows / mask.sum(1)).sum() / (2 * ROWS),
        "seq-mean-token-sum-norm": rows.sum() / (2 * ROWS) / WIDTH,
    }[mode]


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_added_term_has_verls_denominators_and_weights_and_the_floor_stops_its_gradient(theirs, mode):
    case, batch = theirs["aggregated"][mode], theirs["batch"]
    mask, lengths = batch["response_mask"], batch["response_mask"].sum(1).int().tolist()
    leaf = case["stock"]["logprobs"].clone().requires_grad_()
    # Without padding a response's log-probabilities are those of its positions, shifted to the left by one.
    sequences = leaf.split([PROMPT + length for length in lengths])
    logprobs = torch.stack([
        torch.nn.functional.pad(sequence[PROMPT - 1 : -1], (0, WIDTH - length))
        for sequence, length in zip(sequences, lengths, strict=True)
    ])  # fmt: skip
    for name, floor in (("explored", None), ("floored", FLOOR)):
        log_ratio = logprobs - batch["old_log_probs"]
        assert (log_ratio[mask.bool()] < FLOOR).any()
        values = batch["rollout_is_weights"] * (log_ratio if floor is None else log_ratio.clamp(min=floor)) * mask
        term = aggregated(values, mask, mode)
        [gradient] = torch.autograd.grad(term, leaf, retain_graph=True)
        added = {key: case[name][key] - case["stock"][key] for key in ("loss", "gradient")}
        torch.testing.assert_close(added["loss"], COEFFICIENT * term.detach(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(added["gradient"], COEFFICIENT * gradient, rtol=1e-4, atol=1e-6)
        logged = case[name]["metrics"]
        assert logged["actor/exploration"] == pytest.approx((values.sum() / mask.sum()).item(), rel=1e-4)
        below = ((log_ratio < FLOOR) & mask.bool()).sum() / mask.sum() if floor else torch.tensor(0.0)
        assert logged["actor/floor_share"] == pytest.approx(below.item())


def test_groups_with_strings_as_ids_get_verls_advantages_and_a_lone_response_none(theirs):
    for ours, by_verl in theirs["advantages"].values():
        torch.testing.assert_close(ours[:5], by_verl[:5])
        assert (ours[1] == 0).all() and (ours[5] == 0).all() and (by_verl[5] != 0).all()


def test_a_schedule_of_one_step_for_each_collection_is_refused_by_its_settings(theirs):
    refused = theirs["refused"]
    assert refused["several"] == refused["one without the term"] == ""
    for words in ("actor.ppo_mini_batch_size (now 1024)", "data.train_batch_size (now 1024)", "zero-mean noise"):
        assert words in refused["one"]
    assert "policy_loss._target_ to nemo_edo.adapters.verl.EDGRPOPolicyLossConfig" in refused["no settings"]
    assert "policy_loss.exploration_coefficient is missing" in refused["no coefficient"]


def test_what_would_train_without_the_term_is_refused_when_the_config_is_validated(theirs):
    refused = theirs["refused"]
    for case, words in (("another mode", "loss_mode is 'gspo'"), ("no mode", "loss_mode is 'vanilla'"),
                        ("misspelled", "log_ratio_flor"), ("unknown base", "base_loss is 'vanila'")):  # fmt: skip
        assert words in refused[case]
    assert "rollout.top_p=0.9" in refused["cut"] and refused["whole"] == ""


def test_importing_verl_alone_loads_the_plugin_and_every_loss_of_verls_can_be_the_base_with_the_same_term(theirs):
    assert "nemo_edo.adapters.verl" in theirs["found"]
    bases = theirs["bases"]
    first = bases["vanilla"]["added"]
    assert first != 0 and not torch.equal(bases["gspo"]["stock"], bases["vanilla"]["stock"])
    for base in bases.values():
        torch.testing.assert_close(base["added"], first, rtol=1e-4, atol=1e-6)
