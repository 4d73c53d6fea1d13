import pytest

from nemo_edo.config import LoRAConfig


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"rank": -1}, "lora.rank is -1"),
        ({"alpha": 0.0}, "lora.alpha is 0.0"),
        ({"targets": []}, "lora.targets is .*linear_qkv, linear_proj, linear_fc1, linear_fc2"),
        ({"targets": ["linear_qkv", "q_proj"]}, "'q_proj', expected one of linear_qkv, linear_proj, linear_fc1"),
        ({"dropout": 0.1}, "lora.dropout is 0.1, expected 0: with dropout, old and reference log-probabilities"),
    ],
)
def test_a_setting_out_of_range_is_an_error_that_names_it_and_what_is_allowed(fields, message):
    with pytest.raises(ValueError, match=message):
        LoRAConfig(**fields)


def test_by_default_there_are_no_adapters_and_all_four_kinds_of_layers_would_have_one():
    assert LoRAConfig().rank == 0
    assert len(LoRAConfig().targets) == 4
