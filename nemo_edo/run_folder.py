"""A run's folder: its files and who reads them back, its owner, and how far the run came."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
import yaml

from nemo_edo.config.run import BEST, START
from nemo_edo.errors import CANNOT_WRITE, RESTORE, DamagedFile, UserError
from nemo_edo.utils import files
from nemo_edo.utils.owned_file import InUse, OwnedFile

if TYPE_CHECKING:
    from nemo_edo.evaluation.results import Evaluation

MAY_CHANGE = (
    *("allow_changed", "checkpoint", "cluster", "data.allow_overlap", "exp_manager", "generation.servers", "guards"),
    *("grpo.allow_one_step", "idpo.allow_one_step", "model.seq_length", "model.verify", "name", "output_dir"),
    *("parallelism", "profile", "rewards.function_time_limit_s", "search"),
)
"""Settings that may change on resume. They change no result, except the guards', which say when a run stops, and the
layout, which rounds differently (and ``SKIPPING``). Searches keep their own settings."""
SKIPPING = ("guards.on_grad_norm_spike", "guards.grad_norm_spike")
"""The guards that change numbers, where the first is skip: they say which steps are taken."""
ANSWERING = ("generation.servers.model", "generation.servers.chat")
"""Settings that say which model of an endpoint answers, and to what: another one's responses are no part of the run."""
ENDPOINTS = "generation.servers.urls"
CONFIG, JOURNAL, LOCK, METRICS = "config.yaml", "journal.json", "lock", "metrics.jsonl"
WARNINGS = "warnings.jsonl"
SUMMARY, SAMPLES = "summary.json", "samples.json"
TRACKED = "trackers.json"
"""The run's ids in W&B and MLflow, where a resumed run continues."""
LAUNCH = "launch"
"""The folder of the cluster's job that the run is in."""
EVALUATED_AGAIN = "evaluated_again"
"""In the journal's notes of the warm-up: its evaluation is no longer of the run's config, perhaps."""
NEW, REPLACEMENT = "evaluations.new", "evaluations.replacement"
"""Folders of evaluations that are to replace the stored ones: until they are complete, and until all are in place."""


