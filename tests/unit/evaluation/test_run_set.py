"""Which runs a report is about, and which arms of theirs are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from nemo_edo.errors import UserError
from nemo_edo.evaluation.run_set import arm_settings, find_runs, read_runs


@pytest.fixture
def sweep(tmp_path: Path, write_run_folder):
    """A sweep's folder of small runs: alphas x seeds."""

    def write(alphas=(0.0, 0.1), seeds=(1, 2)) -> Path:
        for alpha in alphas:
            for seed in seeds:
                write_run_folder(tmp_path / "sweep" / f"alpha={alpha:g},seed={seed}", seed=seed, arms=(),
                                 alphas={"policy": alpha}, iterations=4, problems=20)
        return tmp_path / "sweep"

    return write


def change_config(run: Path, **values) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    for key, value in values.items():
        *sections, name = key.split("__")
        section = config
        for part in sections:
            section = section[part]
        section[name] = value
    (run / "config.yaml").write_text(yaml.safe_dump(config))


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_runs(find_runs([str(folder)]))
    return str(caught.value)


# --- finding ----------------------------------------------------------------------------------------------------------


def test_a_folder_a_pattern_and_the_members_by_name_are_the_same_runs(sweep):
    folder = sweep()
    by_name = [str(run) for run in sorted(folder.iterdir())]
    found = [find_runs(arguments).folders for arguments in ([str(folder)], [f"{folder}/alpha=*"], by_name)]
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 4


def test_one_run_by_its_own_folder_is_single_and_any_other_argument_is_not(sweep):
    folder = sweep()
    run = folder / "alpha=0,seed=1"
    assert find_runs([str(run)]).single == run
    assert find_runs([str(run), str(folder / "alpha=0,seed=2")]).single is None
    assert find_runs([f"{folder}/alpha=0,seed=1*"]).single is None


def test_a_run_named_twice_counts_once(sweep):
    folder = sweep()
    assert len(find_runs([str(folder), str(folder / "alpha=0,seed=1")]).folders) == 4


def test_incomplete_runs_are_left_out_by_name(sweep):
    folder = sweep()
    (folder / "alpha=0,seed=2" / "summary.json").unlink()
    found = find_runs([str(folder)])
    assert found.left_out == {folder / "alpha=0,seed=2": "it has not come to its end"}
    assert len(found.folders) == 3


def test_members_that_sweep_yaml_lists_and_no_others_are_the_sweeps(sweep):
    folder = sweep()
    members = {"alpha=0,seed=1": [], "alpha=0,seed=9": []}
    (folder / "sweep.yaml").write_text(yaml.safe_dump({"members": members}))
    found = find_runs([str(folder)])
    assert found.folders == (folder / "alpha=0,seed=1",)
    assert found.left_out == {folder / "alpha=0,seed=9": "it has not been started"}


def test_the_report_goes_to_the_folder_that_holds_the_runs(sweep, tmp_path: Path):
    folder = sweep()
    assert find_runs([str(folder)]).common == folder
    assert find_runs([f"{folder}/*"]).common == folder


@pytest.mark.parametrize(("argument", "complaint"), [("nowhere", "no such folder"), ("empty", "no run is in it")])
def test_an_argument_that_names_no_run_is_refused(tmp_path: Path, argument: str, complaint: str):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=complaint):
        find_runs([str(tmp_path / argument)])


def test_runs_of_which_none_has_finished_are_refused(sweep):
    folder = sweep()
    for run in folder.iterdir():
        (run / "summary.json").unlink()
    with pytest.raises(UserError, match="none of the 4 runs has finished"):
        find_runs([str(folder)])


# --- grouping ---------------------------------------------------------------------------------------------------------


def test_seeds_of_one_arm_are_grouped_and_alphas_are_not(sweep):
    runs = read_runs(find_runs([str(sweep())]))
    assert {label: sorted(by_seed) for label, by_seed in runs.arms.items()} == {
        "GRPO": [1, 2], "ED-GRPO α=0.1": [1, 2]}
    assert runs.seeds == [1, 2]


def test_arms_of_one_label_and_other_settings_are_told_apart_by_them(sweep):
    folder = sweep(alphas=(0.0,))
    change_config(folder / "alpha=0,seed=2", grpo__clip_high=0.28)
    assert list(read_runs(find_runs([str(folder)])).arms) == ["GRPO, clip_high 0.2", "GRPO, clip_high 0.28"]


