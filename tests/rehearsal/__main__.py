"""python -m tests.rehearsal ARGUMENTS: Python with these arguments, and with a pretended GPU."""

import os
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[2] / "tools" / "benchmarks"))  # peer_environment

from .prepare import NotHere, environment

try:
    found = environment()
except NotHere as error:
    sys.exit(str(error))
os.execve(sys.executable, [sys.executable, *sys.argv[1:]], {**os.environ, **found})
