"""The report in a real browser: charts are drawn, nothing is fetched, nothing runs that should not, all widths fit."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.experiment_run import write_evaluation
from helpers.run_folder import ATTACK, write_run_folder

from nemo_edo.report.page import write_report
from nemo_edo.report.run_set import one_run, read_run
from nemo_edo.rollouts.store import RolloutStore
from nemo_edo.types import Rollout, ScoredRollout

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_chromium = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="chromium or chromedriver is not installed: apt-get install -y chromium chromium-driver")
pytestmark = [pytest.mark.browser, needs_chromium]
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage")
WIDTHS = (1280, 400)
CHARTS = 2 + 2 + 3 + 8
"""Of the first screen, of diversity, of test time (votes, pass@k, best-of-k) and of diagnostics."""


def enrich(folder: Path) -> None:
    """Adds responses of every evaluated policy, curves over them, and seven nodes of a search of depth two."""
    record = read_run(folder)
    rng = np.random.default_rng(0)
    for place, (arm, evaluation) in enumerate(record.evaluations.items()):
        problems = evaluation.problems
        iteration = record.arms[arm].iterations if arm in record.arms else 0
        scored = [_response(problem, sample, rng) for problem in problems[:3] for sample in range(8)]
        if arm == "edo_paper":  # one response is truncated, another has words that no other has
            scored[3] = _with(scored[3], finished=False)
            scored[20] = _with(scored[20], text=f"{scored[20].rollout.text} found only here")
        RolloutStore(folder / "evaluations" / arm / "sampled").write(iteration, scored)
        alone = {"edo_paper": (0, 1), "edo_floor": (1,)}.get(arm, ())  # the first problem is solved by one arm only
        greedy = [replace(_response(problem, 0, rng), reward=float(number in alone))
                  for number, problem in enumerate(problems[:3])]
        RolloutStore(folder / "evaluations" / arm / "greedy").write(iteration, greedy)
        curves = {}
        for k in range(1, 17):
            level = 0.4 + 0.03 * place + 0.1 * np.log(k)
            for name in ("majority@{}", "pass@{}", "best_of@{}/mine", "best_of@{}/oracle"):
                curves[name.format(k)] = np.clip(rng.normal(level, 0.2, len(problems)), 0, 1).tolist()
            curves[f"tokens@{k}"] = [24.0 * k] * len(problems)
        write_evaluation(folder / "test_time" / f"{arm}.json", arm, curves)
    parents = [None, 0, 0, 0, 1, 1, 2]
    nodes = [{"parent": parent, "step": "" if parent is None else f"step {place} {ATTACK}", "finished": place > 3,
              "samples": 1, "reward": 0.1 * place, "width": 1.0, "value": 1.0 + 0.1 * place,
              "made_at": 0 if parent is None else 1 + (place > 3), "expanded_at": 1 if place in parents else None}
             for place, parent in enumerate(parents)]
    (folder / "search").mkdir()
    search = {"question": f"2 + 2 {ATTACK}", "best": 6, "nodes": nodes}
    (folder / "search" / "test-0.json").write_text(json.dumps(search))


def _response(problem: str, sample: int, rng: np.random.Generator) -> ScoredRollout:
    answer = str(10 + int(rng.integers(0, 3)))
    text = f"6 + 3 = 9 ; 9 + 2 = {answer} {'x' * 120 if sample == 0 else ''} ; {ATTACK} #### {answer}"
    rollout = Rollout(problem, sample, (1,), (2,), (-1.0,), text, True, 0, sample)
    return ScoredRollout(rollout, float(answer == "11"), answer, True, "")


def _with(scored: ScoredRollout, **changes: object) -> ScoredRollout:
    return replace(scored, rollout=replace(scored.rollout, **changes))


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run of four arms whose texts carry a script, with stored responses, curves over them, and a search."""
    folder = write_run_folder(tmp_path_factory.mktemp("report") / "run", replicate=True)
    enrich(folder)
    return folder


@pytest.fixture(scope="module")
def page(run_folder):
    """The report's file:// address."""
    return write_report(one_run(run_folder)).path.as_uri()


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield browser
    browser.quit()


@pytest.fixture(scope="module", params=WIDTHS)
def opened(request, driver, page):
    """The page freshly loaded at a width, after its charts have followed their columns."""
    return load(driver, page, request.param)


def load(driver, page: str, width: int):
    driver.get_log("browser"), driver.get_log("performance")
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                           {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False})
    driver.get(page)
    driver.set_script_timeout(20)
    driver.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 500))")
    return driver


