"""`astuner doctor`: is everything here that a run needs, and if not, which command puts it right?

`torch` and the engine are imported inside functions: a doctor that dies of what it should find is of no use.
"""

from __future__ import annotations

import asyncio
import importlib
import operator
import os
import platform
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentscope_tuner.config import parse_config
from agentscope_tuner.event_loop import run_to_end

Status = Literal["ok", "warn", "missing"]

REQUIREMENTS = {
    "agentscope": "agentscope>=1.0.19,<2",
    "transformers": "transformers>=5,<6",
    "peft": "peft>=0.18",
    "tokenizers": "tokenizers>=0.22",
    "datasets": "datasets>=4",
    "math_verify": "math-verify>=0.8",
    "tensorboard": "tensorboard>=2.19",
    "matplotlib": "matplotlib>=3.9",
}
"""Import name to requirement; a test compares them with the package's own."""

TORCH = "torch>=2.6"
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
API_KEYS = ("DASHSCOPE_API_KEY", "OPENAI_API_KEY")

TRINITY = {
    "trinity.common.models.model": "trinity-rft==0.6.0",
    "ray": "ray>=2.50",
    "tinker": "tinker>=0.38",
    "pyarrow": "pyarrow>=24,<25",
}
"""What backend `trinity` imports, and where it comes from; a test compares them with the package's own."""

_OPTIONAL = {"trl": "only the development tests need it"}
_TESTED_PYTHON = ((3, 11), (3, 13))
_TRINITY_PYTHON = (3, 12)
"""The newest that trinity-rft can be installed on."""
_WITHOUT_KERNELS = "small models are sampled at a third of the speed"
_MIN_FREE_GB = 2.0
_SMOKE_PROMPTS = 16
_SMOKE_SETTINGS = {"max_model_len": 256, "max_tokens": 32}
_COLORS: dict[Status, str] = {"ok": "green", "warn": "yellow", "missing": "bold red"}


@dataclass(frozen=True, slots=True)
class Check:
    """What was found about one thing."""

    name: str
    status: Status
    """`warn`: a run may fail or be slow. `missing`: it will fail."""
    found: str
    remedy: str = ""
    """A command that puts it right; empty when `ok`."""


def diagnose(*, quick: bool = False, folder: Path | None = None) -> list[Check]:
    """Look at everything a run needs.

    Args:
        quick: skip the trial run, and trust what packages say of themselves.
        folder: where `runs/` would be made; None: the current folder.
    """
    checks = [check_python(sys.version_info[:2]), *_check_torch()]
    checks += [check_package(requirement, None if quick else module) for module, requirement in REQUIREMENTS.items()]
    model = Path(str(files("agentscope_tuner") / "assets" / "tiny-agent"))
    checks.append(check_model_files(model))
    if not quick and all(check.status != "missing" for check in checks):
        checks += [check_kernels(), check_bfloat16(), measure_speed("tiny-agent")]
    folder = folder or Path.cwd()
    checks += [check_writable(folder), _check_disk(folder), _check_memory()]
    checks += [Check(name, "ok", _optional(name, purpose)) for name, purpose in _OPTIONAL.items()]
    checks += _check_trinity(quick=quick)
    # Whether, never what.
    checks += [Check(key, "ok", _key_state(os.environ.get(key))) for key in API_KEYS]
    return checks


