"""A collection that teaches nothing says so at once, with its likely causes."""

import pytest

from nemo_edo.algorithms.plan import collection_hazards
from nemo_edo.config import GRPOConfig, IDPOConfig

GOOD = {"reward": 0.4, "zero_advantage_groups": 0.3, "truncated": 0.1}


@pytest.mark.parametrize(("changes", "config", "weight", "first", "said"), [
    ({"reward": 0.0, "zero_advantage_groups": 1.0}, GRPOConfig(), 0.0, True, ["data.chat_template"]),
    ({"zero_advantage_groups": 1.0}, GRPOConfig(), 0.0, True, ["sampling.samples_per_prompt"]),
    ({"zero_advantage_groups": 0.99}, GRPOConfig(), 0.1, True, []),
    ({"truncated": 0.51}, GRPOConfig(), 0.0, True, ["sampling.stop_token_ids"]),
    ({"truncated": 0.9}, GRPOConfig(), 0.0, False, []),
    ({"zero_advantage_groups": 1.0}, GRPOConfig(), 0.1, False, ["exploration term alone"]),
    ({"zero_advantage_groups": 1.0}, IDPOConfig(), 0.1, False, ["no pair", "exploration term alone"]),
])
def test_what_a_collection_lacks_is_said_with_what_to_change(changes: dict, config, weight: float, first: bool, said):
    found = collection_hazards({**GOOD, **changes}, config, weight, first=first)
    assert len(found) == len(said) and all(words in hazard for words, hazard in zip(said, found, strict=True))
