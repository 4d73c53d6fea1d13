"""A round: a run, a fault at a random moment, the same command again until the run ends, and what became of it."""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random

from helpers.chat_server import ChatServer
from helpers.endings import ending

from .faults import FAULTS, TURN, Harm, Scene, small_disk
from .jobs import JOBS, Job
from .running import Hangs, Running, Servers

ATTEMPTS = 4
"""The same command again, at most: with each, a message is followed."""
DELAY_S = 0.4
EVALUATION_OPERATIONS = 60
"""About as many operations on its folder has an evaluation again."""
ERROR = "nemo-edo: error: "


class Wrong(AssertionError):
    """A run that broke its promise."""


@dataclass(frozen=True)
class Undisturbed:
    operations: int
    seconds: float
    ending: dict[str, str]


@dataclass(frozen=True)
class Round:
    seed: int
    number: int
    job: Job
    fault: str
    share: float
    """Of the undisturbed run's file operations: where the fault strikes."""
    delay_s: float
    """How long the run continues after it, until the fault; None: not at all."""
    chance: Random

    @classmethod
    def of(cls, seed: int, number: int) -> Round:
        chance = Random(f"{seed} {number}")
        turn, place = divmod(number, TURN)
        more = [name for name, fault in FAULTS.items() for _ in range(fault.times - 1)]
        order = Random(f"{seed} {turn}")
        fault = [*order.sample([*FAULTS], len(FAULTS)), *order.sample(more, len(more))][place]
        job = chance.choice([job for job in JOBS if FAULTS[fault].fits(job)])
        return cls(seed, number, job, fault, chance.random(), chance.choice((0.0, chance.uniform(0, DELAY_S))), chance)


def undisturbed(job: Job, folder: Path) -> Undisturbed:
    """Raises Wrong where the job does not end well by itself."""
    with ExitStack() as stack:
        folder.mkdir(parents=True)
        _, urls = _servers(stack, job, folder)
        job.prepare(folder / "run")
        begun, running = time.monotonic(), Running(job, folder / "run", urls)
        if running.finish():
            raise Wrong(running.said)
        return Undisturbed(running.operations, time.monotonic() - begun, _ending(job, folder / "run"))


def _ending(job: Job, folder: Path) -> dict[str, str]:
    """Of all its runs, by file below the folder."""
    found = {run: ending(run) for run in job.runs(folder)}
    return {str((run / name).relative_to(folder)): text for run, one in found.items() for name, text in one.items()}


def play(this: Round, expected: Undisturbed, folder: Path) -> str:
    """What happened, in words. Raises Wrong. folder: for the round alone; it is removed."""
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        place = folder / "place"
        if this.fault == "disk":
            folder.mkdir(parents=True)
            why = stack.enter_context(small_disk(place))
            if why:
                return f"skipped: {why}"
        else:
            place.mkdir(parents=True)
        servers, urls = _servers(stack, this.job, folder)
        this.job.prepare(place / "run")
        how = _play_evaluation if this.fault == "evaluate" else _play
        try:
            return how(stack, this, expected, place / "run", servers, urls)
        except Hangs as hang:
            raise Wrong(str(hang)) from hang


def _servers(stack: ExitStack, job: Job, folder: Path) -> tuple[Servers | None, list[str]]:
    """The job's servers, if they are the run's engines, and the URLs of those that it asks."""
    if job.has_judge:
        return None, [stack.enter_context(ChatServer(_verdict)).url]
    if not job.servers:
        return None, []
    servers = Servers(job.servers, folder)
    stack.callback(servers.close)
    return servers, servers.urls


def _verdict(number: int, body: dict) -> tuple[int, str]:
    """A judge's, the same for the same request."""
    text = body["messages"][0]["content"]
    return 200, f"verdict: {'correct' if len(text) % 2 else 'incorrect'}"


def _play_evaluation(
    stack: ExitStack, this: Round, expected: Undisturbed, folder: Path, servers: Servers | None, urls: list[str]
) -> str:
    """A finished run is evaluated again, otherwise, and that is killed: there is the one evaluation or the other."""
    command, ends = ["evaluate", str(folder), "evaluation.rollouts=2"], []

    def evaluated(*words: str, pause: int = 0) -> Running:
        running = stack.enter_context(Running(this.job, folder, urls, command=words, pause=pause))
        if not (pause and running.wait_for_pause()) and running.finish():
            raise Wrong(running.said)
        return running

    evaluated(*this.job.command(folder, urls))
    ends.append(_results(folder))
    operation = 1 + int(this.share * EVALUATION_OPERATIONS)
    evaluated(*command, pause=operation).kill()
    evaluated("evaluate", str(folder), "--stored")
    found = _results(folder)
    evaluated(*command)
    ends.append(_results(folder))
    if found not in ends or ends[0] == ends[1]:
        raise Wrong(f"an evaluation that was killed at its operation {operation} left a part of itself")
    return f"evaluated again, killed at operation {operation}: {'the old' if found == ends[0] else 'the new'}"


