"""The end of a sweep: which members have finished and which have not, and the report of those that have.

python -m nemo_edo.cluster.finish LAUNCH SWEEP
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from nemo_edo.cli import main as nemo_edo


def main() -> int:
    launch, sweep = Path(sys.argv[1]), Path(sys.argv[2])
    names = json.loads((launch / "members.json").read_text(encoding="utf-8"))
    missing = {place: name for place, name in names.items() if not (launch / "finished" / place).exists()}
    print(f"{len(names) - len(missing)} of {len(names)} members have finished")
    for place, name in missing.items():
        attempts = sorted((launch / "attempts" / place).glob("*"), key=lambda path: path.stat().st_mtime)
        print(f"not finished: {name}, see {attempts[-1] if attempts else 'squeue: it never ran'}")
    if missing:
        print("the same launch runs these again, and these alone")
    finished = [str(sweep / name) for place, name in names.items() if place not in missing]
    status = nemo_edo(["report", *finished, "--out", str(sweep / "report.html")]) if finished else 0
    if missing and finished:
        print(f"the report is of the finished ones alone: nemo-edo report {shlex.quote(str(sweep))} makes it anew")
    return status or (1 if missing else 0)


if __name__ == "__main__":
    sys.exit(main())