def test_an_arms_own_differences_are_settings_of_it(sweep):
    folder = sweep(alphas=(0.0,))
    change_config(folder / "alpha=0,seed=2", arms={"policy": {"optimizer": {"lr": 1.0}}})
    assert list(read_runs(find_runs([str(folder)])).arms) == ["GRPO, optimizer.lr 1e-06", "GRPO, optimizer.lr 1.0"]


@pytest.mark.parametrize("changes", [
    {"grpo__micro_batch_size": 3}, {"grpo__beta": 0}, {"threads": 4}, {"evaluation__bootstrap": 10},
    {"exp_manager": {}}, {"parallelism__tensor_model_parallel_size": 2},
])
def test_settings_without_effect_and_ways_to_write_a_number_make_no_other_arm(sweep, changes: dict):
    folder = sweep(alphas=(0.0,))
    for run in folder.iterdir():
        change_config(run, grpo__beta=0.0)
    change_config(folder / "alpha=0,seed=2", **changes)
    assert list(read_runs(find_runs([str(folder)])).arms) == ["GRPO"]


def test_alphas_default_is_the_alpha_that_it_stands_for(sweep):
    folder = sweep(alphas=(0.001,))
    change_config(folder / "alpha=0.001,seed=2", grpo__alpha=0.001)
    assert len(read_runs(find_runs([str(folder)])).arms) == 1


def test_sampling_of_training_is_a_setting_of_the_arm(sweep):
    folder = sweep(alphas=(0.0,))
    change_config(folder / "alpha=0,seed=2", sampling__temperature=0.5)
    runs = read_runs(find_runs([str(folder)]))
    assert list(runs.arms) == ["GRPO, sampling.temperature 1.0", "GRPO, sampling.temperature 0.5"]
    [trained] = runs.arms["GRPO, sampling.temperature 0.5"].values()
    assert arm_settings(trained.record, trained.name)["sampling.temperature"] == 0.5


# --- refusing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "named"), [
    ({"data__prompt": "Other: {question}"}, "data.prompt is"),
    ({"model__seq_length": 7}, "model.seq_length is 1024 in the one and 7 in the other"),
    ({"evaluation__samples": 4}, "evaluation.samples is 10 in the one and 4 in the other"),
    ({"sft__steps": 4}, "sft.steps is 100 in the one and 4 in the other"),
    ({"sampling__max_new_tokens": 9}, "sampling.max_new_tokens is 512 in the one and 9 in the other"),
    ({"precision__dtype": "bf16"}, "precision.dtype is 'fp32' in the one and 'bf16' in the other"),
    ({"something_new": 1}, "something_new is None in the one and 1 in the other"),
])
def test_runs_that_differ_in_more_than_arms_and_seeds_are_refused_with_both_values(sweep, changes: dict, named: str):
    folder = sweep()
    change_config(folder / "alpha=0.1,seed=1", **changes)
    message = refusal(folder)
    assert named in message
    assert "alpha=0,seed=1 and " in message
    assert "alpha=0.1,seed=1 cannot be compared" in message


def test_runs_may_differ_in_what_does_not_change_how_an_arm_learns(sweep):
    folder = sweep()
    change_config(folder / "alpha=0.1,seed=1", model__loss_head="fused", guards__max_skipped_steps=9, threads=7,
                  grpo__reference_placement="resident")
    assert len(read_runs(find_runs([str(folder)])).arms) == 2


def test_runs_that_skip_other_steps_are_refused(sweep):
    folder = sweep()
    change_config(folder / "alpha=0.1,seed=1", guards__on_grad_norm_spike="skip")
    assert "guards.on_grad_norm_spike is 'warn' in the one and 'skip' in the other" in refusal(folder)


def test_the_first_of_several_differences_is_the_one_named(sweep):
    folder = sweep()
    change_config(folder / "alpha=0.1,seed=1", evaluation__samples=4, model__seq_length=7)
    assert "model.seq_length is" in refusal(folder)


def test_runs_on_other_problems_are_refused(sweep, write_run_folder):
    folder = sweep()
    write_run_folder(folder / "other", seed=3, arms=("grpo",), iterations=4, problems=21)
    assert "evaluated on different problems (20 and 21)" in refusal(folder)


def test_one_arm_trained_twice_with_one_seed_is_refused(sweep, write_run_folder):
    folder = sweep()
    write_run_folder(folder / "again", seed=2, arms=(), alphas={"policy": 0.0}, iterations=4, problems=20)
    message = refusal(folder)
    assert "both trained GRPO with seed 2" in message
    assert "again" in message
