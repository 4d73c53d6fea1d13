"""Whether a run's numbers can be compared with the paper's: each of its settings that the paper gives another value.

``settings.csv`` has the settings that the paper gives, for the experiments and methods that match its patterns
(alternatives are split by ``|``; ``[!o]*`` is every experiment but those of ``ood/``, which train nothing). Its beta,
GRPO's clipping and learning rate, and epochs are not given, so a run may have any.
"""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from typing import Any

from nemo_edo.evaluation.results import START
from nemo_edo.report.run_set import RunRecord, arm_settings, flattened, setting
from tools.paper_tables.published import OUT_OF_DISTRIBUTION, OVERALL, evaluated_on, measured_by, read_texts

WARM_UP = "sft.steps * sft.batch_size"
"""Solutions that the warm-up trains on; its last batch may be a part of the next epoch."""


def departures(record: RunRecord, arm: str) -> list[str]:
    """How a run's arm departs from the paper's settings, in words; empty: it is comparable, as far as settings tell."""
    name = record.config.get("experiment")
    if measured_by(name).empty:
        return ["its experiment is not one of the paper's"]
    if measured_by(name, arm).empty:
        return [f"the paper has no {arm} among this experiment's arms"]
    row = measured_by(name, arm).iloc[0]
    found = {**flattened(record.config), **(arm_settings(record, arm) if arm != START else {})}
    given = paper_settings(name, row.method)
    departed = []
    if "model.architecture" in found:  # not a mapping
        departed.append("model.architecture is null, so the run does not say which model it trained")
        given = {key: value for key, value in given.items() if not key.startswith("model.architecture.")}
    if WARM_UP in given:
        seen, epoch = found["sft.steps"] * found["sft.batch_size"], given[WARM_UP]
        found[WARM_UP] = epoch if epoch <= seen < epoch + found["sft.batch_size"] else seen
    departed += [
        f"{key} is {_word(found.get(key))}, the paper's {_word(value)}"
        for key, value in given.items()
        if found.get(key) != value
    ]
    temperature = record.evaluations[arm].temperature
    if temperature != 1:
        departed.append(f"it is evaluated at temperature {temperature:g}, the paper's at 1")
    tested = tested_on(record)
    expected = OUT_OF_DISTRIBUTION if row.evaluated_on == OVERALL else (row.evaluated_on,)
    if evaluated_on(tested, row.trained_on) not in expected:
        departed.append(f"it is evaluated on {tested or 'custom problems'}, the paper's on {' or '.join(expected)}")
    return departed


def tested_on(record: RunRecord) -> str | None:
    """The benchmark that a run is evaluated on, None for custom problems."""
    data = setting(record, "data")
    return data.get("test_benchmark") or data.get("benchmark")


def paper_settings(experiment: str, method: str) -> dict[str, Any]:
    """The settings that the paper gives for a method of an experiment, by dotted key; an arm's without a section."""
    found = {}
    for line in read_texts("settings.csv").itertuples():
        pairs = ((experiment, line.experiments), (method, line.methods))
        if all(any(fnmatchcase(name, one) for one in patterns.split("|")) for name, patterns in pairs):
            try:
                found[line.setting] = json.loads(line.value)
            except ValueError:
                found[line.setting] = line.value
    return found


def _word(value: Any) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
