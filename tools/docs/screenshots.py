"""Takes the pictures of reports in docs/images/ with chromium, from runs that are there.

    make quickstart
    python tools/docs/screenshots.py

A picture whose report is not there is named and left as it is.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
REPORTS = {  # picture: (report in runs/, width, height)
    "report.png": ("quickstart/report.html", 1280, 800),
    "real.png": ("real/report.html", 1280, 800),
}
OPTIONS = ("--headless", "--no-sandbox", "--hide-scrollbars", "--disable-gpu", "--virtual-time-budget=10000")
"""Virtual time lets the charts be drawn before the picture is taken."""


def shoot(page: Path, picture: Path, width: int, height: int) -> None:
    """The first screen of a page. Raises CalledProcessError where chromium fails."""
    with tempfile.TemporaryDirectory() as profile:
        command = ["chromium", *OPTIONS, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        subprocess.run([*command, f"--screenshot={picture}", page.resolve().as_uri()], check=True, capture_output=True)


def main() -> None:
    for name, (report, width, height) in REPORTS.items():
        page = ROOT / "runs" / report
        if page.exists():
            shoot(page, ROOT / "docs" / "images" / name, width, height)
            print(f"docs/images/{name}: {page.relative_to(ROOT)}")
        else:
            print(f"docs/images/{name} stays as it is: no {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