def fetched(driver) -> set[str]:
    """What the page asked for since the log was read last."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return {message["params"]["request"]["url"] for message in messages
            if message["method"] == "Network.requestWillBeSent"}


FILTERED = [  # search, filter, policy, problems found, the responses that each policy then shows of the first one
    ("", "all", "", 3, [9, 9, 9, 9, 9]),
    ("", "alone", "", 1, [9, 9, 9, 9, 9]),
    ("", "wrong", "1", 3, None),
    ("", "truncated", "", 1, [0, 0, 1, 0, 0]),
    ("no such text", "all", "", 0, []),
    ("FOUND ONLY HERE", "all", "", 1, [9, 9, 9, 9, 9]),
]


@pytest.mark.parametrize(("search", "filter_", "policy", "problems", "shown"), FILTERED)
def test_samples_are_found_by_search_and_filters(opened, search, filter_, policy, problems, shown):
    count, responses, wrong = opened.execute_script("""
        const form = document.getElementById("sample-filters");
        [form.search.value, form.filter.value, form.policy.value] = arguments;
        form.dispatchEvent(new Event("input"));
        return new Promise((done) => setTimeout(() => done([
          document.getElementById("sample-count").textContent,
          [...document.querySelectorAll("#sample-list details:first-child article")].map(
            (one) => one.querySelectorAll(".response").length),
          document.querySelectorAll("#sample-list .response.right").length])), 100);""", search, filter_, policy)
    assert count == f"{problems} of 3 problems"
    assert filter_ != "wrong" or (len(responses) == 1 and wrong == 0)
    assert shown is None or responses == shown


def test_with_everything_unfolded_charts_are_in_their_frames_nothing_is_too_wide_and_no_text_is_small(opened):
    opened.execute_script("document.querySelectorAll('details').forEach((details) => details.open = true)")
    opened.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 500))")
    charts, needed, width, boxes, nodes, small = opened.execute_script("""
        const size = (node) => { const box = node.getBoundingClientRect(); return Math.max(box.width, box.height); };
        const charts = [...document.querySelectorAll(".js-plotly-plot")].map((chart) => {
          const drawn = [...chart.querySelectorAll(".trace path.js-line, .trace path.point")].filter(size);
          const frame = chart.closest("figure").getBoundingClientRect();
          const svg = chart.querySelector(".main-svg").getBoundingClientRect();
          return [chart.id, drawn.length, svg.left >= frame.left && svg.right <= frame.right];
        });
        const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), small = [];
        while (walker.nextNode()) {
          const owner = walker.currentNode.parentElement;
          if (!walker.currentNode.data.trim() || !owner.getClientRects().length) continue;
          if (parseFloat(getComputedStyle(owner).fontSize) < 12) small.push(walker.currentNode.data);
        }
        return [charts, document.documentElement.scrollWidth, innerWidth,
                [...document.querySelectorAll(".scroll")].map((box) => box.getBoundingClientRect().right),
                [...document.querySelectorAll(".tree .node")].filter((n) => n.getBoundingClientRect().width).length,
                small];""")
    assert len(charts) == CHARTS
    assert [chart for chart in charts if chart[1] == 0 or not chart[2]] == []
    assert needed <= width and boxes and max(boxes) <= width
    assert (nodes, small) == (7, [])


LOOK = """
window.outside = []; window.looks = 0;
addEventListener("DOMContentLoaded", () => {
  const begun = performance.now();
  (function look() {
    window.looks += 1;
    for (const svg of document.querySelectorAll(".js-plotly-plot .main-svg")) {
      const frame = svg.closest("figure").getBoundingClientRect(), box = svg.getBoundingClientRect();
      if (!box.width) continue;
      const beyond = Math.max(frame.left - box.left, box.right - frame.right, box.bottom - frame.bottom);
      if (beyond > 1) window.outside.push([svg.closest(".js-plotly-plot").id, performance.now() - begun, beyond]);
    }
    if (performance.now() - begun < 1000) requestAnimationFrame(look);
    else window.looked = true;
  })();
});"""


@pytest.mark.parametrize("width", [1280, 1100, 400])
def test_no_chart_leaves_its_frame_in_any_picture_of_the_first_second(driver, page, width):
    script = driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": LOOK})
    try:
        load(driver, page, width)
        driver.execute_async_script("""
            (function wait(done) { window.looked ? done() : setTimeout(wait, 50, done); })(arguments[0]);""")
        looks, outside, frames = driver.execute_script("""
            const frames = [...document.querySelectorAll("figure")].map((one) => one.getBoundingClientRect());
            return [window.looks, window.outside, frames.filter((one) => one.width)
              .map((one) => [one.left, one.top, one.right, one.bottom])];""")
    finally:
        driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)
    assert looks > 5 and frames
    assert outside == []
    common = [[min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])]
              for place, a in enumerate(frames) for b in frames[:place]]
    assert max(map(min, common)) <= 1


def test_nothing_is_fetched_and_a_script_in_the_runs_text_is_shown_and_does_not_run(opened, page):
    assert fetched(opened) == {page}
    assert [entry for entry in opened.get_log("browser") if entry["level"] == "SEVERE"] == []
    attacked, title, shown = opened.execute_script(
        "return [window.attacked, document.title, document.body.textContent.includes(\"document.title = 'attacked'\")]")
    assert (attacked, title, shown) == (None, "quickstart: nemo_edo report", True)
