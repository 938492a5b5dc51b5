"""Compiling the kernels, once for each machine, with its own compiler."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

KERNELS = Path(__file__).with_name("kernels")
_COMPILE = ["-c", "-fPIC", "-O3", "-march=native", "-ffast-math", "-fopenmp", "-pthread"]


def find_compiler() -> list[str] | None:
    """The command; None where there is none that kernels were ever built by."""
    if not sys.platform.startswith("linux"):
        return None
    return shlex.split(os.environ.get("CXX", "")) or ([found] if (found := shutil.which("g++")) else None)


def compile_kernels() -> Path:
    """Compile into the user's cache; what is there already is used.

    Raises:
        OSError: there is no compiler, or no place to write.
        RuntimeError: nobody knows the user's home.
        subprocess.SubprocessError: it refuses the source.
    """
    compiler = find_compiler()
    if compiler is None:
        raise OSError("no C++ compiler")
    # The machine's flags are part of the name: a home folder may be shared by different machines. So is what is linked,
    # which differs between builds of PyTorch.
    target = _run([*compiler, "-march=native", "-E", "-v", "-", "-o", os.devnull], also_stderr=True)
    text = b"".join(source.read_bytes() for source in sorted(KERNELS.iterdir()))
    options = " ".join([*_COMPILE, *(Path(part).name for part in _openmp())])
    name = hashlib.sha256(text + target + options.encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentscope-tuner"
    library = folder / f"native-{name}.so"
    if not library.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            parts = {source: f"{scratch}/{source.stem}.o" for source in sorted(KERNELS.glob("*.cpp"))}
            commands = [[*compiler, *_COMPILE, str(source), "-o", part] for source, part in parts.items()]
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(_run, commands))
            # Linked apart: with `-ffast-math` a linker would switch off denormal numbers in the whole process.
            linked = Path(scratch) / "native.so"
            _run([*compiler, "-shared", "-pthread", *parts.values(), *_openmp(), "-o", str(linked)])
            linked.replace(library)
    return library


def _openmp() -> list[str]:
    """PyTorch's own OpenMP library: with a second one, two teams of threads would wait for each other's cores."""
    package = Path(torch.__file__).parent
    found = [*package.glob("lib/libgomp*"), *package.parent.glob("torch.libs/libgomp*")]
    return [str(found[0])] if found else ["-fopenmp"]


def _run(command: Sequence[str], *, also_stderr: bool = False) -> bytes:
    done = subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=120)
    return done.stdout + (done.stderr if also_stderr else b"")