def _results(folder: Path) -> dict[str, str]:
    """The responses and results of the final evaluations, by file."""
    kept = ("evaluations/", "test_time/")
    return {name: text for name, text in ending(folder).items() if name.startswith(kept) and ".new/" not in name
            and "replacement" not in name}


def _play(
    stack: ExitStack, this: Round, expected: Undisturbed, folder: Path, servers: Servers | None, urls: list[str]
) -> str:
    operation = 0 if this.job.is_sweep else 1 + int(this.share * expected.operations)
    running = stack.enter_context(Running(this.job, folder, urls, pause=operation))
    if this.job.is_sweep:  # what its processes do is in no order
        time.sleep(this.share * expected.seconds)
    elif not running.wait_for_pause():
        return _judge(this, expected, folder, urls, Harm("nothing: it had ended"), running)
    if this.delay_s:
        running.go_on()
        time.sleep(this.delay_s)
    harm = Harm("nothing: it had ended") if running.poll() else FAULTS[this.fault].strike(
        Scene(running, folder, this.chance, servers))
    running.go_on()
    harm.is_violent |= this.job.is_sweep  # a member's end is told of in its log
    harm.told += f" at operation {operation} of {expected.operations}, {this.delay_s:.2f} s later"
    try:
        return _judge(this, expected, folder, urls, harm, running)
    except (Wrong, Hangs) as error:
        raise Wrong(f"{harm.told}\n{error}") from error


def _judge(this: Round, expected: Undisturbed, folder: Path, urls: list[str], harm: Harm, running: Running) -> str:
    status, said = running.finish(), [running.said]
    if not harm.is_violent:
        _require_words(status, running.said, stopped=(0, 2, 75, -15, 143))
    if not harm.names:
        harm.undo()
    for attempt in range(ATTEMPTS):
        if status == 0:
            _require_same(this.job, folder, expected.ending, harm, "".join(said))
            return f"{harm.told}: the same end" + (f" after {attempt} more" if attempt else "")
        before = [("tests.chaos.pauses:limit_files", 64)] if harm.names == "ulimit" else []
        with Running(this.job, folder, urls, before=before) as running:
            status = running.finish()
            said.append(running.said)
        _require_words(status, said[-1], stopped=(0, 2))
        if status:
            _follow(said[-1], folder, harm, urls)
    if harm.path is not None and not harm.is_violent:  # what was lost while the run wrote it has no copy
        return f"{harm.told}: it stops and names the file"
    raise Wrong(f"it still stops after {ATTEMPTS} attempts\n{said[-1]}")


def _require_words(status: int, said: str, stopped: tuple[int, ...]) -> None:
    """No traceback, an expected status, and where it stopped for an error, a message."""
    if "Traceback" in said or status not in stopped:
        raise Wrong(f"status {status}\n{said[-6000:]}")
    if status == 2 and not any(line.startswith(ERROR) for line in said.splitlines()):  # bad rows follow theirs
        raise Wrong(f"status 2 without a message\n{said[-6000:]}")


def _follow(said: str, folder: Path, harm: Harm, urls: list[str]) -> None:
    """Does what the message says about the damaged file, which it names."""
    message = next(line for line in said.splitlines() if line.startswith(ERROR))
    if harm.names and harm.names in message:
        harm.undo()
        harm.names = ""
        return
    if any(url in message for url in urls):  # a busy machine's servers may be slow to answer
        return
    if harm.path is None:
        raise Wrong(f"stops although nothing is damaged: {message}")
    own = [path for path in harm.path.parents if path.is_relative_to(folder) and path != folder]
    named = [harm.path, *own]
    if not any(str(path) in message for path in named):
        raise Wrong(f"the message does not name the file: {message}")
    if any(said in message for said in ("restore it", "correct them", "cannot be imported")):
        harm.restore()
    elif "delete it" in message or "remove it" in message:
        harm.remove()
    else:
        raise Wrong(f"the message does not say what to do: {message}")


def _require_same(job: Job, folder: Path, expected: dict[str, str], harm: Harm, said: str) -> None:
    """Raises Wrong unless all that differs was named, or was damaged in a run that need not read it again."""
    found = _ending(job, folder)
    different = [name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)]
    unread = harm.path if harm.path is not None and not harm.is_violent else folder
    told = [name for name in different if str(folder / name) in said or f"{(folder / name).parent} is missing" in said]
    quiet = [name for name in different if name not in told and not unread.is_relative_to(folder / name)]
    if quiet:
        raise Wrong(f"another end, and nothing says so: {', '.join(sorted(quiet))}\n{said[-3000:]}")
