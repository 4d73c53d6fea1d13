"""A user's own functions, named by import path: ``pkg.mod:fn``. The working directory is importable."""

import ast
import contextlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from nemo_edo.errors import UserError
from nemo_edo.utils.wording import did_you_mean

_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def is_import_path(path: str) -> bool:
    return _PATH.fullmatch(path) is not None


def load_function(path: str, key: str) -> Callable[..., Any]:
    """The function of an import path, its module imported; ``key`` is the setting that names it. Raises UserError for
    another form, for a module that is missing or fails, and for a missing function."""
    if not is_import_path(path):
        raise UserError(f"{key} is {path!r}, expected an import path such as my_package.my_module:my_function")
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path:  # a console script has its own folder there, and not the working directory
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except UserError:
        raise
    except Exception as error:  # whatever a user's module raises is a user's error
        why, missing = said(error), error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            there = f"in the working directory ({os.getcwd()}), in PYTHONPATH, or installed"
            why = f"there is no module {missing}: expected one {there}"
        raise UserError(f"{key}: {module_name} cannot be imported: {why}") from error
    function: Any = module
    for part in name.split("."):
        if not hasattr(function, part):
            public = [one for one in dir(function) if not one.startswith("_")]
            raise UserError(f"{key} is {path!r}, but {module_name} has no {name}{did_you_mean(part, public)}")
        function = getattr(function, part)
    if not callable(function):
        raise UserError(f"{key} is {path!r}, which is not a function but of type {type(function).__name__}")
    return function


def source_files(path: str) -> dict[str, Path]:
    """The file of an import path's module and those of the modules that it imports from the same folder (of an
    installed one: the same package), by their names there. None of nemo_edo's, and none where there is no source."""
    module = path.partition(":")[0]
    package = module.partition(".")[0]
    root = Path.cwd()
    if _module_file(root, package) is None:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.origin or not (file := Path(spec.origin)).is_file():
            return {}
        root = file.parents[1] if spec.submodule_search_locations else file.parent
    found: dict[str, Path] = {}
    names = [module]
    while names:
        name = names.pop()
        foreign = name.partition(".")[0] != package and {"site-packages", "dist-packages"} & {*root.parts}
        file = None if foreign or f"{name}.".startswith("nemo_edo.") else _module_file(root, name)
        if file is None or (key := str(file.relative_to(root))) in found:
            continue
        found[key] = file
        names += [name[: dot.start()] for dot in re.finditer(r"\.", name)]
        parents = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
        with contextlib.suppress(SyntaxError):  # which the import tells of
            for node in ast.walk(ast.parse(file.read_bytes())):
                if isinstance(node, ast.Import):
                    names += [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):  # of modules, and of what may be modules
                    above = parents[: len(parents) - node.level + 1] if node.level else []
                    base = ".".join([*above, *([node.module] if node.module else [])])
                    names += [base, *(f"{base}.{alias.name}".strip(".") for alias in node.names)]
    return found


def _module_file(root: Path, name: str) -> Path | None:
    path = root.joinpath(*name.split("."))
    return next((file for file in (path / "__init__.py", path.with_name(f"{path.name}.py")) if file.is_file()), None)


def wanted_arguments(function: Callable[..., Any], offered: Collection[str], where: str) -> list[str]:
    """The names among ``offered`` that the function takes as keyword arguments (``**kwargs``: all). where: begins the
    messages. Raises UserError for a parameter without default that is not offered or cannot be given by name."""
    parameters = inspect.signature(function).parameters.values()
    by_position = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = by_position + [p.name for p in named if p.name not in offered and p.default is p.empty]
    if unknown:
        raise UserError(
            f"{where} takes {unknown[0]!r}{did_you_mean(unknown[0], offered)}; its arguments are given by name, and "
            f"there are {', '.join(offered)}"
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return list(offered)
    return [p.name for p in named if p.name in offered]


def said(error: BaseException) -> str:
    """An exception of a user's code in one line, with the place that raised it."""
    if isinstance(error, SyntaxError):  # the frames are those of who reads the file
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "importlib" not in frame.filename] or frames
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{place}"