class RunFolder:
    """``config.yaml``, ``journal.json`` (the stages that are done), ``metrics.jsonl``, ``summary.json``,
    ``rollouts/ARM``, ``checkpoints/ARM``, ``failures``, ``evaluations``, ``test_time``, ``scores/ARM/NAME``,
    ``search/ARM/NAME``, ``samples``, ``comparison.json`` (with transformers), ``data`` and ``base`` (the built-in
    task's problems and model), ``report.html``, and NeMo's ``logs``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = path / "data"
        self.base = path / "base"
        self.logs = path / "logs"
        self._lock: OwnedFile | None = None

    def checkpoint(self, arm: str) -> Path:
        """Checkpoint of the policy that a finished arm has trained."""
        return self.path / "checkpoints" / arm

    def best_checkpoint(self, arm: str, iteration: int | None = None) -> Path:
        """Checkpoint of the arm's best policy by the chosen metric, or of another one that is kept by it."""
        return self.path / "checkpoints" / (f"{arm}{BEST}" + ("" if iteration is None else f"_iter_{iteration:05d}"))

    def best_checkpoints(self, arm: str) -> list[Path]:
        """All that are kept by the chosen metric."""
        name = re.compile(re.escape(f"{arm}{BEST}") + r"(_iter_\d+)?")
        return sorted(path for path in (self.path / "checkpoints").glob("*") if name.fullmatch(path.name))

    def progress(self, arm: str) -> Path:
        """What an arm in training resumes from."""
        return self.path / "checkpoints" / f"{arm}.progress"

    def failure(self, arm: str, step: int) -> Path:
        """The batch of a step that a guard has stopped the arm at; its weights are in the folder of that name."""
        return self.path / "failures" / f"{arm}_step_{step:08d}.safetensors"

    def rollouts(self, arm: str) -> Path:
        return self.path / "rollouts" / arm

    def evaluation(self, arm: str, iteration: int | None = None) -> Path:
        """The arm's results, problem by problem: the final ones, or those before an iteration."""
        return self.path / "evaluations" / (f"{arm}.json" if iteration is None else f"{arm}/iter_{iteration:05d}.json")

    def evaluated_iterations(self, arm: str) -> list[int]:
        """The iterations before which the arm's policy has been evaluated, in order."""
        found = (self.path / "evaluations" / arm).glob("iter_*.json")
        return sorted(int(path.stem.removeprefix("iter_")) for path in found)

    def evaluated(self, arm: str, kind: str) -> Path:
        """The responses of the arm's evaluations, of one of ``evaluation.results.kinds``."""
        return self.path / "evaluations" / arm / kind

    def searches(self, arm: str) -> Path:
        """A folder for each search of the test problems with the arm's policy, by its name."""
        return self.path / "search" / arm

    def scores(self, arm: str, name: str) -> Path:
        """The scores that a reward model of that name gave to the responses of the arm's evaluations."""
        return self.path / "scores" / arm / name

    def test_time(self, arm: str) -> Path:
        """What more compute at test time makes of the arm's sampled responses, problem by problem."""
        return self.path / "test_time" / f"{arm}.json"

    def evaluations(self, arms: Iterable[str]) -> dict[str, Evaluation]:
        """The final results of those of the arms that have been evaluated. Errors as of ``load_evaluation``."""
        from nemo_edo.evaluation.results import load_evaluation  # loads numpy

        paths = {arm: self.evaluation(arm) for arm in arms}
        return {arm: load_evaluation(path) for arm, path in paths.items() if path.is_file()}

    def evaluation_before(self, arm: str, iteration: int) -> Path:
        """The arm's last evaluation before the iteration; where it has none, that of the policy it started from."""
        earlier = [t for t in self.evaluated_iterations(arm) if t < iteration]
        return self.evaluation(arm, earlier[-1]) if earlier else self.evaluation(START)

    def require_arm(self, arm: str, known: Iterable[str]) -> None:
        """Raises UserError unless the run has trained the arm to its end."""
        if arm not in known:
            raise UserError(f"{self.path} has no arm {arm!r}; it has {', '.join(known)}")
        if not self.checkpoint(arm).is_dir():
            raise UserError(f"{self.checkpoint(arm)} is missing: the run did not finish arm {arm}")

    # --- whose it is -----------------------------------------------------------------------------------------------

    def check_free(self, config: str) -> None:
        """Raises UserError where the folder belongs to another run; it may be one of the same config, except for
        settings that may change."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path} is a file; choose another name=...")
        # What a process leaves that is killed before it writes the config, and a job puts there before the run begins.
        leftover = {LOCK, LAUNCH, files.temporary_name(self.path / CONFIG).name}
        if not self.path.exists() or {path.name for path in self.path.iterdir()} <= leftover:
            return
        if not (self.path / CONFIG).is_file():
            raise UserError(
                f"{self.path} exists and has no config.yaml of a run; choose another name=..., or, if it is a run's "
                f"folder, see to {self.path / CONFIG}: {RESTORE}"
            )
        metrics = self.path / METRICS
        if not self.is_finished and not self.is_begun and metrics.is_file() and metrics.stat().st_size:
            raise DamagedFile(f"{self.path / JOURNAL}, which tells what is done, is missing")
        from nemo_edo.config.compose import default_values

        there, here = files.read_mapping(self.path / CONFIG), yaml.safe_load(config)
        if len(there) < len(here) and list(there) == list(here)[: len(there)]:
            raise DamagedFile(f"{self.path / CONFIG} is damaged: it breaks off after {list(there)[-1]}")
        # An earlier version's config lacks the settings that were added since: their defaults are what it did.
        defaults = files.flattened(default_values(here.get("job")))
        there, here = (defaults | files.flattened(config) for config in (there, here))
        free = tuple(f"{key}." for key in MAY_CHANGE)
        changed = [key for key in there.keys() | here.keys() if there.get(key) != here.get(key)]
        fixed = {*ANSWERING, *(SKIPPING if "skip" in (there.get(SKIPPING[0]), here.get(SKIPPING[0])) else ())}
        asked = None in (there.get(ANSWERING[0]), here.get(ANSWERING[0]))
        if not self.is_finished and (asked or ENDPOINTS in here.get("allow_changed", ())):
            fixed -= {ANSWERING[0]}  # the servers are asked for it, and the answers compared
        different = sorted(key for key in changed if key in fixed or not f"{key}.".startswith(free))
        if different:
            key = different[0]
            raise UserError(
                f"{self.path} exists already with another config: {key} is {there.get(key)!r} there and "
                f"{here.get(key)!r} here ({len(different)} settings differ); choose another name=..., or remove it; "
                f"if nobody has changed the setting, {self.path / CONFIG} is damaged: {RESTORE}"
            )

    def open(self, config: str) -> Path | None:
        """Takes the folder for this process, until ``close``, and writes the config into it.

        An unfinished run's folder stays as it is: the run resumes. A finished one of the same config is kept under a
        numbered name, which is returned, and the folder is made anew. Raises UserError where it cannot be made, or
        another process has it.
        """
        earlier = None
        if self.is_finished:
            self.take()  # so that no other process is about to do the same
            if self.is_finished:  # otherwise another has done it, and has the new folder
                names = (self.path.with_name(f"{self.path.name}.{number}") for number in count(1))
                earlier = next(path for path in names if not path.exists())
                self.path.rename(earlier)
            self.close()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self.path} cannot be made ({error.strerror}); choose another output_dir=...") from error
        self.take()
        files.write_text(self.path / CONFIG, config)
        return earlier

    def require_unused(self) -> None:
        """Raises UserError where another process has the folder."""
        if (self.path / LOCK).is_file():
            self._take()
            self.close()

    def take(self, *, finished: bool = False) -> None:
        """Takes the folder for this process, until ``close``. finished: it has to be a finished run's.

        Raises UserError where another process has it, and where a link in it could lead writes out of it."""
        files.require_no_links(self.path, but_in="logs")  # W&B has links there
        self._take()
        if finished and not self.is_finished:
            self.close()
            raise UserError(f"{self.path} has not finished: resume the run (nemo-edo train) before this command")
        if (self.path / REPLACEMENT).is_dir():
            self.replace_evaluations()

    def replace_evaluations(self) -> None:
        """Puts the new evaluations of ``REPLACEMENT`` in the place of the stored ones: done again, it has no effect."""
        for path in sorted((self.path / REPLACEMENT).rglob("*")):
            if path.is_file():
                place = self.path / path.relative_to(self.path / REPLACEMENT)
                place.parent.mkdir(parents=True, exist_ok=True)
                for stale in place.parent.glob("*.parquet"):  # an earlier version's processes wrote several
                    stale.unlink()
                path.replace(place)
        shutil.rmtree(self.path / REPLACEMENT)

    def close(self) -> None:
        """Lets other processes have the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take(self) -> None:
        try:
            self._lock = OwnedFile(self.path / LOCK)
        except InUse as holder:
            raise UserError(
                f"{self.path} is in use by {holder}; wait for it, or end it, or choose another name=..."
            ) from None

    # --- how far the run came --------------------------------------------------------------------------------------

    @property
    def is_finished(self) -> bool:
        """Whether a run came to its end here."""
        return (self.path / SUMMARY).is_file() and (not (self.path / JOURNAL).is_file() or "report" in self.journal())

    @property
    def is_begun(self) -> bool:
        """Whether there is an unfinished run to resume."""
        return (self.path / JOURNAL).is_file() and not self.is_finished

    def journal(self) -> dict[str, dict[str, Any]]:
        """The stages that are done, in order: "files", the warm-up, the arms, "report". Of each its "metrics_bytes",
        the length of metrics.jsonl at its end, and what else was noted."""
        path = self.path / JOURNAL
        journal = files.read_object(path, ()) if path.exists() else {}
        for stage, notes in journal.items():
            if not isinstance(notes, dict) or not isinstance(notes.get("metrics_bytes", 0), int):
                raise DamagedFile(f"{path}: {stage} is {notes!r:.80}, expected an object with metrics_bytes")
        return journal

    def note(self, stage: str, **notes: Any) -> None:
        """Adds a stage that is done."""
        self.write_json(JOURNAL, {**self.journal(), stage: notes})

    def note_inputs(self, changed: Iterable[str], **notes: Any) -> None:
        """Adds to what is noted of the files that the run makes and is made from. changed: of the latter, in words."""
        noted = self.journal().get("files", {"metrics_bytes": 0})
        said = list(dict.fromkeys([*noted.get("changed", []), *changed]))
        added = {**noted, **notes, **({"changed": said} if said else {})}
        if added != noted:
            self.note("files", **added)

    def remove_progress(self, stage: str) -> None:
        """A finished stage has its final checkpoint."""
        shutil.rmtree(self.progress(stage), ignore_errors=True)

    # --- its files -------------------------------------------------------------------------------------------------

    def write_json(self, name: str | Path, value: Any) -> None:
        """An object gets its checksum, too, which ``files.read_json`` verifies. name: below the folder's path, or a
        whole path."""
        path = name if isinstance(name, Path) else self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, files.json_text(value))

    def write_evaluation(self, evaluation: Evaluation, iteration: int | None = None) -> None:
        """Problem by problem, as ``evaluation.results.load_evaluation`` reads it. iteration: of an evaluation before
        one; None: the final one."""
        self.write_json(self.evaluation(evaluation.arm, iteration), evaluation.record())

    def lines(self, required: Mapping[str, Sequence[str]] | None = None) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl, once they are found to begin with those that were logged by the last stage.
        required: keys by kind of line. Raises UserError naming the file, and the line that is damaged."""
        path = self.path / METRICS
        marks = [mark for mark in self.journal().values() if "metrics_checksum" in mark]  # earlier versions had none
        return parsed_lines(path, logged(path, marks[-1] if marks else {"metrics_bytes": 0}), required)


class NewEvaluations(RunFolder):
    """A finished run's folder while policies are evaluated again: their final evaluations are separate until all are
    complete (``put``)."""

    def __init__(self, path: Path, policies: Sequence[str], name: str) -> None:
        """name: of the folder in which a killed evaluation of the same policies and settings resumes."""
        super().__init__(path)
        self._policies = policies
        self.new = path / NEW / name

    def evaluation(self, arm: str, iteration: int | None = None) -> Path:
        path = super().evaluation(arm, iteration)
        return self._anew(path) if iteration is None and arm in self._policies else path

    def evaluated(self, arm: str, kind: str) -> Path:
        return self._anew(super().evaluated(arm, kind))

    def test_time(self, arm: str) -> Path:
        return self._anew(super().test_time(arm))

    def _anew(self, path: Path) -> Path:
        return self.new / path.relative_to(self.path)

    def put(self) -> None:
        """Puts the new evaluations, all of which are complete, in the place of the stored ones."""
        with (self.new / METRICS).open("rb") as metrics:
            os.fsync(metrics.fileno())
        self.new.rename(self.path / REPLACEMENT)
        self.replace_evaluations()
        shutil.rmtree(self.path / NEW)


def logged(path: Path, mark: Mapping[str, Any]) -> bytes:
    """The content of metrics.jsonl, once what is before a mark (``MetricsLog.mark``) is found to be what was logged.
    Raises UserError where it is not, or where the file is shorter."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read ({error.strerror})") from error
    size, known = mark["metrics_bytes"], mark.get("metrics_checksum")  # None: of an earlier version
    whole = len(content) >= size and content[:size][-1:] in (b"\n", b"")
    if not whole or known not in (None, xxhash.xxh3_128_hexdigest(content[:size])):
        raise DamagedFile(f"{path}: its first {size} bytes are not those that were written")
    return content


def parsed_lines(
    path: Path, content: bytes, required: Mapping[str, Sequence[str]] | None = None
) -> list[dict[str, Any]]:
    lines = []
    for number, one in enumerate(content.splitlines(), start=1):
        try:
            lines.append(json.loads(one or b"{}"))
            missing = [key for key in (required or {}).get(lines[-1].get("kind"), ()) if key not in lines[-1]]
            if missing:
                raise ValueError(f"a {lines[-1]['kind']} line without {missing[0]}")
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            said = f"{path}:{number}: {error} (a line that a kill cut off may go; otherwise {RESTORE})"
            raise UserError(said) from error
    return lines


@contextmanager
def taken(folders: Iterable[Path]) -> Iterator[None]:
    """Runs' folders are this process's for a while. Those that cannot be written to are nobody's."""
    with ExitStack() as stack:
        for path in dict.fromkeys(path.resolve() for path in folders if (path / CONFIG).is_file()):
            folder = RunFolder(path)
            try:
                folder.take()
            except OSError as error:
                if error.errno not in CANNOT_WRITE:
                    raise
            stack.callback(folder.close)
        yield
