"""What the benchmarks share: models, work, the way of measuring, and where figures go.

All sides of a comparison run in turn, round after round, in one process or, where they would be in each other's way, in
processes of their own. Before a side runs, it waits until the machine is quiet; while it runs, the processor time that
others take is counted, and a round in which that was more than 15% of the wall time is left out, as long as there are
three others; `disturbed` says how many such rounds a figure has. A figure is the median over rounds of the ratio of
both sides in the same round.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from agentscope_tuner.algorithms import Datum
from agentscope_tuner.algorithms.packing import pack
from agentscope_tuner.config import EngineConfig, TunerModelConfig
from agentscope_tuner.engine.models import LoadedModel, load_model
from agentscope_tuner.engine.products import OneDnnProducts, PlainProducts, Products
from agentscope_tuner.engine.reading import model_directory
from agentscope_tuner.types import ModelCall

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "performance"
MODELS = ROOT / ".cache" / "benchmarks"

# vocabulary, width, width of the MLP, layers, heads, key-value heads
SIZES = {
    "S": (2048, 192, 512, 4, 6, 2),
    "M": (8192, 640, 1728, 12, 10, 2),
    "L": (151936, 896, 4864, 24, 14, 2),
}
"""Models of 2, 57 and 494 million parameters; the last has the shape of Qwen2.5-0.5B."""
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where everything is measured."""
TASKS, GROUP, NEW_TOKENS = 16 if DEVICE.type == "cpu" else 32, 8, 48
"""A batch: so many prompts, completions of each, and tokens of each completion. A GPU has twice as many to do."""
_WORDS = "the agent says that one apple and two trees are not three players who vote for number seven at night".split()
_FOREIGN = 0.15
_BRIEF_S = 1.0


@cache
def random_model(size: str) -> Path:
    """A Qwen2 with random weights, made once."""
    target = MODELS / size
    if not (target / "config.json").exists():
        vocabulary, width, inner, layers, heads, kv_heads = SIZES[size]
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=32768,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=2,
            pad_token_id=0,
        )
        AutoTokenizer.from_pretrained(model_directory("tiny-agent")).save_pretrained(target)
        Qwen2ForCausalLM(config).save_pretrained(target)
    return target


def load(size: str, dtype: str, context: int, **engine: Any) -> tuple[LoadedModel, EngineConfig]:
    """One of these models in our engine; no token ends a turn, so that all lengths are what was asked for."""
    settings = EngineConfig(dtype=dtype, **engine)
    loaded = load_model(TunerModelConfig(model_path=str(random_model(size)), max_model_len=context), settings)
    loaded.end_of_turn_ids = frozenset()
    # As the backend does: what is loaded stays, so collecting garbage need not look at it again.
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)
    return loaded, settings


def random_prompts(count: int = TASKS, low: int = 64, high: int = 128, seed: int = 0) -> list[list[int]]:
    """Prompts of random tokens, of `low` to `high` tokens each."""
    rng = random.Random(seed)
    return [[rng.randrange(3, 1000) for _ in range(rng.randint(low, high))] for _ in range(count)]


def text_prompts(count: int = TASKS, low: int = 64, high: int = 128, seed: int = 0) -> list[tuple[list[int], str]]:
    """Prompts of `low` to `high` tokens with their texts, which encode to them again."""
    tokenizer = AutoTokenizer.from_pretrained(model_directory("tiny-agent"))
    rng = random.Random(seed)
    prompts = []
    for _ in range(count):
        length, words = rng.randint(low, high), [rng.choice(_WORDS)]
        while len(tokenizer.encode(" ".join(words), add_special_tokens=False)) < length:
            words.append(rng.choice(_WORDS))
        text = " ".join(words)
        prompts.append((tokenizer.encode(text, add_special_tokens=False), text))
    return prompts


def make_call(prompt_ids: list[int], token_ids: list[int], logprobs: list[float]) -> ModelCall:
    """A call as the recorder keeps it, drawn at temperature 1."""
    return ModelCall("solver", [], None, prompt_ids, token_ids, logprobs, 1.0, 1.0, 0, "length", "", 0)


def half_good(calls: Sequence[ModelCall]) -> list[Datum]:
    """What is learned from calls of which every second one was good; each token counts the same."""
    weight = 1 / sum(len(call.completion_ids) for call in calls)
    return [Datum(call, (-1.0) ** i, weight, i) for i, call in enumerate(calls)]


