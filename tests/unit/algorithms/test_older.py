"""The exploration term on samples of an older policy: which rows it gets, and that nothing else changes."""

import shutil
from collections import Counter

import pytest
import torch

from nemo_edo.algorithms.collection import step_statistics
from nemo_edo.errors import UserError

EXPLORING = {"problems": 3, "iterations": 3, "minibatch_size": 5, "beta": 0.1, "exploration_coefficient": 0.2}
STEPS = 3  # 12 responses in minibatches of 5


def sequences(batch) -> list[tuple[int, ...]]:
    """Prompt and response of each row, without padding."""
    ends = ((batch.mask != 0) * torch.arange(2, batch.tokens.shape[1] + 1)).amax(dim=1)
    return [tuple(row[:end]) for row, end in zip(batch.tokens.tolist(), ends.tolist(), strict=True)]


def older(batch):
    return batch.rows(batch.older == 1)


def own(batch):
    return batch.rows(batch.older == 0)


def on_disk(journal, iteration: int) -> Counter:
    return Counter((*one.rollout.prompt_ids, *one.rollout.response_ids) for one in journal.collected(iteration))


def batches_of(journal, iteration: int) -> list:
    return journal.policy.batches[iteration * STEPS : (iteration + 1) * STEPS]


@pytest.mark.parametrize(("samples", "sources"), [("previous", {1: 0, 2: 1}), ("reference", {1: 0, 2: 0})])
def test_each_minibatch_has_as_many_older_rows_as_own_and_an_epoch_has_each_once(run_fake, samples, sources):
    journal = run_fake(**EXPLORING, exploration_samples=samples)
    assert len(journal.policy.batches) == 3 * STEPS
    for t, source in sources.items():
        batches = batches_of(journal, t)
        assert [(own(batch).size, older(batch).size) for batch in batches] == [(5, 5), (5, 5), (2, 2)]
        assert Counter(row for batch in batches for row in sequences(older(batch))) == on_disk(journal, source)
        assert Counter(row for batch in batches for row in sequences(own(batch))) == on_disk(journal, t)


def test_older_rows_have_their_samplers_log_probabilities_and_no_part_in_advantages_kl_and_statistics(run_fake):
    journal = run_fake(**EXPLORING, exploration_samples="previous")
    for batch in batches_of(journal, 1):
        rows = older(batch)
        torch.testing.assert_close(rows.old_logprobs, -0.3 * rows.mask)  # the scripted engine's
        assert rows.exploration_factors.tolist() == [1.0] * rows.size
        assert not rows.advantages.any() and not rows.ref_logprobs.any()
        alone = own(batch).with_fields(older=None)
        assert step_statistics(batch) == step_statistics(alone)


@pytest.mark.parametrize("samples", ["previous", "reference"])
def test_a_collections_own_rows_are_those_of_the_term_on_own_samples(run_fake, samples):
    changed, plain = (run_fake(**EXPLORING, folder=name, exploration_samples=name) for name in (samples, "own"))
    for t in (1, 2):
        for batch, expected in zip(batches_of(changed, t), batches_of(plain, t), strict=True):
            assert expected.older is None and sequences(own(batch)) == sequences(expected)
            for name in ("advantages", "rewards", "groups"):
                assert own(batch).tensors()[name].equal(expected.tensors()[name])
    assert changed.policy.weights == plain.policy.weights


def test_in_the_first_iteration_previous_explores_nothing_and_reference_its_own_samples(run_fake):
    for samples, factor in (("previous", 0.0), ("reference", 1.0)):
        for batch in batches_of(run_fake(**EXPLORING, folder=samples, exploration_samples=samples), 0):
            assert batch.older is None and set(batch.exploration_factors.tolist()) == {factor}


def test_rollouts_that_are_gone_are_an_error_that_names_iteration_and_setting(fake_iteration, tmp_path):
    run = fake_iteration(**EXPLORING, exploration_samples="previous")
    step = run.services.policy.train_step

    def losing(batch, **settings):
        shutil.rmtree(tmp_path / "rollouts" / "iter_00000", ignore_errors=True)
        return step(batch, **settings)

    run.services.policy.train_step = losing
    with pytest.raises(UserError, match=r"no rollouts of iteration 0, .* iteration 1 .*exploration_samples=previous"):
        run.run()
