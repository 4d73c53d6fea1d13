"""``python -m nemo_edo``: the ``nemo-edo`` command."""

import sys

from nemo_edo.cli import main

if __name__ == "__main__":
    sys.exit(main())
