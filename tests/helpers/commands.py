"""Runs ``nemo-edo`` commands one after another in this process, for tests that need Megatron's platform in place.

    python commands.py IN.json OUT.json

IN holds {name: arguments}; OUT will hold {name: {status, out, err, traceback}}. A status of null means a traceback.
"""

import contextlib
import io
import json
import sys
import traceback
from pathlib import Path

from nemo_edo.cli import main


def run(arguments: list[str]) -> dict:
    result = {"status": None, "traceback": ""}
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            result["status"] = main(arguments)
        except SystemExit as stopped:
            result["status"] = stopped.code
        except Exception:
            result["traceback"] = traceback.format_exc()
    return {**result, "out": out.getvalue(), "err": err.getvalue()}


if __name__ == "__main__":
    commands = json.loads(Path(sys.argv[1]).read_text())
    results = {name: run(arguments) for name, arguments in commands.items()}
    Path(sys.argv[2]).write_text(json.dumps(results))
