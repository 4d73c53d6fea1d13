"""The report in a real browser: charts are drawn, nothing is fetched, nothing runs that should not, all widths fit."""

import json
import shutil

import pytest
from helpers.reported_run import enrich
from helpers.run_folder import write_run_folder

from nemo_edo.report.page import write_report
from nemo_edo.report.paper.tables import write_table
from nemo_edo.report.run_set import find_runs, one_run

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_chromium = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="chromium or chromedriver is not installed: apt-get install -y chromium chromium-driver")
pytestmark = [pytest.mark.browser, needs_chromium]
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage")
WIDTHS = (1280, 400)
CHARTS = 17 + 6
"""A full run's, and votes, pass@k and best-of-k against samples and tokens."""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run of four arms whose texts carry a script, with stored responses, curves over them, and a search."""
    folder = write_run_folder(tmp_path_factory.mktemp("report") / "run")
    enrich(folder)
    return folder


@pytest.fixture(scope="module")
def page(run_folder):
    """The report's file:// address."""
    return write_report(one_run(run_folder)).path.as_uri()


@pytest.fixture(scope="module")
def table_page(run_folder):
    """The main table's, which names this run among those that are not in it."""
    out = run_folder / "table.html"
    write_table(find_runs([str(run_folder)]), "main", out)
    return out.as_uri()


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
                           {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False})
    driver.get(page)
    driver.set_script_timeout(20)
    driver.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 500))")
    return driver


def fetched(driver) -> set[str]:
    """What the page asked for since the log was read last."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return {message["params"]["request"]["url"] for message in messages
            if message["method"] == "Network.requestWillBeSent"}


def test_every_chart_has_visible_traces_within_its_frame(opened):
    charts = opened.execute_script("""
        return [...document.querySelectorAll(".js-plotly-plot")].map((chart) => {
          const size = (node) => { const box = node.getBoundingClientRect(); return Math.max(box.width, box.height); };
          const drawn = [...chart.querySelectorAll(".trace path.js-line, .trace .point path")].filter(size);
          const frame = chart.closest("figure").getBoundingClientRect();
          const svg = chart.querySelector(".main-svg").getBoundingClientRect();
          return [chart.id, drawn.length, svg.left >= frame.left && svg.right <= frame.right];
        });""")
    assert len(charts) == CHARTS
    assert [chart for chart in charts if chart[1] == 0 or not chart[2]] == []


def test_the_page_does_not_scroll_sideways(opened):
    needed, width = opened.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert needed <= width


def test_wide_tables_scroll_within_their_own_container(opened):
    boxes = opened.execute_script(
        "return [...document.querySelectorAll('.scroll')].map((box) => [box.clientWidth, innerWidth])")
    assert boxes
    assert all(box <= width for box, width in boxes)


def test_no_visible_text_is_smaller_than_twelve_pixels(opened):
    small = opened.execute_script("""
        document.querySelectorAll("details").forEach((details) => details.open = true);
        const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), small = [];
        while (walker.nextNode()) {
          const owner = walker.currentNode.parentElement;
          if (!walker.currentNode.data.trim() || !owner.getClientRects().length) continue;
          if (parseFloat(getComputedStyle(owner).fontSize) < 12) small.push(walker.currentNode.data);
        }
        return small;""")
    assert small == []


def test_a_script_in_the_runs_text_is_shown_and_does_not_run(opened):
    attacked, title, shown = opened.execute_script(
        "return [window.attacked, document.title, document.body.textContent.includes(\"document.title = 'attacked'\")]")
    assert (attacked, title, shown) == (None, "quickstart: nemo_edo report", True)


def test_nothing_is_fetched_and_the_console_stays_clean(opened, page):
    assert fetched(opened) == {page}
    assert [entry for entry in opened.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_the_case_study_and_the_search_tree_are_shown_within_the_page(opened):
    opened.execute_script("document.querySelectorAll('details').forEach((details) => details.open = true)")
    needed, width = opened.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert needed <= width
    nodes, shared, tree_box = opened.execute_script("""
        const size = (node) => node.getBoundingClientRect().width;
        return [[...document.querySelectorAll(".tree .node")].filter(size).length,
                [...document.querySelectorAll("#case ~ .solutions .shared")].filter(size).length,
                document.querySelector(".tree").closest(".scroll").getBoundingClientRect().right];""")
    assert (nodes, shared > 0, tree_box <= width) == (7, True, True)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_table_fits_fetches_nothing_and_runs_no_script(driver, table_page, width: int):
    load(driver, table_page, width)
    needed, inner, attacked, rows = driver.execute_script(
        "return [document.documentElement.scrollWidth, innerWidth, window.attacked, "
        "document.querySelectorAll('tbody tr').length]")
    assert needed <= inner
    assert (attacked, rows) == (None, 24)
    assert fetched(driver) == {table_page}
    assert [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []
