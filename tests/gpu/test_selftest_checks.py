"""Each check of ``nemo-edo selftest`` on one GPU. Its splits need several ranks: torchrun, docs/first_day.md."""

import pytest

from nemo_edo.checks.machine import IMPOSSIBLE, PASS, SELFTEST, Check, Machine
from nemo_edo.checks.selftest import CHECKS, carried_out, prepared

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> Machine:
    return prepared(Machine.of_ranks(tmp_path_factory.mktemp("shared"), limit_s=60.0), CHECKS)


@pytest.mark.parametrize("check", [check for check in CHECKS if SELFTEST in check.runs_in],
                         ids=lambda check: f"{check.group}: {check.name}")
def test_the_check_passes(machine: Machine, check: Check):
    finding = carried_out(check, machine)
    if finding.status == IMPOSSIBLE:
        pytest.skip(finding.detail)
    assert finding.status == PASS, f"{finding.detail}; do: {finding.remedy}"
