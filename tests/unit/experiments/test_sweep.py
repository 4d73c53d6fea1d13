"""Sweeps: which runs there are, and that all are checked before one starts."""

from pathlib import Path

import pytest
import yaml

from nemo_edo.config.compose import ConfigError, compose_run, text_settings
from nemo_edo.config.hydra import parse_overrides
from nemo_edo.errors import UserError
from nemo_edo.experiments import sweep as sweeps
from nemo_edo.experiments.sweep import SweepGrid, plan_sweep, write_members
from nemo_edo.report.run_folders import sweep_members


def plan(*overrides: str, folder: Path = Path("runs")) -> SweepGrid:
    return plan_sweep("alpha_sweep", [*overrides, f"output_dir={folder}"])


@pytest.mark.parametrize(("line", "expected"), [
    (["seed=range(1,4)"], ["seed=1", "seed=2", "seed=3"]),
    (["grpo.log_ratio_floor=null,-0.1"], ["log_ratio_floor=null", "log_ratio_floor=-0.1"]),
    (["arms=[grpo,noise],kl_cov"], ["arms=grpo,noise", "arms=kl_cov"]),
    (["grpo.alpha=0,1e-3", "seed=1,2", "idpo.beta=0.5"],
     ["alpha=0,seed=1", "alpha=0,seed=2", "alpha=0.001,seed=1", "alpha=0.001,seed=2"]),
    (["grpo.beta=1,2", "idpo.beta=3,4"],
     [f"grpo.beta={one},idpo.beta={other}" for one in (1, 2) for other in (3, 4)]),
    (["seed=1,2", "data.system_prompt=größe it's"], ["seed=1", "seed=2"]),
])
def test_names_follow_hydras_sweep_syntax_with_whole_keys_only_where_they_are_needed(line, expected: list[str]):
    assert [cell.name for cell in plan(*line).cells] == expected


@pytest.mark.parametrize("folder", ["plain", "it's", "a=b,c", "with blank", "$dollar"])
def test_a_members_overrides_compose_to_its_own_folder_and_values(tmp_path: Path, folder: str):
    quoted = folder.replace("'", "\\'")
    sweep = plan_sweep("alpha_sweep", ["grpo.alpha=0,0.5", "seed=3", f"output_dir='{tmp_path}/{quoted}'"])
    cfg = compose_run("alpha_sweep", list(sweep.cells[1].overrides))
    assert (cfg.grpo.alpha, cfg.seed, cfg.name) == (0.5, 3, "alpha=0.5")
    assert cfg.output_dir == f"{tmp_path}/{folder}/alpha_sweep"


def test_texts_of_a_sweep_are_as_they_were_given():
    texts = ["be brief", "think: first", "a, b"]
    cells = plan("data.system_prompt=be brief,think: first,'a, b'", "data=gsm8k,math", "data.train=/t",
                 "data.test=/t").cells  # fmt: skip
    assert [cell.cfg.data.system_prompt for cell in cells[::2]] == texts
    assert [cell.cfg.data.benchmark for cell in cells[:2]] == [None, "math"]
    [shuffled] = parse_overrides(["data.system_prompt=shuffle(a,'b','1')"], text_settings())
    for _ in range(20):  # in any order, each value is there
        assert {value.partition("=")[2].strip("'") for value in sweeps._choices(shuffled)} == {"a", "b", "1"}


@pytest.mark.parametrize(("overrides", "complaint"), [
    (["seed=1"], "nothing is swept"),
    (["seed=1,2", "grpo.alhpa=0,1"], "unknown key grpo.alhpa"),
    (["seed=1,2,1"], "seed=1 is listed twice"), (["seed=1,2", "seed=3"], "seed is given twice"),
    (["name=a,b"], "members are named after their other settings"),
    (["arms=glob(*)"], "list the values"),
    (["seed=1,2", "grpo.beta"], "not in Hydra's form"),
])
def test_a_mistake_in_any_member_is_reported_before_one_runs(overrides: list[str], complaint: str):
    with pytest.raises(ConfigError) as caught:
        plan(*overrides)
    assert complaint in str(caught.value)


def test_a_name_of_long_words_is_one_that_a_run_may_have():
    texts = ["请一步一步地思考" * 8, "先想一想再回答问题" * 8]
    cells = plan(f"data.system_prompt={','.join(map(repr, texts))}").cells
    assert len({cell.cfg.name for cell in cells}) == 2


def test_sweep_yaml_lists_the_runs_of_all_sweeps_in_the_folder_and_anything_else_is_refused(tmp_path: Path):
    write_members(plan("seed=1,2", folder=tmp_path))
    sweep = plan("grpo.alpha=0,1", folder=tmp_path)
    write_members(sweep)
    assert list(sweep_members(sweep.folder)) == ["seed=1", "seed=2", "alpha=0", "alpha=1"]
    assert yaml.safe_load((sweep.folder / "sweep.yaml").read_text())["config"] == "alpha_sweep"
    (tmp_path / "alpha_sweep" / "config.yaml").touch()
    with pytest.raises(UserError, match="the folder of a single run"):
        plan("seed=1,2", folder=tmp_path)
    for text in ("- a", "members: [a]", "{", "other: 1"):
        (sweep.folder / "sweep.yaml").write_text(text)
        with pytest.raises(UserError, match="sweep.yaml"):
            sweep_members(sweep.folder)
