"""Results of a search survive a kill, and are never taken for another search's."""

from dataclasses import replace
from pathlib import Path

import pytest

from nemo_edo.errors import UserError
from nemo_edo.search.job import SearchRecord, SearchStore

LABEL = {"search.steps": 4, "search.exploration": 0.1, "reward model": "folder abc"}
ONE = SearchRecord("p-1", 1.0, "7", True, "correct", True, True, 0.9, "#### 7", 3, 40, 9, 8, 2)
OTHERS = [replace(ONE, problem_id=f"p-{i}", answer=None, reward=0.0, finished=False) for i in (2, 3)]


def test_parts_are_found_again_and_the_whole_takes_their_place(tmp_path: Path):
    store = SearchStore(tmp_path / "s", LABEL)
    assert store.found() == {}
    store.write_part([ONE])
    store.write_part(OTHERS)
    expected = {record.problem_id: record for record in [ONE, *OTHERS]}
    assert SearchStore(tmp_path / "s", LABEL).found() == expected
    path = store.write([*OTHERS, ONE])
    assert [file.name for file in (tmp_path / "s").iterdir()] == [path.name]
    assert store.found() == expected
    assert [*store.found().values()] == [*OTHERS, ONE]


@pytest.mark.parametrize(("label", "message"), [
    ({**LABEL, "search.steps": 5}, "made with another search.steps: 4 .* 5"),
    ({**LABEL, "more": 1}, "another more: None .* 1"),
])
@pytest.mark.parametrize("whole", [True, False])
def test_results_of_other_settings_are_an_error(tmp_path: Path, label: dict, message: str, whole: bool):
    store = SearchStore(tmp_path, LABEL)
    store.write([ONE]) if whole else store.write_part([ONE])
    with pytest.raises(UserError, match=message):
        SearchStore(tmp_path, label).found()
