import pytest

from nemo_edo.config import GRPOConfig, IDPOConfig, ScheduleConfig


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"overlong_buffer": 8}, "grpo.overlong_buffer is 8, expected null beside pass_k"),
        ({"advantage_scale": "none"}, "grpo.advantage_scale is 'none', expected std beside pass_k"),
        ({"advantage_baseline": "leave-one-out"}, "grpo.advantage_baseline is 'leave-one-out', expected mean beside"),
    ],
)
def test_a_setting_that_pass_at_k_training_would_ignore_is_an_error(fields, message):
    GRPOConfig(**fields)
    with pytest.raises(ValueError, match=message):
        GRPOConfig(pass_k=4, **fields)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"micro_batch_size": 3}, "idpo.micro_batch_size is 3, expected an even number"),
        ({"exploration_samples": "some"}, "idpo.exploration_samples is 'some', expected all, paired or a number"),
        ({"exploration_samples": "0"}, "idpo.exploration_samples is '0'"),
        ({"pairs_per_prompt": 0}, "idpo.pairs_per_prompt is 0"),
        ({"label_smoothing": 0.1, "preference_loss": "ipo"}, "idpo.label_smoothing is 0.1, but preference_loss ipo"),
        ({"alpha": -1.0}, "idpo.alpha is -1.0, expected null or a number of at least 0"),
    ],
)
def test_a_setting_of_idpo_out_of_range_is_an_error_that_names_it(fields, message):
    with pytest.raises(ValueError, match=message):
        IDPOConfig(**fields)


@pytest.mark.parametrize("alpha", [0.0, 1e3])
def test_a_controller_that_starts_outside_its_bounds_is_an_error(alpha):
    schedule = ScheduleConfig(kind="gradient-share", min_weight=1e-6, max_weight=1.0)
    with pytest.raises(ValueError, match="grpo.schedule.kind gradient-share starts from the exploration weight"):
        GRPOConfig(alpha=alpha, schedule=schedule)
