"""What a run was made from: the content of its input files, noted when it begins and compared at each start.

Sizes and times are compared first: a file's content is read once when the run begins, and again only where these
differ.
"""

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nemo_edo.errors import UserError
from nemo_edo.run_folder import ENDPOINTS
from nemo_edo.utils.files import checksum
from nemo_edo.utils.wording import did_you_mean

READERS = 8
"""Threads that read contents."""

Stamp = tuple[int, int, int]
"""A file's size and the times of its last change, in nanoseconds: of its content, and of anything about it."""
Notes = dict[str, dict[str, list]]
"""Setting -> file -> [checksum, *Stamp]."""


class MadeFrom:
    """The files of each setting that names some, by names that do not depend on where their folder is."""

    def __init__(
        self,
        files: Mapping[str, Mapping[str, Path]],
        noted: Notes,
        allowed: Sequence[str] = (),
        harmless: Collection[str] = (),
    ) -> None:
        """noted: what a run that resumes has noted. allowed, harmless: settings whose files may have changed; a change
        of what is harmless reaches no number of the run. Raises UserError for any other change."""
        if unknown := set(allowed) - files.keys() - noted.keys() - {ENDPOINTS}:
            name = min(unknown)
            raise UserError(f"allow_changed has {name!r}, which is no input of this run{did_you_mean(name, files)}")
        self.changed: list[str] = []
        """What has changed since the run began, in sentences."""
        self._files, self._noted = files, noted
        self._stamps = {path: _stamp(path) for by_name in files.values() for path in by_name.values()}
        self._checksums: dict[Path, str] = {}
        for name in noted:
            changed = next(self._changes(name, files.get(name, {})), None)
            if changed is None:
                continue
            if name not in (*allowed, *harmless):
                raise UserError(
                    f"{name}: {changed} when the run began: restore it, choose another name=..., or resume all the "
                    f"same with allow_changed=[{name}]"
                )
            why = "which reaches none of its numbers" if name in harmless else "as allow_changed says"
            self.changed.append(f"{name}: {changed} when the run began, {why}")
            print(f"warning: {self.changed[-1]}", file=sys.stderr)
            self._noted = {setting: notes for setting, notes in self._noted.items() if setting != name}

    def _changes(self, name: str, by_name: Mapping[str, Path]) -> Iterator[str]:
        noted = self._noted[name]
        for file, path in by_name.items():
            if self._stamps[path] is None:
                yield f"{path} is missing, which was there"
            elif file not in noted:
                yield f"{path} was not there"
            elif tuple(noted[file][1:]) == self._stamps[path]:
                self._checksums[path] = noted[file][0]
            elif self._checksum(path) != noted[file][0]:
                yield f"{path} has other content than"
        if missing := sorted(noted.keys() - by_name.keys()):
            folder = next((str(path).removesuffix(file) for file, path in by_name.items()), "")
            yield f"{', '.join(folder + file for file in missing)} is missing, which was there"

    def _checksum(self, path: Path) -> str:
        if path not in self._checksums:
            self._checksums[path] = checksum(path)
        return self._checksums[path]

    def notes(self) -> Notes:
        """What to note. Reads the contents that are not known yet."""
        with ThreadPoolExecutor(READERS) as threads:
            list(threads.map(self._checksum, self._stamps))
        self.require_unchanged()
        return {
            name: {file: [self._checksums[path], *self._stamps[path]] for file, path in by_name.items()}
            for name, by_name in self._files.items()
        }

    def require_unchanged(self) -> None:
        """Raises UserError for a file that has changed since this process began to read it."""
        for name, by_name in self._files.items():
            for path in by_name.values():
                stamp = _stamp(path)
                if stamp == self._stamps[path]:
                    continue
                if stamp is None or self._checksums.get(path) != checksum(path):
                    raise UserError(
                        f"{path} ({name}) has changed while the run read it; what is saved is of the file as it was: "
                        f"restore it and rerun the command, or resume with allow_changed=[{name}]"
                    )
                self._stamps[path] = stamp


def require_noted(name: str, path: Path, noted: Notes) -> None:
    """Raises UserError where the files of one setting are not those that a run noted, if it did."""
    MadeFrom({name: files_below(path, ["**/*"])}, {key: one for key, one in noted.items() if key == name})


def compare_served(noted: str | None, served: str, allowed: Sequence[str]) -> tuple[str, list[str]]:
    """The text to note of the model that servers have, and the changes since the run began, in sentences. Each model
    is ``NAME (ROOT)``; of a server that does not tell the root, it is the name twice. Raises UserError for another
    model than the run noted."""
    name = served.partition(" (")[0]
    no_root = f"{name} ({name})"
    if not noted or noted in (served, no_root):
        return served, []
    if served == no_root and noted.startswith(f"{name} ("):
        return noted, []
    changed = f"{ENDPOINTS}: the servers have {served}, and had {noted} when the run began"
    if ENDPOINTS not in allowed:
        raise UserError(
            f"{changed}: serve that model, choose another name=..., or resume all the same with "
            f"allow_changed=[{ENDPOINTS}]"
        )
    print(f"warning: {changed}, as allow_changed says", file=sys.stderr)
    return served, [f"{changed}, as allow_changed says"]


def files_below(path: Path, patterns: Sequence[str]) -> dict[str, Path]:
    """The file, or a folder's, by their names in it."""
    if not path.is_dir():
        return {path.name: path}
    files = {file for pattern in patterns for file in path.glob(pattern) if file.is_file()}
    return {str(file.relative_to(path)): file for file in sorted(files)}


def _stamp(path: Path) -> Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None  # who reads it says what is wrong
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns
