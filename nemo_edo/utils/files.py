"""Atomic file writes, JSON files whose mistakes are named, and sizes such as 5GB."""

import contextlib
import errno
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import xxhash
import yaml

from nemo_edo.errors import UserError

LONGEST_PART = 150  # characters of a text in a file's name: file systems take 255 bytes
LONGEST_YAML = 10 << 20  # bytes of a YAML file that is read
LOG_LINES = 25  # of a log that error messages show


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write to that replaces ``path`` at the end, once it is on disk: if the process is killed, ``path`` has
    either its old content or all of the new. Raises UserError where it is a folder."""
    temporary = temporary_name(path)
    if folder := next((one for one in (path, temporary) if one.is_dir()), None):
        raise UserError(f"{folder} is a folder, and a file is to be written there; remove it")
    try:
        temporary.unlink(missing_ok=True)  # of a killed process, or a link that somebody has put there
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """The file has its name once all of it is on disk."""
    with replacing(path) as file:
        file.write(text.encode())


def temporary_name(path: Path) -> Path:
    """The file that ``replacing`` writes to; a killed process may leave it behind."""
    return path.with_name(f".{path.name}.tmp")


def require_no_links(folder: Path, but_in: str) -> None:
    """Raises UserError for a link in a folder, which could lead writes out of it, and for a pipe, which a reader would
    wait for. but_in: a part where they may be."""
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            if (path := Path(place, name)).is_symlink() or path.is_fifo():
                remedy = "nothing is written through links; put what it names in its place"
                raise UserError(f"{path} is a link or a pipe, and {remedy}")
        if Path(place) == folder and but_in in folders:
            folders.remove(but_in)


def checksum(path: Path) -> str:
    """Checksum of a file's content (xxHash, 128 bits): it finds damage, not forgery."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def file_name(text: str) -> str:
    """A text as a part of a file's name: with a digest where it is long, or has what a name cannot have."""
    kept = re.sub(r"[^\w.,=+-]", "_", text, flags=re.ASCII)[:LONGEST_PART].lstrip(".")
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=6).hexdigest()
    return kept if kept == text else f"{kept}_{digest}"


def check_folder(folder: Path) -> None:
    """Raises UserError where files cannot be written into a folder, or where it is not there and cannot be made."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".nemo_edo_", dir=there))
    except OSError as error:
        what = "cannot be written to" if there == folder.absolute() else f"cannot be made in {there}"
        # Some file systems of the kernel, such as /proc, say that a folder is missing which is there.
        why = "its file system takes no files" if error.errno == errno.ENOENT else error.strerror
        raise UserError(f"{folder} {what} ({why}); choose another output_dir=...") from error


def read_text(path: Path) -> str:
    """Raises UserError naming a file that is missing, cannot be read, or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; a finished run's folder has it: restore it from a copy") from None
    except (OSError, UnicodeDecodeError) as error:
        why = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else f"not UTF-8 text: {error}"
        raise UserError(f"{path}: {why}; restore it from a copy") from error


CHECKSUM = "nemo_edo.checksum"  # the last key of an object that ``json_text`` has written


def end_of_log(path: Path) -> str:
    """The last lines of a log, to append to an error message; empty where there is none."""
    if not path.is_file():
        return ""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
    return "\n".join([f"; the end of {path}:", *(f"  | {line}" for line in lines)])


def json_text(value: Any) -> str:
    """A file's content, an object's with a checksum for ``read_json``. Raises ValueError for NaN and infinity."""
    if isinstance(value, dict):
        value = {**value, CHECKSUM: _checksum(json.loads(json.dumps(value, allow_nan=False)))}
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def read_json(path: Path) -> Any:
    """Raises UserError for a missing file, the line that is not JSON, and content changed since ``json_text``."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # Python reads neither deep nesting nor thousands of digits
        line, why = getattr(error, "lineno", 1), getattr(error, "msg", error)
        raise UserError(f"{path}:{line}: not valid JSON: {why}; restore it from a copy") from error
    if isinstance(value, dict) and CHECKSUM in value and value.pop(CHECKSUM) != _checksum(value):
        raise UserError(f"{path}: has other content than was written: its checksum differs; restore it from a copy")
    return value


def _checksum(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value).encode())


def read_object(path: Path, required: Collection[str]) -> dict[str, Any]:
    """Raises UserError as ``read_json`` does, and naming a required key that is missing."""
    record = read_json(path)
    if not isinstance(record, dict):
        raise UserError(f"{path}: expected an object, got {type(record).__name__}")
    for key in required:
        if key not in record:
            raise UserError(f"{path}: {key} is missing")
    return record


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flattened(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def read_mapping(path: Path) -> dict[str, Any]:
    """A YAML file that a program wrote, such as a run's config.yaml. Raises UserError as ``read_text`` does, where it
    is no mapping, and where it is large or has an alias, by which a small file stands for a huge one."""
    text = read_text(path)
    try:
        if len(text) > LONGEST_YAML:
            raise ValueError(f"it has {len(text)} characters, at most {LONGEST_YAML} are read")
        if "*" in text and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise ValueError("it has aliases (*name), which nemo_edo does not write")
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # YAML reads numbers and dates by Python's types
        said = " ".join(str(error).split())  # YAML's has several lines
        raise UserError(f"{path}: not YAML: {said}; restore it from a copy") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a mapping, got {type(values).__name__}; restore it from a copy")
    return values


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(name: str, text: str, units: Collection[str] = _UNITS.keys()) -> int:
    """The bytes of 5GB, 500MB or 2GiB, as ``transformers`` reads them: a number and one of ``units`` (upper case; "" is
    bytes). Raises UserError that names ``name`` for any other text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", text.strip().upper())
    size = float(found[1]) * _UNITS[found[2]] if found and found[2] in units else 0
    if not size:
        raise UserError(f"{name} is {text}, expected a size such as 80GB or 2GiB")
    return int(size)
