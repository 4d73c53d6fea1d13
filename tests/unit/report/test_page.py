"""The page: one self-contained file that escapes what it shows, and the numbers next to it."""

import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from helpers.run_folder import write_run_folder

from nemo_edo.errors import UserError
from nemo_edo.report.conclusions import terminal_table
from nemo_edo.report.page import COLUMNS, write_report
from nemo_edo.report.run_set import find_runs, one_run, read_runs

ATTACK = "<script>alert('attack')</script>"


class Page(HTMLParser):
    """Collects what a browser would fetch or run, and the visible text."""

    def __init__(self, text):
        super().__init__()
        self.links, self.scripts, self.words, self.within, self.sections = [], [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in ("src", "href", "srcset", "action", "data")]
        self.sections += [value for name, value in attributes if name == "aria-labelledby" and tag == "section"]
        if tag in ("script", "style"):
            self.within.append(tag)

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self.within.pop()

    def handle_data(self, data):
        (self.scripts if self.within else self.words).append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", "".join(self.words))


SIZES = {"iterations": 3, "problems": 20, "attack": ATTACK}


@pytest.fixture
def report(tmp_path):
    """The text of one run's page."""

    def build(**options) -> str:
        folder = write_run_folder(tmp_path / "run", **SIZES, **options)
        assert write_report(one_run(folder)).path == folder / "report.html"
        assert (folder / "report.csv").is_file() and json.loads((folder / "report.json").read_text())
        return (folder / "report.html").read_text(encoding="utf-8")

    return build


@pytest.fixture(scope="module")
def several(tmp_path_factory) -> Path:
    """The page of two seeds and a third that has not finished."""
    folder = tmp_path_factory.mktemp("several")
    for seed in (1, 2, 3):
        write_run_folder(folder / f"seed_{seed}", seed=seed, **SIZES)
    write_run_folder(folder / "another", seed=1, arms=(), alphas={"policy": 0.1}, **SIZES)
    (folder / "seed_3" / "summary.json").unlink()
    return write_report(read_runs(find_runs([str(folder)]))).path


def test_a_page_forbids_every_request_and_the_runs_text_is_shown_and_never_becomes_markup(report, several):
    for text, shown in ((report(), 8), (several.read_text(), 5)):
        page = Page(text)
        assert all(link.startswith("#") for link in page.links) and "default-src 'none'" in text
        assert "url(" not in text[text.index("<style>") : text.index("</style>")]
        assert text.count("plotly.js (basic - minified) v") == 1 and len(text) < 2_000_000
        assert page.text.count(ATTACK) > shown  # of one run in responses, a question and the config, too
        assert not any("alert('attack')" in script and "\\u003c" not in script for script in page.scripts)
        assert ATTACK not in text


def test_one_report_and_that_of_several_have_the_same_sections_and_the_runs_that_were_left_out(report, several):
    alone, set_of_runs = Page(report()), Page(several.read_text())
    assert alone.sections == set_of_runs.sections == ["results", "diversity", "test-time", "diagnostics", "setup"]
    assert "exploration_coefficient01e-060.30" in alone.text.replace(" ", "")
    named = [str(several.parent / run) for run in ("seed_1", "seed_2", "seed_3")]
    assert all(part in set_of_runs.text for part in (*named, "left out: it has not finished", "1 left out"))
    assert "Time: train 9.0 s, log pi old 4.0 s, without a name 0.5 s." in alone.text
    assert "Time: train 27.0 s, log pi old 12.0 s, without a name 1.5 s, all runs together." in set_of_runs.text


def test_csv_and_json_have_the_table_with_every_seed(several: Path, tmp_path: Path):
    floor, alone = "ED-GRPO 0.3, floor -0.1", "ED-GRPO α=0.1"
    runs = read_runs(find_runs([str(several.parent)]))
    with pytest.raises(UserError, match="ends in .html"):
        write_report(runs, tmp_path / "report.csv")
    written = write_report(runs, tmp_path / "new" / "study.html", "GRPO")
    with written.path.with_suffix(".csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    [row] = [row for row in rows if (row["arm"], row["metric"]) == (floor, "entropy")]
    comparison = written.comparison
    assert float(row["mean"]) == comparison.table[floor]["entropy"].interval.mean
    assert float(row["difference_low"]) == comparison.difference(floor, "entropy").interval.low
    assert (row["seeds"], row["common_seeds"], row["baseline"]) == ("2", "2", "GRPO")
    [single] = [row for row in rows if (row["arm"], row["metric"]) == (alone, "entropy")]
    assert (single["seeds"], single["low"], single["high"]) == ("1", "", "")
    record = json.loads(written.path.with_suffix(".json").read_text())
    assert record["table"][0]["by_seed"].keys() == record["matched"]["accuracies"].keys() == {"1", "2"}
    assert record["arms"][alone] == [1]
    assert record["conclusions"] == written.conclusions
    assert written.lines[0] == terminal_table(comparison)
    assert written.lines[-1] == f"report: {written.path}"
