"""What a run measures: every name is in docs/metrics.md, and the trackers have it too."""

import json
import re
from pathlib import Path

import pytest
from helpers.problem_files import write_sums

from nemo_edo.utils.files import read_json
from nemo_edo.utils.phases import PHASES

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
SETTINGS = [
    "sft.steps=80", "sft.batch_size=16", "sft.micro_batch_size=16", "sft.optimizer.lr=4e-3",
    "sft.optimizer.warmup_steps=0", "sampling.samples_per_prompt=4", "sampling.max_new_tokens=10",
    "evaluation.samples=4", "evaluation.rollouts=2", "evaluation.every=1", "evaluation.bootstrap=10",
    "evaluation.temperature=[1.0,0.6]", "evaluation.tuning_problems=4", "sampling.temperature=0.9",
    "guards.entropy.floor=5", "~arms",
    "replicate_baseline=false", "grpo.iterations=2", "grpo.minibatch_size=16", "grpo.micro_batch_size=8",
    "grpo.optimizer.lr=1e-3", "grpo.optimizer.warmup_steps=0", "grpo.beta=0.1", "grpo.problems_per_iteration=null",
    "idpo.iterations=2", "idpo.minibatch_size=4", "idpo.micro_batch_size=8", "idpo.optimizer.lr=1e-3",
    "idpo.problems_per_iteration=null",
    "+arms={grpo: {exploration_coefficient: 0.05, log_ratio_floor: -0.1, novelty_strength: 0.5, dual_clip: 3.0,"
    " solution_paths: ngrams, covariance_control: kl-cov, sampler_correction: tis,"
    " schedule: {kind: gradient-share, every: 2}},"
    " idpo: {algorithm: idpo, exploration_coefficient: 0.05}}",
    "exp_manager.create_wandb_logger=true", "+exp_manager.wandb_logger_kwargs={name: metrics, project: edo}",
]
COLUMNS = ["problem", "arm", "iteration", "sample", "text", "answer", "reward"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, nemo_edo) -> Path:
    """A run of GRPO with everything that logs more names, and of iterative DPO; tracked by TensorBoard and W&B."""
    here = tmp_path_factory.mktemp("metrics")
    problems = write_sums(here, lambda a, b: (4 * (a - 1) + b - 1) % 3 == 1)
    offline = ("helpers.cli:export", {"WANDB_MODE": "offline", "WANDB_SILENT": "true"})
    nemo_edo.succeed("train", "--config-name=quickstart", "name=run", f"output_dir={here}", *SETTINGS, *problems,
                     before=[offline])
    return here / "run"


@pytest.fixture(scope="module")
def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def names(line: dict) -> set[str]:
    """As docs/metrics.md writes them: time.step_s, metrics.pass@k."""
    found = set()
    for name, value in line.items():
        found |= {f"{name}.{inner}" for inner in value} if isinstance(value, dict) else {name}
    found = {re.sub(r"pass@\d+$", "pass@k", re.sub(r"vote@\d+$", "vote@N", name)) for name in found}
    return {re.sub(r"metrics\..*/(best|t)(0\.6)?$", lambda m: f"metrics.NAME/{m[1]}{'T' if m[2] else ''}", name)
            for name in found}


def documented() -> dict[str, set[str]]:
    """By section of docs/metrics.md, the names in the first column of its table."""
    sections = re.split(r"^## (.*)$", PAGE, flags=re.MULTILINE)[1:]
    return {title.strip("`"): {name for row in re.findall(r"^\| (`.*?) \|", body, re.MULTILINE)
                               for name in re.findall(r"`([^`]+)`", row)}
            for title, body in zip(sections[::2], sections[1::2], strict=True)}


def test_every_name_that_is_logged_is_documented_and_every_documented_one_is_logged(lines: list[dict]):
    logged, pages = {}, documented()
    for line in lines:
        logged.setdefault(line["kind"], set()).update(names(line))
    assert logged.keys() == {"sft_step", "train_step", "collection", "evaluation", "phases", "guard"}
    for kind, found in logged.items():
        assert found == pages["Every line"] | pages[kind], kind


def test_the_phases_of_a_run_add_up_to_its_wall_time(lines: list[dict]):
    clocks = [line["time"] for line in lines if line["kind"] == "phases"]
    assert [(line["arm"], line.get("iteration")) for line in lines if line["kind"] == "phases"] == [
        ("warmup", None), ("grpo", 0), ("grpo", 1), ("grpo", None), ("idpo", 0), ("idpo", 1), ("idpo", None),
        ("idpo", None)]
    named = {phase: sum(one[f"{phase}_s"] for one in clocks) for phase in PHASES}
    wall = sum(one["wall_s"] for one in clocks)
    assert 0.97 * wall <= sum(named.values()) <= wall + 0.01
    assert {phase for phase, seconds in named.items() if seconds == 0} <= {"wait", "refit"}
    assert wall >= lines[-1]["time"]["elapsed_s"]


