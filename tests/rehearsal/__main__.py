"""python -m tests.rehearsal ARGUMENTS: Python with these arguments, and with a pretended GPU."""

import os
import sys

from .prepare import NotHere, environment

try:
    found = environment()
except NotHere as error:
    sys.exit(str(error))
os.execve(sys.executable, [sys.executable, *sys.argv[1:]], {**os.environ, **found})
