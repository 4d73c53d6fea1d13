"""What befalls a run."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil

from .jobs import Job
from .running import Running, Servers

HARMLESS = ("lock", "logs", "report.html")
"""Of the run folder: nothing depends on what is in them."""
DISK_BYTES = 64 << 20


@dataclass
class Scene:
    """A run that stands still."""

    running: Running
    folder: Path
    """The run's, which need not exist yet."""
    chance: Random
    servers: Servers | None


@dataclass
class Harm:
    told: str
    path: Path | None = None
    """The damaged file."""
    original: bytes = b""
    is_violent: bool = False
    """Whether the run's first process was killed, which may then say and leave anything."""
    undo: Callable[[], None] = lambda: None
    names: str = ""
    """What a message has that is about this harm, where it is not about a file; following it undoes the harm."""

    def restore(self) -> None:
        """Puts the damaged file back."""
        self.remove()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(self.original)

    def remove(self) -> None:
        if self.path.is_dir():
            shutil.rmtree(self.path)
        self.path.unlink(missing_ok=True)


# --- processes ----------------------------------------------------------------------------------------------------


def kill_first(scene: Scene) -> Harm:
    scene.running.kill()
    return Harm("SIGKILL to all of its processes", is_violent=True)


def kill_any(scene: Scene) -> Harm:
    processes = scene.running.processes()
    if not processes:
        return Harm("nothing: it has just ended")
    place = scene.chance.randrange(len(processes))
    doomed = processes[place]
    told = f"SIGKILL to process {place + 1} of {len(processes)}"
    with contextlib.suppress(psutil.NoSuchProcess):
        told += f" ({' '.join(doomed.cmdline()[-3:])[:60]})"
        doomed.kill()
    return Harm(told, is_violent=doomed.pid in scene.running.ranks)


def terminate(scene: Scene) -> Harm:
    scene.running.send(signal.SIGTERM)
    return Harm("SIGTERM")


def strike_member(scene: Scene) -> Harm:
    """What befalls a sweep: the whole of it, or a process of one of its runs."""
    return scene.chance.choice((kill_first, kill_any, kill_any, terminate))(scene)


def kill_server(scene: Scene) -> Harm:
    count = len(scene.servers.urls)
    places = scene.chance.sample(range(count), scene.chance.randint(1, count))
    scene.servers.kill(places)
    return Harm(f"SIGKILL to {len(places)} of {count} servers", undo=scene.servers.start)


# --- files --------------------------------------------------------------------------------------------------------


def damage(scene: Scene, *, alive: bool) -> Harm:
    """Damages a file of the run folder; the run is killed before, unless ``alive``."""
    if not alive:
        scene.running.kill()
    parts = sorted(path for path in scene.folder.glob("*") if path.name not in HARMLESS)
    files = [sorted(path for path in (part, *part.rglob("*")) if path.is_file()) for part in parts]
    files = [found for found in files if found]
    if not files:
        return Harm("nothing: it has no file yet", is_violent=not alive)
    path = scene.chance.choice(scene.chance.choice(files))  # each part of the folder is as likely
    original = path.read_bytes()
    told = scene.chance.choice(DAMAGES)(path, scene.chance)
    when = "while it ran" if alive else "after SIGKILL"
    return Harm(f"{path.relative_to(scene.folder)} {told} {when}", path, original, is_violent=not alive)


def flip(path: Path, chance: Random) -> str:
    content = bytearray(path.read_bytes())
    if not content:
        return "left as it is"
    place, bit = chance.randrange(len(content)), chance.randrange(8)
    content[place] ^= 1 << bit
    path.write_bytes(content)
    return f"has bit {bit} of byte {place} flipped"


def cut(path: Path, chance: Random) -> str:
    size = chance.randrange(path.stat().st_size + 1)
    os.truncate(path, size)
    return f"cut to {size} bytes"


def empty(path: Path, chance: Random) -> str:
    os.truncate(path, 0)
    return "emptied"


def delete(path: Path, chance: Random) -> str:
    path.unlink()
    return "deleted"


def replace_by_folder(path: Path, chance: Random) -> str:
    path.unlink()
    path.mkdir()
    return "is a folder"


def lengthen(path: Path, chance: Random) -> str:
    with path.open("ab") as file:
        file.write(chance.randbytes(7))
    return "has seven more bytes"


DAMAGES = (flip, flip, cut, empty, delete, replace_by_folder, lengthen)


