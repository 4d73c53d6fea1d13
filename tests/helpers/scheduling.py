"""Which tests stay together on several processes, and in which order they begin: ``pytest --dist loadgroup``."""

from collections.abc import Sequence

from xdist.scheduler import LoadGroupScheduling

TOGETHER = ("tests/distributed", "tests/rehearsal")
"""Folders whose pools of processes serve all their files. (xdist 3.8 finds no ``xdist_group`` marks in pytest 9.2.)"""
LONGEST_FIRST = (
    "tests/distributed", "tests/chaos/test_chaos.py", "tests/slurm/test_launch.py", "tests/rehearsal",
    "tests/servers/test_vllm.py", "tests/e2e/test_resume.py", "tests/servers/test_refit.py",
    "tests/servers/test_reward_server.py", "tests/servers/test_judge.py",
    "tests/e2e/test_real_model.py", "tests/e2e/test_study.py", "tests/e2e/test_selftest.py",
    "tests/e2e/test_faults.py", "tests/peers/test_light_install.py", "tests/e2e/test_train.py",
    "tests/e2e/test_examples.py", "tests/e2e/test_own_code.py",
)
"""Units of minutes. xdist begins with the most tests, and a file's one test of minutes would come last, when the other
processes have nothing left to do."""


class UnitsOfWork(LoadGroupScheduling):
    """A unit is a folder of ``together``, or a file: module fixtures are made once."""

    together: Sequence[str] = TOGETHER
    longest_first: Sequence[str] = LONGEST_FIRST

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return next((folder for folder in self.together if file.startswith(f"{folder}/")), file)

    def _assign_work_unit(self, node) -> None:
        longest = next((unit for unit in self.longest_first if unit in self.workqueue), None)
        if longest is not None:
            self.workqueue.move_to_end(longest, last=False)
        super()._assign_work_unit(node)