def show(checks: list[Check], console: Console) -> None:
    """Print a table, and below it the commands, each on a line of its own so that it can be copied."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for check in checks:
        table.add_row(Text(check.status, style=_COLORS[check.status]), Text(check.name), Text(check.found))
    console.print(table)
    ill = [check for check in checks if check.status != "ok"]
    console.print(Text("\nTo put it right:" if ill else "\nEverything a run needs is here."))
    for check in ill:
        console.print(Text(f"  {check.name}:\n    {check.remedy}"), soft_wrap=True)


def check_kernels() -> Check:
    """Could the compiled kernels be built?"""
    from agentscope_tuner.engine.compiling import find_compiler
    from agentscope_tuner.engine.trial import native_kernels

    name = "compiled kernels"
    if native_kernels():
        return Check(name, "ok", "built")
    if find_compiler():
        return Check(
            name, "ok", f"not in use, as what the compiler makes fails, or is wrong or slow; {_WITHOUT_KERNELS}"
        )
    if sys.platform.startswith("linux"):
        return Check(name, "warn", f"not built, as there is no g++; {_WITHOUT_KERNELS}", "apt-get install g++")
    return Check(name, "ok", f"for Linux only; {_WITHOUT_KERNELS}")


def check_bfloat16() -> Check:
    """What would `engine.dtype=bfloat16` gain on the CPU?"""
    from agentscope_tuner.engine.products import bfloat16_is_slow

    slow = "slower than float32 on this processor: it saves memory, not time"
    return Check("bfloat16 on the CPU", "ok", slow if bfloat16_is_slow() else "faster than float32 on this processor")


# --------------------------------------------------------------------------------------------- Python, packages


def check_python(found: tuple[int, ...]) -> Check:
    """Is this a Python that the package is tested with?"""
    oldest, newest = _TESTED_PYTHON
    status: Status = "ok" if oldest <= found <= newest else "missing" if found < oldest else "warn"
    tested = "" if status == "ok" else f"; tested are {_dotted(oldest)} to {_dotted(newest)}"
    remedy = "" if status == "ok" else f"python{_dotted(newest)} -m venv .venv"
    return Check("Python", status, f"{platform.python_version()}{tested}", remedy)


def check_package(requirement: str, module: str | None = None) -> Check:
    """Is a package installed in a version that fits, and can `module` be imported?"""
    name = _name_of(requirement)
    install = f'pip install "{requirement}"'
    try:
        found = version(name)
    except PackageNotFoundError:
        return Check(name, "missing", "not installed", install)
    if not satisfies(found, requirement):
        return Check(name, "missing", f"{found}, needed is {requirement.removeprefix(name)}", install)
    if module is not None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(module)
        except Exception as exc:  # packages fail to import in every way there is
            return Check(name, "missing", f"{found}, but it cannot be imported: {_brief(exc)}", _reinstall(requirement))
    return Check(name, "ok", found)


def satisfies(found: str, requirement: str) -> bool:
    """Whether a version is within a requirement's bounds (`>=`, `==`, `<`), apart from suffixes (`rc1`, `+cpu`)."""
    bounds = re.findall(r"(>=|==|<)([\d.]+)", requirement)
    compare = {">=": operator.ge, "==": operator.eq, "<": operator.lt}
    return all(compare[sign](_release(found), _release(bound)) for sign, bound in bounds)


