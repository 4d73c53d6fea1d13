"""The end of a sweep: lists the members that have finished and those that have not, and reports on the former.

python -m nemo_edo.cluster.finish LAUNCH SWEEP
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path


def main() -> int:
    launch, sweep = Path(sys.argv[1]), Path(sys.argv[2])
    names = json.loads((launch / "members.json").read_text(encoding="utf-8"))
    missing = {place: name for place, name in names.items() if not (launch / "finished" / place).exists()}
    print(f"{len(names) - len(missing)} of {len(names)} members have finished")
    for place, name in missing.items():
        attempts = sorted((launch / "attempts" / place).glob("*"), key=lambda path: path.stat().st_mtime)
        print(f"not finished: {name}, see {attempts[-1] if attempts else 'squeue: it never ran'}")
    if missing:
        print("the same launch resumes these only")
    finished = [str(sweep / name) for place, name in names.items() if place not in missing]
    report = [sys.executable, "-m", "nemo_edo", "report", *finished, "--out", str(sweep / "report.html")]
    status = subprocess.run(report, check=False).returncode if finished else 0
    if missing and finished:
        print(f"the report has the finished members only; to renew it: nemo-edo report {shlex.quote(str(sweep))}")
    return status or (1 if missing else 0)


if __name__ == "__main__":
    sys.exit(main())
