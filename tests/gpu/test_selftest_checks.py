"""Each check of ``nemo-edo selftest`` on one GPU. Its splits need several ranks: torchrun, docs/first_day.md."""

import pytest

from nemo_edo.selftest import CHECKS, Check
from nemo_edo.selftest.outcome import IMPOSSIBLE, PASS
from nemo_edo.selftest.runner import prepare
from nemo_edo.selftest.this_machine import Machine, machine

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Machine:
    scratch = tmp_path_factory.mktemp("scratch")
    found = machine(tmp_path_factory.mktemp("shared"), scratch)
    return prepare(found, CHECKS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: f"{check.group}: {check.name}")
def test_the_check_passes(here: Machine, check: Check):
    outcome = check.run(here, CHECKS.index(check))
    if outcome.status == IMPOSSIBLE:
        pytest.skip(outcome.detail)
    assert outcome.status == PASS, f"{outcome.detail}; do: {outcome.remedy}"
