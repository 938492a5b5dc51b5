"""What a run on Trinity stands on: Ray and a Tinker service, each started for it or there before."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import ray

from agentscope_tuner.backends.trinity.translate import uses_own_service
from agentscope_tuner.config import TunerConfig
from agentscope_tuner.errors import ConfigError, TrainingStoppedError

_SERVICE_START_S = 120.0
_CLOSING_S = 20.0
_CONNECT_S = 5.0


@dataclass(frozen=True, slots=True)
class Service:
    """A Tinker service."""

    base_url: str
    model: str
    """What it calls its model."""
    process: subprocess.Popen[bytes] | None
    """None: not ours."""
    folder: Path | None

    def check(self) -> None:
        """Whether it runs, if it is ours.

        Raises:
            TrainingStoppedError: it does not.
        """
        if self.process is not None and self.folder is not None and self.process.poll() is not None:
            raise TrainingStoppedError(
                f"the Tinker service ended with status {self.process.returncode}; see `{_log_of(self.folder)}`"
            )


@contextmanager
def environment(config: TunerConfig) -> Iterator[None]:
    """What Ray's workers inherit, from before Ray starts: where to import from, and the key of this run's service."""
    before = dict(os.environ)
    installed = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    own = [path for path in sys.path if path and not any(Path(path).is_relative_to(base) for base in installed)]
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*own, *filter(None, inherited)]))
    if uses_own_service(config) and not os.environ.get("TINKER_API_KEY"):
        os.environ["TINKER_API_KEY"] = f"tml-{secrets.token_urlsafe(24)}"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def running_ray(address: str, namespace: str) -> Iterator[str]:
    """Start Ray, or join it; yields its address.

    Raises:
        ConfigError: it is not there.
    """
    try:
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if host:  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), _CONNECT_S).close()
        context = ray.init(
            address=address,
            namespace=namespace,
            log_to_driver=False,
            configure_logging=False,
            include_dashboard=False,  # of a Ray of our own: it takes seconds to start, and asks for no key
        )
    except (OSError, RuntimeError, ValueError) as exc:
        raise ConfigError(
            f"Ray cannot be reached at `trinity.ray_address={address}`: {exc}; start it with `ray start --head`, or "
            "set `local` to start it for this run"
        ) from exc
    try:
        yield context.address_info["gcs_address"]
    finally:
        ray.shutdown()


def with_route(config: TunerConfig, *, gpus: int, vllm: bool) -> TunerConfig:
    """What `route: auto` means where Ray has so many GPUs, and vLLM is installed or not.

    Raises:
        ConfigError: `verl` is asked for where something that it needs is missing.
    """
    route = config.trinity.route
    if route == "verl" and not gpus:
        raise ConfigError("`trinity.route` is `verl`, but Ray has no GPU; use `tinker`, or a cluster that has some")
    if route == "verl" and not vllm:
        raise ConfigError("`trinity.route` is `verl`, but vLLM is not installed; `pip install vllm`, on every node")
    if route == "auto":
        route = "verl" if gpus and vllm and not config.model.sets("tinker_config") else "tinker"
    return config.model_copy(update={"trinity": config.trinity.model_copy(update={"route": route})})


def check_workers(config: TunerConfig) -> None:
    """Whether all workers reach the Tinker service, with its key: Ray logs what it would hand on itself.

    Raises:
        ConfigError: they do not.
    """
    if config.trinity.route != "tinker":
        return
    if uses_own_service(config) and sum(node["Alive"] for node in ray.nodes()) > 1:
        raise ConfigError(
            "the Tinker service of a run is reached from its own machine only, and Ray has several nodes; start "
            "one with `astuner serve-tinker --host ...`, and set `model.tinker_config.base_url`"
        )

    # Not a function of this module: whoever runs it would have to import all that is imported here.
    def digest_of_key() -> str:
        return hashlib.sha256(os.environ.get("TINKER_API_KEY", "").encode()).hexdigest()

    if ray.get(ray.remote(digest_of_key).remote()) != digest_of_key():
        raise ConfigError(
            "the Ray that runs already does not have this TINKER_API_KEY in its environment; export one "
            "(`tml-` and any letters) before `ray start`, and here"
        )


@contextmanager
def running_service(
    config: TunerConfig, model_path: str, config_path: Path, own: Path
) -> Iterator[Callable[[], Service | None]]:
    """The Tinker service of a run, started where none is given; none with GPUs.

    Args:
        config: of the run.
        model_path: what a service that is given calls its model.
        config_path: where this configuration is written down, for a service of ours.
        own: a folder for it.

    Yields:
        What waits until it is reached, and tells where; it raises a `TrainingStoppedError` where it does not start.
    """
    if config.trinity.route != "tinker":
        yield lambda: None
        return
    given = (config.model.tinker_config or {}).get("base_url")
    if given:
        os.environ["TINKER_BASE_URL"] = given
        yield lambda: Service(given, model_path, None, None)
        return
    folder = own / "service"
    folder.mkdir(parents=True, exist_ok=True)
    address = folder / "address.json"
    address.unlink(missing_ok=True)
    with _log_of(folder).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "agentscope_tuner.tinker_service", str(config_path), str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is ours to handle
        )

    def reach() -> Service:
        told = _wait_for(address, process, _log_of(folder))
        os.environ["TINKER_BASE_URL"] = told["base_url"]
        return Service(told["base_url"], told["model"], process, folder)

    try:
        yield reach
    finally:
        end_process(process)


def _log_of(folder: Path) -> Path:
    return folder.with_name("service.log")


def _wait_for(address: Path, process: subprocess.Popen[bytes], log: Path) -> dict[str, str]:
    deadline = time.monotonic() + _SERVICE_START_S
    while not address.is_file():
        if process.poll() is not None or time.monotonic() > deadline:
            state = f"ended with status {process.poll()}" if process.poll() is not None else "did not answer"
            raise TrainingStoppedError(f"the Tinker service {state}: {last_error(log)}; see `{log}`")
        time.sleep(0.1)
    told: dict[str, str] = json.loads(address.read_text())
    return told


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_CLOSING_S)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def last_error(log: Path) -> str:
    """The last line of a log that looks like an error."""
    if not log.is_file():
        return ""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if re.search(r"\b\w*(Error|Exception)\b", line)), "")