def _release(text: str) -> tuple[int, ...]:
    """Leading numbers, without the zeros at their end: 2.0 is 2."""
    match = re.match(r"\d+(\.\d+)*", text)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _check_torch() -> Iterator[Check]:
    check = check_package(TORCH, "torch")
    yield check
    if check.status != "ok":
        return
    import torch

    yield Check("CPU", "ok", f"PyTorch uses {torch.get_num_threads()} threads, of {os.cpu_count()} cores")
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        bfloat16 = "with" if torch.cuda.is_bf16_supported(including_emulation=False) else "without"
        yield Check("GPU", "ok", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, {bfloat16} bfloat16")
    elif shutil.which("nvidia-smi") is None:
        yield Check("GPU", "ok", "none; the CPU is used")
    elif torch.version.cuda is None:
        yield Check("GPU", "warn", "there is one, but this PyTorch is built for the CPU only", _reinstall(TORCH))
    else:
        found = f"there may be one, but this PyTorch (CUDA {torch.version.cuda}) cannot use it; compare the driver's"
        yield Check("GPU", "warn", found, "nvidia-smi")


def _check_trinity(*, quick: bool) -> Iterator[Check]:
    """Whoever has installed Trinity-RFT wants backend `trinity` to work."""
    if _installed("trinity-rft") is None:
        how = f"`pip install 'agentscope-tuner[trinity]'` adds it, on Python {_dotted(_TRINITY_PYTHON)} or older"
        yield Check("backend trinity", "ok", f"not installed; {how}")
        return
    if not quick:
        import agentscope_tuner.backends.trinity  # noqa: F401  # puts a stand-in for vLLM where there is none
    for module, requirement in TRINITY.items():
        yield check_package(requirement, None if quick else module)
    vllm = _installed("vllm")
    yield Check("vllm", "ok", vllm or "not installed; backend `trinity` computes through a Tinker service")
    if quick:
        return
    import torch

    gpus = torch.cuda.device_count()
    if vllm is not None and gpus < 2:
        found = f"{gpus} GPU here; vLLM and the trainer need one each, or a cluster that Ray knows"
        yield Check("GPUs for trinity", "warn", found, "astuner train ... trinity.route=tinker")
    else:
        yield Check("GPUs for trinity", "ok", str(gpus))


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _optional(name: str, purpose: str) -> str:
    return _installed(name) or f"not installed; {purpose}"


# ---------------------------------------------------------------------------------------------------- the model


def check_model_files(model: Path) -> Check:
    """Is every file of the model there that ships with the package?"""
    absent = [name for name in MODEL_FILES if not _has_content(model / name)]
    if not absent:
        size = sum(path.stat().st_size for path in model.iterdir())
        return Check(model.name, "ok", f"{size / 1e6:.1f} MB")
    builder = Path(__file__).parents[2] / "recipes" / "tiny_agent" / "build.py"
    remedy = f"python {builder}" if builder.is_file() else "pip install --force-reinstall --no-deps agentscope-tuner"
    return Check(model.name, "missing", f"no {', '.join(absent)} in {model}", remedy)


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def measure_speed(model_path: str, seconds: float = 2.0) -> Check:
    """Load a model into the embedded engine and let it talk for a moment."""
    try:
        tokens, taken = run_to_end(_talk(model_path, seconds))
    except Exception as exc:  # whatever goes wrong here would go wrong in a run
        return Check("engine", "missing", _brief(exc), _reinstall(TORCH, REQUIREMENTS["transformers"]))
    return Check(
        "engine", "ok", f"{model_path} samples {tokens / taken:,.0f} tokens/s for {_SMOKE_PROMPTS} episodes at once"
    )


async def _talk(model_path: str, seconds: float) -> tuple[int, float]:
    """Tokens sampled, and the seconds it took."""
    from agentscope_tuner.backends.local import Engine
    from agentscope_tuner.policy import SamplingParams

    config = parse_config({"experiment_name": "doctor", "model": {"model_path": model_path, **_SMOKE_SETTINGS}})
    engine = Engine.start(config.model, config)
    prompt = engine.model.renderer.text([{"role": "user", "content": "What is 17 + 25?"}], None)
    prompt_ids = engine.model.renderer.encode(prompt)

    async def one(number: int) -> int:
        params = SamplingParams(max_tokens=config.model.max_tokens, seed=number)
        return len((await engine.sampler.sample(prompt_ids, params, episode_id=f"doctor-{number}")).token_ids)

    tokens, begun = 0, time.perf_counter()
    while not tokens or time.perf_counter() - begun < seconds:
        async with asyncio.TaskGroup() as group:
            talking = [group.create_task(one(tokens + i)) for i in range(_SMOKE_PROMPTS)]
        tokens += sum(task.result() for task in talking)
    return tokens, time.perf_counter() - begun


# ---------------------------------------------------------------------------------------------------- the machine


def check_writable(folder: Path) -> Check:
    """Can `runs/` be written below a folder?"""
    runs = folder / "runs"
    target = runs if runs.exists() else folder
    try:
        with tempfile.TemporaryFile(dir=target):
            pass
    except OSError as exc:
        found = f"`{target}` cannot be written: {exc.strerror or exc}"
        return Check("run folder", "missing", found, "astuner train ... output_dir=$HOME/runs")
    return Check("run folder", "ok", f"`{runs}` can be written")


def _check_disk(folder: Path) -> Check:
    return _check_room("free disk", shutil.disk_usage(folder).free, "astuner train ... output_dir=FOLDER_WITH_ROOM")


def _check_memory() -> Check:
    available = _available_memory()
    if available is None:
        return Check("free memory", "ok", "unknown on this system")
    return _check_room(
        "free memory", available, "astuner train ... engine.kv_cache_gb=0.5 engine.micro_batch_tokens=1024"
    )


def _check_room(name: str, size: float, remedy: str) -> Check:
    gb = size / 1e9
    if gb >= _MIN_FREE_GB:
        return Check(name, "ok", f"{gb:.0f} GB")
    return Check(name, "warn", f"{gb:.1f} GB; {_MIN_FREE_GB:.0f} GB are comfortable", remedy)


def _available_memory() -> int | None:
    """In bytes: what the system has, or less where a container has its own limit."""
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        limit = Path("/sys/fs/cgroup/memory.max")
        own = limit.read_text().strip() if limit.is_file() else "max"
    except OSError:
        return None
    sizes = [int(match[1]) * 1024] if match else []
    return min(sizes + ([int(own)] if own.isdigit() else []), default=None)


# ------------------------------------------------------------------------------------------------------- wording


def _key_state(value: str | None) -> str:
    return "set" if value else "not set; only hosted default models need it"


def _name_of(requirement: str) -> str:
    return re.split(r"[<>=]", requirement)[0]


def _reinstall(*requirements: str) -> str:
    return "pip install --force-reinstall " + " ".join(f'"{requirement}"' for requirement in requirements)


def _brief(exc: Exception) -> str:
    first = (str(exc).splitlines() or [""])[0]
    return f"{type(exc).__name__}: {first}"[:200]


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
