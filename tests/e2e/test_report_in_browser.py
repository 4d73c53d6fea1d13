"""The report in a real browser: charts are drawn, nothing is fetched, nothing runs that should not, all widths fit."""

import json
import shutil

import pytest

from nemo_edo.evaluation.report import write_report

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_chromium = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="chromium or chromedriver is not installed: apt-get install -y chromium chromium-driver")
pytestmark = needs_chromium
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage")
WIDTHS = (1280, 400)
CHARTS = 12


@pytest.fixture(scope="module")
def page(tmp_path_factory, write_run_folder):
    """The file:// address of a report on four arms whose texts carry a script."""
    return write_report(write_run_folder(tmp_path_factory.mktemp("report") / "run")).as_uri()


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
    driver.get_log("browser"), driver.get_log("performance")
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                           {"width": request.param, "height": 900, "deviceScaleFactor": 1, "mobile": False})
    driver.get(page)
    driver.set_script_timeout(20)
    driver.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 500))")
    return driver


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
    messages = [json.loads(entry["message"])["message"] for entry in opened.get_log("performance")]
    fetched = {message["params"]["request"]["url"] for message in messages
               if message["method"] == "Network.requestWillBeSent"}
    assert fetched == {page}
    assert [entry for entry in opened.get_log("browser") if entry["level"] == "SEVERE"] == []