# --- the machine --------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(folder: Path) -> Iterator[str | None]:
    """A separate file system at ``folder``; yields why there is none."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    mounted = shutil.which("mount") is not None and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield None if mounted else "no right to mount a tmpfs"
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


def fill_disk(scene: Scene) -> Harm:
    """Leaves a few bytes of a ``small_disk``."""
    filler = scene.folder.parent / "filler"
    free = shutil.disk_usage(scene.folder.parent).free
    left = scene.chance.choice((0, scene.chance.randrange(20_000), scene.chance.randrange(1_500_000)))
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):  # the run may be faster
        file.write(bytes(max(0, free - left)))
    return Harm(f"{left} bytes left of the disk", undo=filler.unlink)


# --- what a run is made from, and who else uses it ------------------------------------------------------------------


def change_input(scene: Scene) -> Harm:
    """Changes an input of a run that has begun and is killed."""
    scene.running.kill()
    if not (scene.folder / "journal.json").is_file():
        return Harm("nothing: it has not begun", is_violent=True)
    here = scene.running.job.inputs(scene.folder)
    files = (one for one in here.rglob("*") if one.is_file() and "__pycache__" not in str(one))
    path = scene.chance.choice(sorted(files))
    original = path.read_bytes()
    told = scene.chance.choice((flip, lengthen, reverse, delete))(path, scene.chance)
    return Harm(f"input {path.name} {told} after SIGKILL", path, original, is_violent=True)


def reverse(path: Path, chance: Random) -> str:
    path.write_bytes(b"\n".join(path.read_bytes().split(b"\n")[::-1]))
    return "has its lines reversed"


def damage_cache(scene: Scene) -> Harm:
    """Flips bits of the judge's cache."""
    scene.running.kill()
    path = scene.folder.parent / "judge.sqlite"
    if not path.is_file():
        return Harm("nothing: there is no cache yet", is_violent=True)
    original = path.read_bytes()
    told = [flip(path, scene.chance) for _ in range(scene.chance.randint(1, 20))][-1]
    return Harm(f"{path.name} {told}, and others, after SIGKILL", path, original, is_violent=True)


def swap_servers(scene: Scene) -> Harm:
    scene.running.kill()
    if "served" not in _text(scene.folder / "journal.json"):
        return Harm("nothing: it knows no server yet", is_violent=True)
    scene.servers.serve("another")
    return Harm("its servers have another model", is_violent=True, names="generation.servers.urls",
                undo=lambda: scene.servers.serve("policy"))  # fmt: skip


def limit_files(scene: Scene) -> Harm:
    """The next attempt may open few files."""
    scene.running.kill()
    return Harm("ulimit -n 64 after SIGKILL", is_violent=True, names="ulimit")


def second_command(scene: Scene) -> Harm:
    """Another command on the run, which has its folder or will."""
    run, train = str(scene.folder), scene.running.job.command(scene.folder, scene.servers.urls if scene.servers else [])
    commands = [["evaluate", run], ["evaluate", run, "--stored"], ["report", run]]
    if scene.running.job.ranks == 1 and _text(scene.folder / "lock"):
        commands.append(train)
    command = scene.chance.choice(commands)
    with Running(scene.running.job, scene.folder, [], command=command) as second:
        status = second.finish()
        alone = scene.running.poll()  # the first has ended in the meantime, and the second may do its work
        refused = status == 2 or (alone and status == 0)
        assert refused and "Traceback" not in second.said, f"{command[0]} next to it: {status}\n{second.said}"
    return Harm(f"{' '.join(command[:1])} next to it")


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


@dataclass(frozen=True)
class Fault:
    times: int
    """How often it is played in ``TURN`` rounds."""
    strike: Callable[[Scene], Harm]
    fits: Callable[[Job], bool] = lambda job: not job.is_sweep


FAULTS = {
    "kill": Fault(3, kill_first),
    "kill any": Fault(4, kill_any),
    "terminate": Fault(3, terminate),
    "member": Fault(2, strike_member, lambda job: job.is_sweep),
    "damage": Fault(7, lambda scene: damage(scene, alive=False)),
    "damage alive": Fault(4, lambda scene: damage(scene, alive=True)),
    "disk": Fault(2, fill_disk, lambda job: not (job.is_sweep or job.has_inputs or job.has_judge)),
    "server": Fault(2, kill_server, lambda job: job.servers > 0),
    "swap": Fault(2, swap_servers, lambda job: job.servers > 0),
    "input": Fault(4, change_input, lambda job: job.has_inputs),
    "cache": Fault(2, damage_cache, lambda job: job.has_judge),
    "second": Fault(2, second_command),
    "files": Fault(1, limit_files, lambda job: job.ranks == 1 and not job.is_sweep),
    "evaluate": Fault(2, kill_first, lambda job: job.name == "grpo"),
}
TURN = sum(fault.times for fault in FAULTS.values())
"""Rounds that play every fault so often, in the first ``len(FAULTS)`` of them once."""
