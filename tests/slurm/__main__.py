"""A Slurm of two nodes on this machine until Ctrl-C, to try ``nemo-edo launch``; run it as root in the
repository's root.

    python -m tests.slurm /tmp/slurm

It needs Debian's slurm-wlm and munge, and prints the variable by which Slurm's commands find it.
"""

import argparse
import signal
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))  # helpers

from . import cluster


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.slurm", description=__doc__.partition(",")[0])
    parser.add_argument("folder", type=Path, help="for its files; it must not exist yet")
    folder = parser.parse_args().folder.absolute()
    if absent := cluster.missing():
        parser.error(f"needs {', '.join(absent)}: apt-get install slurm-wlm munge")
    if folder.exists():
        parser.error(f"{folder} exists; name another folder")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with cluster.SlurmCluster(folder) as slurm:
        print(f"export SLURM_CONF={slurm.environment['SLURM_CONF']}\nnodes n1 and n2; Ctrl-C ends them", flush=True)
        try:
            signal.pause()
        except KeyboardInterrupt:
            return 0


if __name__ == "__main__":
    sys.exit(main())
