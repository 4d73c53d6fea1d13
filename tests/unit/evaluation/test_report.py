import re
from html.parser import HTMLParser

import pytest

from nemo_edo.errors import UserError
from nemo_edo.evaluation.report import write_report

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


@pytest.fixture
def report(tmp_path, write_run_folder):
    def build(**options):
        folder = write_run_folder(tmp_path / "run", iterations=3, problems=20, attack=ATTACK, **options)
        path = write_report(folder)
        assert path == folder / "report.html"
        return path.read_text(encoding="utf-8")
    return build


def test_the_page_links_to_nothing_and_forbids_every_request(report):
    text = report()
    assert Page(text).links == []
    assert "default-src 'none'" in text
    assert "url(" not in text[text.index("<style>"): text.index("</style>")]


def test_text_of_the_run_is_shown_and_never_becomes_markup(report):
    text = report()
    page = Page(text)
    assert page.text.count(ATTACK) > 10  # responses, a question, a label and the config
    assert not any("alert('attack')" in script and "\\u003c" not in script for script in page.scripts)
    assert ATTACK not in text


def test_plotly_is_inlined_once(report):
    assert report().count("plotly.js v") == 1


def test_conclusions_stand_before_tables_charts_and_samples(report):
    assert Page(report()).sections == ["conclusions", "arms", "results", "differences", "matched", "charts", "samples",
                                       "setup"]


def test_correctness_is_written_in_words(report):
    marks = re.findall(r'class="mark">(\w+)<', report(arms=("grpo",), start=False))
    assert marks == ["correct", "incorrect", "correct"] * 3


def test_the_arms_table_gives_every_setting_that_sets_them_apart(report):
    text = Page(report()).text
    assert "ED-GRPO, the paper's alpha 0.001 0.001 1e-06 none 0 3".replace(" ", "") in text.replace(" ", "")


@pytest.mark.parametrize(("options", "said"), [
    ({"arms": ("grpo",)}, "GRPO against Start (before RL)"),
    ({"arms": ("grpo",), "start": False}, "There is no second arm to compare with"),
    ({"interim": False}, "recorded no values for it: Test accuracy during training."),
    ({"arms": ("edo_paper", "edo_floor")}, "There is no common metric with a baseline arm"),
])
def test_a_run_with_fewer_parts_has_a_report_that_says_so(report, options, said):
    assert said in Page(report(**options)).text


def test_an_unreadable_input_is_an_error_and_leaves_no_report(tmp_path, write_run_folder):
    folder = write_run_folder(tmp_path / "run", iterations=2, problems=5)
    (folder / "samples.json").write_text("{")
    with pytest.raises(UserError, match=r"samples.json:1: not JSON"):
        write_report(folder)
    assert not (folder / "report.html").exists()