def test_the_start_has_one_entropy_whoever_evaluates_it_though_arms_train_at_another_temperature(folder, lines):
    """The warm-up trains at temperature 1, the arms at 0.9; the evaluations are at 1, and at 0.6 at the end."""
    found = {(line["arm"], line["iteration"]): line["metrics"] for line in lines if line["kind"] == "evaluation"}
    start = found["warmup", 0]
    for arm in ("grpo", "idpo"):
        assert found[arm, 0]["entropy"]["mean"] == pytest.approx(start["entropy"]["mean"], rel=1e-4)
    assert start["entropy/t0.6"]["mean"] < start["entropy"]["mean"]
    sampled = read_json(folder / "test_time" / "warmup.json")["metrics"]["entropy_sampled"]
    tokens = sum(sampled["count"])
    assert sum(sampled["sum"]) / tokens == pytest.approx(start["entropy"]["mean"], abs=5 / tokens**0.5)


# --- trackers -----------------------------------------------------------------------------------------------------


def tracked(lines: list[dict], kind: str, arm: str, name: str) -> list[tuple[int, float]]:
    """(step, value) of a name in metrics.jsonl as the trackers are to have it."""
    found = []
    for line in lines:
        if (line["kind"], line["arm"]) == (kind, arm):
            means = {metric: interval["mean"] for metric, interval in line.get("metrics", {}).items()}
            values = {**line, **means, **line["time"]}
            if name in values:
                found.append((line.get("step", line.get("iteration")), values[name]))
    return found


SHOWN = [("sft_step", "warmup", "grad_norm"), ("train_step", "grpo", "ratio_p99"), ("train_step", "idpo", "kl"),
         ("collection", "grpo", "pass@2"), ("evaluation", "grpo", "vote@4")]


@pytest.fixture(scope="module")
def events(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "logs"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def test_tensorboard_has_the_solutions_of_every_evaluation(events, folder: Path):
    for arm, steps in (("warmup", [0]), ("grpo", [0, 1, 2]), ("idpo", [0, 1, 2])):
        tables = events.Tensors(f"{arm}/evaluation/solutions/text_summary")
        assert [event.step for event in tables] == steps
        text = tables[-1].tensor_proto.string_val[0].decode()
        assert text.splitlines()[0] == f"| {' | '.join(COLUMNS)} |"
        last = read_json(folder / "samples" / f"{arm}.json")
        assert len(text.splitlines()) - 2 == sum(map(len, last.values())) == 18


@pytest.fixture(scope="module")
def wandb_records(folder: Path) -> list:
    """What the offline run will send, in order."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    [path] = folder.glob("logs/**/offline-run-*/*.wandb")
    assert path.parent.name.endswith(f"-{read_json(folder / 'trackers.json')['wandb']}")
    store = DataStore()
    store.open_for_scan(path)
    return list(map(wandb_internal_pb2.Record.FromString, iter(store.scan_data, None)))


@pytest.fixture(scope="module")
def wandb_history(wandb_records) -> list[dict]:
    return [{item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for record in wandb_records if record.WhichOneof("record_type") == "history"]


def test_tensorboard_and_wandb_can_filter_by_the_config_and_by_what_an_arm_explores_with(events, wandb_records):
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    configs = [record.config.update for record in wandb_records if record.WhichOneof("record_type") == "config"]
    wandb = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for items in configs for item in items}
    start = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(start).session_start_info.hparams
    for name, value in {"sampling.temperature": 0.9, "grpo.exploration_weight": 0.05, "grpo.log_ratio_floor": -0.1,
                        "idpo.exploration_weight": 0.05, "data.arithmetic.test_problems": 256}.items():
        assert wandb[name] == value == hparams[name].number_value
    assert not any(name.startswith(("cluster", "exp_manager")) for name in wandb)


@pytest.mark.parametrize(("kind", "arm", "name"), SHOWN)
def test_tensorboard_and_wandb_have_the_numbers_of_the_lines(events, wandb_history, lines, kind, arm, name):
    key, expected = f"{arm}/{kind}/{name.replace('@', '_at_')}", tracked(lines, kind, arm, name)
    assert expected and [(row["trainer/global_step"], row[key]) for row in wandb_history if key in row] == expected
    shown = events.Scalars(key)
    assert [event.step for event in shown] == [step for step, _ in expected]
    assert [event.value for event in shown] == pytest.approx([value for _, value in expected], rel=1e-6)