def tokens_and_work(size: str, calls: Sequence[ModelCall]) -> tuple[int, int]:
    """What a forward pass over calls runs, if whatever they share is run once: tokens, and multiplications.

    The latter are those in products of matrices: logits, and what follows the last layer's attention, only where tokens
    were sampled.
    """
    vocabulary, width, inner, layers, heads, kv_heads = SIZES[size]
    trees = pack([call.prompt_ids + call.completion_ids[:-1] for call in calls], max_tokens=10**9)
    tokens = sum(len(tree.ids) for tree in trees)
    seen = sum(position + 1 for tree in trees for position in tree.positions)
    sampled = sum(len(call.completion_ids) for call in calls)
    predicting = sum(
        len({place for member, where in zip(tree.members, tree.where, strict=True)
             for place in where[len(calls[member].prompt_ids) - 1 :]})
        for tree in trees
    )  # fmt: skip
    before = layers * width * (width + 2 * width * kv_heads // heads)
    after = width * (width + 3 * inner)
    of_seen = layers * 2 * width  # the weight of a token that another one attends to, and what is summed up
    work = tokens * (before + (layers - 1) * after) + predicting * after
    return tokens, work + seen * of_seen + sampled * vocabulary * width


def bytes_of_sampling(size: str, dtype: str, prompts: Sequence[Sequence[int]]) -> tuple[int, int]:
    """What sampling moves at least: bytes of all weights, and of what is read for `NEW_TOKENS` of each prompt.

    In each step all weights are read, and the keys and values of all tokens so far. Prompts are left out: many of their
    tokens are computed at once.
    """
    vocabulary, width, inner, layers, heads, kv_heads = SIZES[size]
    item = getattr(torch, dtype).itemsize
    of_token = 2 * width * kv_heads // heads
    weights = item * (vocabulary * width + layers * width * (2 * width + of_token + 3 * inner))
    attended = sum(len(prompt) + step for prompt in prompts for step in range(NEW_TOKENS))
    return weights, weights * NEW_TOKENS + item * layers * of_token * attended


def relative_error(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm of `expected`, all tensors together."""
    off = sum(float((found[name] - expected[name]).square().sum()) for name in found)
    return float((off / sum(float(expected[name].square().sum()) for name in found)) ** 0.5)


@torch.inference_mode()
def generate(model: Any, prompts: list[list[int]], tokens: int, end: list[int] | None = None) -> torch.Tensor:
    """New tokens (B, up to `tokens`) by transformers' `generate`, as its users would write it.

    All prompts are in one left-padded batch, sampled at temperature 1 with log-probabilities. After one of the tokens
    `end` a completion is padded with 0; without any, all are of full length.
    """
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=DEVICE)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=DEVICE)
    ending = {"min_new_tokens": tokens} if end is None else {"eos_token_id": end}
    out = model.generate(
        ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=tokens,
        pad_token_id=0, return_dict_in_generate=True, output_logits=True, **ending,
    )  # fmt: skip
    new: torch.Tensor = out.sequences[:, width:]
    for i, logits in enumerate(out.logits):
        torch.log_softmax(logits.float(), -1).gather(1, new[:, i : i + 1])
    wait_for_device()
    return new


def wait_for_device() -> None:
    """Until all that was launched is computed."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


# ------------------------------------------------------------------------------------------------------ measuring


def _processor_seconds() -> tuple[float, float]:
    """What all processes have used, and this one with its children."""
    values = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    own = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            own += times.user + times.system
    everybody = (sum(values) - values[3] - values[4]) / os.sysconf("SC_CLK_TCK")
    return everybody, own


class _Watch:
    """Wall time, and the share of it that others took of the processor."""

    def __enter__(self) -> _Watch:
        self._before = _processor_seconds()
        self._begun = time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        self.seconds = time.perf_counter() - self._begun
        everybody, own = _processor_seconds()
        foreign = (everybody - self._before[0]) - (own - self._before[1])
        self.foreign = max(0.0, foreign / self.seconds)


def _wait_until_quiet(patience_s: float) -> float:
    """Wait, but not longer than this; returns how much of it is left."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        with _Watch() as watch:
            time.sleep(0.25)
        if watch.foreign < _FOREIGN:
            break
    return max(0.0, deadline - time.monotonic())


@dataclass
class Times:
    """Seconds of each side in each round that counts."""

    rounds: list[dict[str, float]]
    disturbed: int
    """In how many of them others were busy: where fewer than three were quiet, all count."""

    def seconds(self, side: str) -> float:
        """The median."""
        return statistics.median(one[side] for one in self.rounds)

    @property
    def counts(self) -> dict[str, int]:
        """For the row of a table."""
        return {"rounds": len(self.rounds), "disturbed": self.disturbed}

    def ratio(self, slow: str, fast: str) -> float:
        """How many times as long `slow` takes: the median over rounds."""
        return statistics.median(one[slow] / one[fast] for one in self.rounds)


def compare(
    sides: Mapping[str, Callable[[], object]], rounds: int = 5, warm_up: Collection[str] | None = None
) -> Times:
    """Run all sides in turn, once to warm up (some of them, or all) and then until enough rounds were undisturbed.

    A side that takes less than a second goes once more before each turn: threads that slept and caches that others
    filled would cost it a good part of its time, and those that take long next to nothing.
    """
    last = dict.fromkeys(sides, _BRIEF_S)
    for name, side in sides.items():
        if warm_up is None or name in warm_up:
            begun = time.perf_counter()
            side()
            last[name] = time.perf_counter() - begun
    clean, disturbed, patience_s = [], [], 120.0
    while len(clean) < rounds and len(clean) + len(disturbed) < 2 * rounds:
        seconds, foreign = {}, 0.0
        for name, side in sides.items():
            patience_s = _wait_until_quiet(patience_s)
            if last[name] < _BRIEF_S:
                side()
            with _Watch() as watch:
                side()
            last[name] = seconds[name] = watch.seconds
            foreign = max(foreign, watch.foreign)
        (disturbed if foreign > _FOREIGN else clean).append(seconds)
        taken = ", ".join(f"{name} {one:.2f} s" for name, one in seconds.items())
        print(f"round {len(clean) + len(disturbed)}: {taken}; others {foreign:.0%}", file=sys.stderr, flush=True)
    return Times(clean, 0) if len(clean) >= 3 else Times(clean + disturbed, len(disturbed))


class Beside:
    """A side in a process of its own: it reads a line for every turn, and answers with one when it is done."""

    def __init__(self, *command: str) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, line: str) -> None:
        """Send it something; for a turn, an empty line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def __call__(self) -> None:
        """Its turn."""
        self.tell("")
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise SystemExit("a process that is measured ended; its reasons are above")

    def close(self) -> str:
        """There are no more turns; returns what else it says."""
        return self._process.communicate()[0].strip()


def begin_answering() -> Callable[[str], None]:
    """What writes an answer, in a process beside another. All else that is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(line: str) -> None:
        print(line, file=answers, flush=True)

    return answer


def peak_memory() -> float:
    """GB that this process has held at most: of the GPU's memory, where there is one."""
    if DEVICE.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    # `getrusage` would begin with what the process held that started this one.
    return _memory("VmHWM")


def forget_peak_memory() -> float:
    """Let the peak begin anew; returns GB that this process holds now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(what: str) -> float:
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / 1e9


class Stopwatch:
    """Seconds spent in some methods of this process."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._inside: set[str] = set()
        self.seconds: dict[str, float] = defaultdict(float)
        self._originals: list[tuple[Any, str, Any]] = []

    def time(self, owner: Any, method: str, part: str) -> None:
        """Count calls of a method as part of something; of a coroutine, its own steps and not what it waits for."""
        original = getattr(owner, method)

        @types.coroutine
        def steps(coroutine: Any) -> Iterator[Any]:
            resume, given = coroutine.send, None
            while True:
                begun = self._clock()
                try:
                    waited_for = resume(given)
                except StopIteration as done:
                    return done.value
                finally:
                    self.seconds[part] += self._clock() - begun
                resume, given = coroutine.send, None
                try:
                    yield waited_for
                except BaseException as exc:
                    resume, given = coroutine.throw, exc

        def timed(*args: Any, **kwargs: Any) -> Any:
            if part in self._inside:  # one of them calls another
                return original(*args, **kwargs)
            begun = self._clock()
            self._inside.add(part)
            try:
                return original(*args, **kwargs)
            finally:
                self._inside.discard(part)
                self.seconds[part] += self._clock() - begun

        async def timed_steps(*args: Any, **kwargs: Any) -> Any:
            return await steps(original(*args, **kwargs))

        self._originals.append((owner, method, original))
        setattr(owner, method, timed_steps if inspect.iscoroutinefunction(original) else timed)

    def stop(self) -> None:
        """Count no more."""
        for owner, method, original in self._originals:
            setattr(owner, method, original)


@cache
def matmul_rate(dtype: str) -> float:
    """GFLOP/s of a large matrix product, the best of several: what nothing here can exceed."""
    size = 2048 if DEVICE.type == "cpu" else 8192
    a, b = (torch.randn(size, size, dtype=getattr(torch, dtype), device=DEVICE) for _ in "ab")
    ways: list[Products] = [OneDnnProducts(size), PlainProducts()]
    best = float("inf")
    with torch.inference_mode():
        for products in ways:
            # Not every PyTorch has oneDNN, and not on every processor has that bfloat16.
            with suppress(AttributeError, RuntimeError):
                packed = products.pack(b)
                for _ in range(9):
                    wait_for_device()
                    begun = time.perf_counter()
                    products.linear(a, packed, None, size)
                    wait_for_device()
                    best = min(best, time.perf_counter() - begun)
    return 2 * size**3 / best / 1e9


@cache
def copy_rate() -> float:
    """GB/s of a large copy within the device's memory, the best of several; what is read and what is written count."""
    source = torch.empty(2**31, dtype=torch.uint8, device=DEVICE)
    target, best = torch.empty_like(source), float("inf")
    for _ in range(9):
        wait_for_device()
        begun = time.perf_counter()
        target.copy_(source)
        wait_for_device()
        best = min(best, time.perf_counter() - begun)
    return 2 * len(source) / best / 1e9


@cache
def machine() -> dict[str, Any]:
    """What the figures were measured on; the family of a processor tells generations of one name apart."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    about = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in info.splitlines())}
    name, family = about.get("model name", platform.processor()), about.get("cpu family")
    instructions = torch.backends.cpu.get_cpu_capability()
    if "amx_bf16" in about.get("flags", "").split():
        instructions += " and AMX"
    found = {
        "processor": f"{name} of family {family}" if family else name,
        "instructions": instructions,
        "threads": torch.get_num_threads(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "matmul_gflops": {dtype: round(matmul_rate(dtype)) for dtype in ("float32", "bfloat16")},
    }
    if DEVICE.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(), "copy_gb_s": round(copy_rate())}
    return found


# ------------------------------------------------------------------------------------------------------- results


_SAME_MACHINE = ("processor", "instructions", "threads", "memory_gb", "torch", "gpu")


def read_results(name: str) -> list[dict[str, Any]]:
    """What is on record of a benchmark: `machine` and `rows` of each machine, the first one measured first."""
    path = RESULTS / f"{name}.json"
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return found


def write_results(name: str, measured: Iterable[dict[str, Any]], key: Sequence[str] = ()) -> None:
    """Print rows and keep them as JSON, each as soon as it is measured; print a Markdown table of them all.

    Every machine has its own. Where `key` says what tells rows apart, those of earlier runs on this one stay until they
    are measured again: the largest models take an hour.
    """
    known = read_results(name)
    mine = next(
        (one for one in known if all(one["machine"].get(same) == machine().get(same) for same in _SAME_MACHINE)), None
    )
    rows: list[dict[str, Any]] = mine["rows"] if mine and key else []
    if mine is None:
        known.append(mine := {})
    mine |= {"machine": machine(), "rows": rows}
    for row in measured:
        print(row, flush=True)
        same = [i for i, other in enumerate(rows) if key and all(other.get(one) == row[one] for one in key)]
        if same:
            rows[same[0]] = row
        else:
            rows.append(row)
        (RESULTS / f"{name}.json").write_text(json.dumps(known, indent=2) + "\n")
    print(table(rows), flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table, a row for each."""
    columns = list(dict.fromkeys(key for row in rows for key in row))

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
        return "" if value is None else str(value)

    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(cell(row.get(column)) for column in columns) + " |" for row in rows]
    return "\n".join(lines)
