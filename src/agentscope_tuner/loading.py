"""Finding the user's own workflow and judge: `path/to/file.py:Name` or `package.module:Name`."""

from __future__ import annotations

import difflib
import importlib
import importlib.machinery
import importlib.util
import sys
import traceback
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

from agentscope_tuner.errors import ConfigError


def load_object(spec: str) -> Any:
    """Import what `spec` names.

    A file is imported as `python file.py` would find things: its folder comes first on `sys.path`, so it can import
    its neighbours. For a module it is the current folder, as with `python -m`. Two specs of one file share one import.

    Args:
        spec: `path/to/file.py:Name` or `package.module:Name`.

    Raises:
        ConfigError: the spec has another form, the file or module does not exist, its import fails, or it holds no
            such name.
    """
    where, _, name = spec.rpartition(":")
    if not where or not name.isidentifier():
        raise ConfigError(f"expected `path/to/file.py:Name` or `package.module:Name`, got `{spec}`")
    path = Path(where).expanduser()
    is_file = path.suffix == ".py" or path.name != where
    module = _import_file(path, spec) if is_file else _import_module(where, spec)
    if not hasattr(module, name):
        raise ConfigError(f"`{where}` has no `{name}`; {_names_near(module, name)}")
    return getattr(module, name)


def _import_file(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        why = "is a folder" if path.is_dir() else "does not exist"
        near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.py")], n=1)
        hint = f"did you mean `{path.with_name(near[0])}`?" if near else f"relative paths start at `{Path.cwd()}`"
        raise ConfigError(f"file `{path}` of `{spec}` {why}; {hint}")
    if path.suffix != ".py":
        raise ConfigError(f"file `{path}` of `{spec}` is not a Python file; its name must end in `.py`")
    path = path.resolve()
    _put_first_on_path(path.parent)
    # Its own name, so that neighbours that import it get the same module; another where that means something else.
    name, other_name = path.stem, f"_astuner_{path.stem}_{zlib.crc32(bytes(path)):08x}"
    for known in (sys.modules.get(name), sys.modules.get(other_name)):
        if known is not None and getattr(known, "__file__", None) == str(path):
            return known
    if not name.isidentifier() or _is_taken(path):
        name = other_name
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None  # true of every file that ends in .py
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as exc:
        del sys.modules[name]
        raise _import_failure(f"`{path}`", exc, path.parent) from exc
    return module


def _import_module(name: str, spec: str) -> ModuleType:
    _put_first_on_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as exc:
        if isinstance(exc, ModuleNotFoundError) and exc.name and f"{name}.".startswith(f"{exc.name}."):
            raise ConfigError(
                f"module `{exc.name}` of `{spec}` does not exist; install it here, run from the folder that holds it, "
                "or give the path of a `.py` file"
            ) from exc
        raise _import_failure(f"module `{name}`", exc, Path.cwd()) from exc


def _put_first_on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _is_taken(path: Path) -> bool:
    """Whether the file's name is that of a module that is loaded, or that an installed package would load."""
    name = path.stem
    if name in sys.modules or name in sys.stdlib_module_names:
        return True
    others = [folder for folder in sys.path if Path(folder or ".").resolve() != path.parent]
    return importlib.machinery.PathFinder.find_spec(name, others) is not None


def _import_failure(what: str, exc: BaseException, folder: Path) -> ConfigError:
    if isinstance(exc, SystemExit):
        return ConfigError(
            f"{what} ends the program when it is imported ({_place(exc, folder)}); put what it runs under "
            '`if __name__ == "__main__":`'
        )
    remedy = "correct it there"
    if isinstance(exc, ModuleNotFoundError) and exc.name:
        remedy = f"install `{exc.name.partition('.')[0]}` into this environment, or correct its name"
    message = f"{exc.msg}: {(exc.text or '').strip()}" if isinstance(exc, SyntaxError) else str(exc)
    return ConfigError(f"{what} cannot be imported: {type(exc).__name__}: {message} ({_place(exc, folder)}); {remedy}")


def _place(exc: BaseException, folder: Path) -> str:
    """Where in the user's own code it went wrong."""
    if isinstance(exc, SyntaxError) and exc.filename:
        return f"{exc.filename}, line {exc.lineno}"
    frames = traceback.extract_tb(exc.__traceback__)
    files = [Path(frame.filename) for frame in frames]
    own = [
        frame
        for frame, file in zip(frames, files, strict=True)
        if file.is_relative_to(folder) and file != Path(__file__) and "site-packages" not in file.parts
    ]
    frame = (own or frames)[-1]
    return f"{frame.filename}, line {frame.lineno}"


def _names_near(module: ModuleType, name: str) -> str:
    # Names from elsewhere are rarely meant, but a judge may well be imported.
    names = [known for known in vars(module) if not known.startswith("_")]
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        return "did you mean " + " or ".join(f"`{known}`" for known in near) + "?"
    own = [known for known in names if getattr(vars(module)[known], "__module__", None) == module.__name__]
    return f"it defines {', '.join(f'`{known}`' for known in own)}" if own else "it defines no class or function"
