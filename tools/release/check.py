"""Checks a release before it is tagged: one version everywhere; a wheel and an sdist that work in empty environments.

    make release-check

builds the site first, and runs the functions' tests from the wheel afterwards. The argument is a Python that has the
packages ``build`` and ``twine`` (the group docs of pyproject.toml). Needs the package index for the build backend, or
a cache of it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import yaml

import nemo_edo
from nemo_edo.errors import UserError

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
IN_WHEEL = ("nemo_edo/py.typed", "nemo_edo/conf/quickstart.yaml", "nemo_edo/cluster/templates/job.sh.j2")
IN_SDIST = ("README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "mkdocs.yml", "conf/quickstart.yaml", "docs/cli.md")


def main(builder: str) -> None:
    version = check_version(ROOT, nemo_edo.__version__)
    wheel, sdist = build(builder, version)
    check_contents(wheel, sdist)
    subprocess.run([builder, "-m", "twine", "check", "--strict", wheel, sdist], check=True)
    for archive in (wheel, sdist):
        check_command(archive, version)
        print(f"{archive.name}: complete, and its command works in an empty environment")
    print(f"nemo-edo {version} can be released")


def check_version(root: Path, version: str) -> str:
    """The version, which CITATION.cff and a heading of the changelog must name. Raises UserError otherwise."""
    cited = yaml.safe_load((root / "CITATION.cff").read_text(encoding="utf-8"))["version"]
    if str(cited) != version:
        raise UserError(f"CITATION.cff names version {cited}, nemo_edo/__init__.py {version}")
    headings = re.findall(r"^## (\S+)$", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    if version not in headings:
        raise UserError(f"CHANGELOG.md has no heading '## {version}' (it has {', '.join(headings)})")
    return version


def build(builder: str, version: str) -> tuple[Path, Path]:
    """A wheel, made from the sdist, and the sdist, in dist/."""
    subprocess.run([builder, "-m", "build", "--outdir", DIST, ROOT], check=True, stdout=subprocess.DEVNULL)
    [wheel], [sdist] = DIST.glob(f"nemo_edo-{version}-*.whl"), DIST.glob(f"nemo_edo-{version}.tar.gz")
    return wheel, sdist


def check_contents(wheel: Path, sdist: Path) -> None:
    """Raises UserError for a file that one of them lacks: the package's modules, its configs, its templates."""
    modules = [str(path.relative_to(ROOT)) for path in (ROOT / "nemo_edo").rglob("*.py")]
    configs = [f"nemo_edo/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")]
    with zipfile.ZipFile(wheel) as archive:
        lacking = {*modules, *configs, *IN_WHEEL} - set(archive.namelist())
    if lacking:
        raise UserError(f"{wheel.name} lacks {', '.join(sorted(lacking))}")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    if lacking := {*modules, *IN_SDIST} - names:
        raise UserError(f"{sdist.name} lacks {', '.join(sorted(lacking))}")


def check_command(archive: Path, version: str) -> None:
    """Installs it without dependencies in an empty environment: ``--version``, ``--help`` and ``doctor`` need none.

    Raises UserError where one of them fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [Path(folder) / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, "--no-deps", archive], check=True)
        for argument, expected in (("--version", version), ("--help", "usage: nemo-edo"), ("doctor", "torch")):
            command = [Path(folder) / "bin" / "nemo-edo", argument]
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
            if expected not in done.stdout + done.stderr:
                raise UserError(f"{archive.name}: nemo-edo {argument} in an empty environment: {done.stderr[-500:]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
