import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_edo.losses import token_spread

few = settings(max_examples=20, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


@few
@given(seed=seeds)
def test_token_spread_is_that_of_the_valid_tokens_in_any_order_to_the_last_bit(random_batch, seed):
    batch = random_batch(seed)
    valid, entropies = batch.mask == 1, batch.logprobs.detach().square()
    given_ = [batch.logprobs.detach(), entropies, batch.old]
    found = token_spread(*given_, batch.mask)
    ratios = np.exp(given_[0][valid].double().numpy() - given_[2][valid].double().numpy())
    expected = {"entropy_p10": np.percentile(given_[1][valid].double(), 10),
                "entropy_p90": np.percentile(given_[1][valid].double(), 90), "ratio_mean": ratios.mean(),
                "ratio_std": ratios.std(), "ratio_min": ratios.min(), "ratio_max": ratios.max(),
                "ratio_p99": np.percentile(ratios, 99)}
    assert found == pytest.approx(expected, rel=1e-12)
    order = torch.randperm(len(valid), generator=torch.Generator().manual_seed(seed))
    assert token_spread(*(tensor[order] for tensor in given_), batch.mask[order]) == found
