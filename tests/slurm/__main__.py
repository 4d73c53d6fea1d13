"""A Slurm of two nodes on this machine until Ctrl-C, to try ``nemo-edo launch``; run it as root in the
repository's root.

    python -m tests.slurm /tmp/slurm

It needs Debian's slurm-wlm and munge, and prints the variable by which Slurm's commands find it.
"""

import contextlib
import signal
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))  # helpers

from . import cluster

if __name__ == "__main__":
    folder = Path(sys.argv[1]).absolute()
    if absent := cluster.missing():
        sys.exit(f"needs {', '.join(absent)}: apt-get install slurm-wlm munge")
    if folder.exists():
        sys.exit(f"{folder} exists; name another folder")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with cluster.SlurmCluster(folder) as slurm, contextlib.suppress(KeyboardInterrupt):
        print(f"export SLURM_CONF={slurm.environment['SLURM_CONF']}\nnodes n1 and n2; Ctrl-C ends them", flush=True)
        signal.pause()
