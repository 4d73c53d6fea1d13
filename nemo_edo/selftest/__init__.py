"""``nemo-edo selftest``: what this machine can do, tried at small scale before anything large (docs/first_day.md)."""

from nemo_edo.selftest.check_list import CHECKS, Check
from nemo_edo.selftest.runner import selftest

__all__ = ["CHECKS", "Check", "selftest"]
