"""Advantages of a user's function."""

from pathlib import Path

import pytest
import torch
from helpers.responses import scored

from nemo_edo.algorithms.grpo import GRPO, OwnAdvantages
from nemo_edo.checks.preflight import check_settings
from nemo_edo.config import GRPOConfig
from nemo_edo.config.compose import ConfigError, compose_run
from nemo_edo.errors import UserError

CODE = """
import torch

def dr_grpo(*, rewards, group_ids):
    rewards -= 5  # what it is given is its own
    return [float(r - rewards[group_ids == g].mean()) for r, g in zip(rewards, group_ids)]
def everything(rewards, group_ids, successes, lengths, finished, responses, problem_ids):
    return rewards + group_ids + successes + lengths + finished + torch.tensor([len(r + p) for r, p in
                                                                               zip(responses, problem_ids)])
def short(rewards): return rewards[1:]
def infinite(rewards): return torch.where(rewards == 1, torch.inf, rewards)
def fails(rewards): return rewards[len(rewards)]
def misspelled(rewards, group_id): return rewards
"""
REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.5])
GROUPS = torch.tensor([0, 0, 1, 1])
SCORED = [scored(f"p-{group}", index, ids=(5,) * (index + 1), reward=reward, text="ab")
          for index, (group, reward) in enumerate(zip(GROUPS.tolist(), REWARDS.tolist(), strict=True))]


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch):
    (tmp_path / "my_advantages.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)


def test_a_function_replaces_the_built_in_kinds_and_changes_no_reward():
    own = GRPO(GRPOConfig(), {}, 8, 0, OwnAdvantages("my_advantages:dr_grpo"))
    built_in = GRPO(GRPOConfig(advantage_scale="none"), {}, 8, 0)
    rewards = REWARDS.clone()
    torch.testing.assert_close(
        own._advantages(SCORED, rewards, GROUPS), built_in._advantages(SCORED, REWARDS, GROUPS))
    assert rewards.equal(REWARDS)
    found = OwnAdvantages("my_advantages:everything")(SCORED, REWARDS, GROUPS)
    assert found.tolist() == [9, 8, 10.5, 11.5] and found.dtype == torch.float32


@pytest.mark.parametrize(("function", "message"), [
    ("short", "returned the shape (3,), expected (4,)"),
    ("infinite", "returned inf for response 0 to problem p-0 (1 of 4 advantages are not finite)"),
    ("fails", "raised IndexError: ")])
def test_what_are_no_advantages_are_refused(function: str, message: str):
    with pytest.raises(UserError) as refused:
        OwnAdvantages(f"my_advantages:{function}")(SCORED, REWARDS, GROUPS)
    assert str(refused.value).startswith(f"grpo.advantage (my_advantages:{function}) {message}")


@pytest.mark.parametrize(("overrides", "message"), [
    (["grpo.advantage=my_advantages:misspelled"], "grpo.advantage (my_advantages:misspelled) takes 'group_id'; did"),
    (["arms.grpo.advantage=my_advantages:shot"], "arms.grpo.advantage is 'my_advantages:shot', but my_advantages"),
    (["grpo.advantage=a:b", "grpo.pass_k=2"], "grpo.advantage is 'a:b', expected null with pass_k, which it replaces"),
    (["arms.grpo.advantage=a:b", "arms.grpo.advantage_scale=none"], "expected null with advantage_scale, which")])
def test_a_setting_that_does_not_fit_is_refused_before_time_is_spent(overrides: list[str], message: str):
    with pytest.raises((ConfigError, UserError)) as refused:
        check_settings(compose_run("quickstart", overrides))
    assert message in str(refused.value)
