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


def batches_of(journal, iteration: int) -> list[tuple]:
    """Each minibatch with its rows of an older policy and its own."""
    batches = journal.policy.batches[iteration * STEPS : (iteration + 1) * STEPS]
    return [(batch, batch.rows(batch.older == 1), batch.rows(batch.older == 0)) for batch in batches]


@pytest.mark.parametrize(("samples", "sources"), [("previous", {1: 0, 2: 1}), ("reference", {1: 0, 2: 0})])
def test_each_minibatch_has_as_many_older_rows_as_own_and_an_epoch_has_each_once(run_fake, samples, sources):
    journal = run_fake(**EXPLORING, exploration_samples=samples)
    assert len(journal.policy.batches) == 3 * STEPS
    for t, source in sources.items():
        _, older, own = zip(*batches_of(journal, t), strict=True)
        for batches, iteration in ((older, source), (own, t)):
            assert [batch.size for batch in batches] == [5, 5, 2]
            stored = [one.rollout for one in journal.store.read(iteration)]
            assert Counter(row for batch in batches for row in sequences(batch)) == Counter(
                (*one.prompt_ids, *one.response_ids) for one in stored)


def test_older_rows_have_their_samplers_log_probabilities_and_no_part_in_advantages_kl_and_statistics(run_fake):
    journal = run_fake(**EXPLORING, exploration_samples="previous")
    for batch, rows, own in batches_of(journal, 1):
        torch.testing.assert_close(rows.old_logprobs, -0.3 * rows.mask)  # the scripted engine's
        assert rows.exploration_factors.tolist() == [1.0] * rows.size
        assert not rows.advantages.any() and not rows.ref_logprobs.any()
        assert step_statistics(batch) == step_statistics(own.with_fields(older=None))


@pytest.mark.parametrize("samples", ["previous", "reference"])
def test_a_collections_own_rows_are_those_of_the_term_on_own_samples(run_fake, samples):
    changed, plain = (run_fake(**EXPLORING, folder=name, exploration_samples=name) for name in (samples, "own"))
    for t in (1, 2):
        expected = plain.policy.batches[t * STEPS : (t + 1) * STEPS]
        for (_, _, own), alone in zip(batches_of(changed, t), expected, strict=True):
            assert alone.older is None and sequences(own) == sequences(alone)
            for name in ("advantages", "rewards", "groups"):
                assert own.tensors()[name].equal(alone.tensors()[name])
    assert changed.policy.weights == plain.policy.weights


def test_in_the_first_iteration_previous_explores_nothing_and_reference_its_own_samples(run_fake):
    for samples, factor in (("previous", 0.0), ("reference", 1.0)):
        journal = run_fake(**EXPLORING, folder=samples, exploration_samples=samples)
        for batch in journal.policy.batches[:STEPS]:
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
