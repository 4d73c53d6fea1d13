"""The tests' order on several processes."""

import re
import subprocess
import sys
from pathlib import Path

from helpers.scheduling import LONGEST_FIRST, TOGETHER

ROOT = Path(__file__).parents[2]
CONFTEST = """
from helpers.scheduling import UnitsOfWork

def pytest_xdist_make_scheduler(config, log):
    UnitsOfWork.together, UnitsOfWork.longest_first = ["pool"], ["absent", "test_long.py", "pool"]
    return UnitsOfWork(config, log)
"""
FILES = {"test_many.py": 4, "test_long.py": 1, "pool/test_one.py": 1, "pool/test_two.py": 2, "test_last.py": 2}
"""Tests of each file."""


def test_units_of_minutes_begin_a_pools_files_stay_together_and_those_with_the_most_tests_follow(tmp_path: Path):
    (tmp_path / "pool").mkdir()
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name, count in FILES.items():
        (tmp_path / name).write_text("".join(f"def test_{number}(): ...\n" for number in range(count)))
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-n", "1", "--dist", "loadgroup",
               "--rootdir", str(tmp_path), "-o", f"pythonpath={ROOT / 'tests'}", str(tmp_path)]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    order = dict.fromkeys(re.findall(r"PASSED (\S+?)::", done.stdout))
    assert list(order) == ["test_long.py", "pool/test_one.py", "pool/test_two.py", "test_many.py", "test_last.py"]


def test_every_named_unit_is_there():
    assert [unit for unit in LONGEST_FIRST if not (ROOT / unit).exists()] == []
    assert [folder for folder in TOGETHER if not (ROOT / folder).is_dir()] == []
