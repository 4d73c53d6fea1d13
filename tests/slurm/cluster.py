"""A real Slurm with two nodes on this machine: munged, slurmctld and two slurmd, with their own ports and folder.

The nodes n1 and n2 are the same machine under two names, so that jobs run, are signalled, time out and lose a node as
they would on a cluster, while files and ports are shared between them. Needs root, and Debian's slurm-wlm and munge.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from helpers.ports import free_ports

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")
NODES = ("n1", "n2")


def missing() -> list[str]:
    """What this machine lacks for it, in words."""
    absent = [name for name in DAEMONS if shutil.which(name) is None]
    absent += [] if os.geteuid() == 0 else ["root"]
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        absent.append("a name of this machine that resolves")
    return absent


class SlurmCluster:
    """Started by ``with``; ``environment`` is what Slurm's commands need to find it."""

    def __init__(self, folder: Path, *, node_timeout_s: int = 15) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._node_timeout_s = node_timeout_s
        self._daemons: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> SlurmCluster:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        if "slurmctld" in self._daemons:
            self.wait_until(self._is_empty, 60)
        for name in reversed(list(self._daemons)):
            self.kill(name)

    def _is_empty(self) -> bool:
        """Whether no job is left, once all are told to end: one may just be queueing itself again."""
        self.run("scancel", "--user=root", check=False)
        return not self.run("squeue", "--noheader", check=False).stdout.strip()

    def _start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("state", "munge", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir(mode=0o700)
        # munge wants every folder above its socket closed to others' writing, which a test's folder may not be.
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        (self.folder / "slurm.conf").write_text(self._configuration())
        self._begin("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self._munge_socket}",
                    f"--pid-file={self.folder}/munge/pid", f"--log-file={self.folder}/munge/log",
                    f"--seed-file={self.folder}/munge/seed")
        self.wait_until(self._munge_socket.is_socket, 20)
        self._begin("slurmctld", "-D", "-i")
        for node in NODES:
            self.start_node(node)
        self.wait_until(lambda: all(self.node_state(node) == "idle" for node in NODES), 60)

    @property
    def _munge_socket(self) -> Path:
        return self.folder / "munge" / "socket"

    def _configuration(self) -> str:
        controller, *nodes = free_ports(1 + len(NODES))
        cores = os.cpu_count() or 1
        lines = [
            "ClusterName=test",
            f"SlurmctldHost={socket.gethostname()}(127.0.0.1)",
            f"SlurmctldPort={controller}",
            "SlurmUser=root",
            # As long does a job wait that is queued again.
            f"AuthInfo=socket={self._munge_socket},cred_expire=5",
            "AuthType=auth/munge",
            f"StateSaveLocation={self.folder}/state",
            f"SlurmctldPidFile={self.folder}/slurmctld.pid",
            f"SlurmdPidFile={self.folder}/slurmd-%n.pid",
            f"SlurmdSpoolDir={self.folder}/spool-%n",
            f"SlurmdLogFile={self.folder}/slurmd-%n.log",
            f"SlurmctldLogFile={self.folder}/slurmctld.log",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "ReturnToService=2",
            "MpiDefault=none",
            "JobRequeue=1",
            f"SlurmdTimeout={self._node_timeout_s}",
            "SlurmctldTimeout=60",
            "InactiveLimit=0",
            "KillWait=20",
            "MinJobAge=600",
            "SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,requeue_delay=0",
            *(f"NodeName={node} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs={cores} "
              "State=UNKNOWN" for node, port in zip(NODES, nodes, strict=True)),
            f"PartitionName=main Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8",
        ]
        return "\n".join(lines) + "\n"

    def _begin(self, name: str, *arguments: str, key: str | None = None) -> None:
        path = shutil.which(name) or f"/usr/sbin/{name}"
        with (self.folder / f"{key or name}.out").open("a") as out:
            self._daemons[key or name] = subprocess.Popen([path, *arguments], stdout=out, stderr=subprocess.STDOUT,
                                                          stdin=subprocess.DEVNULL, env=self.environment)

    # --- nodes --------------------------------------------------------------------------------------------------------

    def start_node(self, node: str) -> None:
        self._begin("slurmd", "-D", "-N", node, key=node)

    def kill(self, name: str) -> None:
        """A daemon, or a node's by the node's name, as a crash would."""
        daemon = self._daemons.pop(name)
        daemon.kill()
        daemon.wait()

    def restore(self) -> None:
        """Ends all jobs and brings back what a test has broken: every node is up and idle afterwards."""
        self.wait_until(self._is_empty, 60)
        for node in NODES:
            if node not in self._daemons or self._daemons[node].poll() is not None:
                self.start_node(node)
            if self.node_state(node) != "idle":  # refused where it comes back by itself, as after a restart
                self.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)
        self.wait_until(lambda: all(self.node_state(node) == "idle" for node in NODES), 120)

    def node_state(self, node: str) -> str:
        return self.run("sinfo", "--noheader", f"--nodes={node}", "--format=%T", check=False).stdout.strip().rstrip("*")

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=120)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def job_state(self, job: str) -> str:
        """Such as PENDING, RUNNING, COMPLETED, FAILED."""
        return self.job(job)["JobState"]

    def job(self, job: str) -> dict[str, str]:
        """What scontrol says of it."""
        text = self.run("scontrol", "show", "job", job, "--oneliner").stdout
        return dict(field.split("=", 1) for field in text.split() if "=" in field)

    @contextlib.contextmanager
    def frozen(self, job: str) -> Iterator[None]:
        """The job's training processes wait meanwhile: however fast they are, none ends before Slurm has acted."""
        stopped = [process for process in psutil.process_iter() if _trains_for(process, job)]
        assert stopped, f"no process trains for job {job}"
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for process in stopped:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)

    def wait_for(self, job: str, *states: str, limit_s: float = 300) -> str:
        """Until the job is in one of the states, which is returned."""
        self.wait_until(lambda: self.job_state(job) in states, limit_s, lambda: f"job {job}: {self.job(job)}")
        return self.job_state(job)

    def wait_until(self, condition, limit_s: float, describe=None) -> None:
        """Fails where a daemon ends or the limit passes first."""
        deadline = time.monotonic() + limit_s
        while not condition():
            dead = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            assert not dead, f"{dead} ended: " + "".join((self.folder / f"{name}.out").read_text() for name in dead)
            if time.monotonic() > deadline:
                about = describe() if describe else self.run("sinfo", check=False).stdout
                raise AssertionError(f"waited for {limit_s:g} s: {about}")
            time.sleep(0.5)  # a condition that asks Slurm starts a process


def _trains_for(process: psutil.Process, job: str) -> bool:
    with contextlib.suppress(psutil.Error):  # it has ended, or is not ours to read
        return process.environ().get("SLURM_JOB_ID") == job and {"nemo_edo", "train"} <= set(process.cmdline())
    return False
