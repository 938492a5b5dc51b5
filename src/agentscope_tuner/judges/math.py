"""A judge of mathematical answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from importlib.util import find_spec
from typing import Any

from agentscope_tuner.errors import ConfigError, MissingDependencyError, RewardError
from agentscope_tuner.judges.base import Judge
from agentscope_tuner.types import JudgeOutput, WorkflowOutput, WorkflowTask

logger = logging.getLogger(__name__)

_PLAIN_NUMBER = re.compile(
    r"\$?\s*(?P<sign>[+-]?)\s*(?:\\?\$)?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?P<exponent>(?:[eE][+-]?[0-9]{1,3})?)"
    r"\s*\.?\s*\$?\.?"
)
"""`42`, `-1,234.50`, `$18`, `$18$`, `-\\$18.`, `1e3`. Units are not guessed at."""
_TAIL = re.compile(r"####([^\n]*)\Z")
"""GSM8K ends a solution with a line `#### 42` (arXiv:2110.14168). Earlier `####` are headings."""
_NOT_BARE = re.compile(r"\$|\\\(|\\\[|\\boxed|\*\*")
"""Marks of LaTeX among prose, and Python's power, which LaTeX has not."""
_COMMAND = re.compile(r"\\[A-Za-z]+(?:\{[^{}\\]*\})*")
_WORD = re.compile(r"(?<!\S)[(\"']*[A-Za-z]{2,}[.,;:!?)\"']*(?!\S)")
_BARE_PI = re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])")
_MANY = 32
"""Among so many answers of a model there is probably one soon that is not a plain number."""


class MathJudge(Judge):
    r"""Rewards 1 for an answer that equals the reference, 0 for any other and for none.

    The answer is `output.metadata["final_answer"]` where the workflow sets it (None means no answer), or else
    `output.response`. The reference is `task.task.metadata["answer"]`. In both, the last `\boxed{...}` counts, or
    else GSM8K's closing `#### ...`, or else the whole text.

    Two plain numbers are compared exactly, as decimals. Everything else goes to `math-verify`
    (https://github.com/huggingface/Math-Verify), which reads LaTeX and finds the answer in prose.
    """

    def __init__(self, *, timeout_s: float = 5.0) -> None:
        """Create the judge; `math-verify` is needed at the first answer that is not a plain number.

        It is started then, or where many were plain numbers before it, so that nobody waits for its start later.

        Args:
            timeout_s: seconds after which `math-verify` gives up on an answer, which then counts as wrong.

        Raises:
            ConfigError: `timeout_s` is not positive.
        """
        if not timeout_s > 0:
            raise ConfigError(f"`timeout_s` must be above 0, got {timeout_s}; 5 seconds are enough for most answers")
        self.timeout_s = timeout_s
        self._math_verify: _MathVerify | None = None
        self._judged = 0

    def __getstate__(self) -> dict[str, Any]:
        """Whoever gets a copy starts a process of its own."""
        return {**self.__dict__, "_math_verify": None}

    async def judge(self, task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        """Compare the answer with the reference.

        Raises:
            RewardError: the task has no reference answer, or the response is not text.
            MissingDependencyError: `math-verify` is needed and not installed.
        """
        reference = _reference(task)
        answer = _answer(output)
        self._judged += 1
        if self._judged == _MANY:
            self._verifier().prepare()
        if not answer:
            return JudgeOutput(reward=0.0)
        equal = _equal_plainly(reference, answer)
        if equal is None:
            equal = await self._equal_mathematically(reference, answer, task.task.task_id)
        return JudgeOutput(reward=float(equal))

    def _verifier(self) -> _MathVerify:
        if self._math_verify is None:
            self._math_verify = _MathVerify(self.timeout_s)
            weakref.finalize(self, self._math_verify.close)
        return self._math_verify

    async def _equal_mathematically(self, reference: str, answer: str, task_id: str) -> bool:
        equal = await self._verifier().equal(_for_math_verify(reference), _for_math_verify(answer))
        if equal is None:
            logger.warning(
                "task `%s`: `math-verify` did not compare this answer within %g s, so it counts as wrong: %.200r",
                task_id,
                self.timeout_s,
                answer,
            )
        return bool(equal)


# ------------------------------------------------------------------------------------------------- reading answers


def _reference(task: WorkflowTask) -> str:
    value = task.task.metadata.get("answer")
    if not isinstance(value, str | int | float | Decimal | None):
        raise RewardError(
            f"the reference answer of task `{task.task.task_id}` must be text or a number, got {type(value).__name__}; "
            "set `answer_column` to a column that holds one, or use another judge"
        )
    reference = "" if value is None else _final_part(str(value))
    if not reference:
        raise RewardError(
            f'task `{task.task.task_id}` has no reference answer: `metadata` has no "answer", or it is empty; set '
            "`answer_column` to the column that holds it, or use another judge"
        )
    return reference


def _answer(output: WorkflowOutput) -> str:
    """What is to be judged; empty where no answer was given."""
    value: Any = output.response
    if "final_answer" in output.metadata:
        value = output.metadata["final_answer"]
        if value is not None and not isinstance(value, str):
            value = str(value)  # structured output: a number, or whatever else the model put there
    elif callable(read_text := getattr(value, "get_text_content", None)):
        value = read_text()
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RewardError(
            f"`response` must be text or a message, got {type(value).__name__}; return the answer as "
            '`WorkflowOutput(metadata={"final_answer": ...})`'
        )
    return _final_part(value)


def _final_part(text: str) -> str:
    text = text.strip()
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    if tail := _TAIL.search(text):
        return tail[1].strip()
    return text


def _last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`; None without one, or where it is cut off."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    start += len(r"\boxed{")
    depth = 1
    for end in range(start, len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[start:end]
    return None


# ------------------------------------------------------------------------------------------------------- comparing


def _equal_plainly(reference: str, answer: str) -> bool | None:
    """Whether two plain numbers, or two identical texts, are equal; None where it takes mathematics to tell."""
    if reference == answer:
        return True
    numbers = [_plain_number(text) for text in (reference, answer)]
    return None if None in numbers else numbers[0] == numbers[1]


def _plain_number(text: str) -> Decimal | None:
    match = _PLAIN_NUMBER.fullmatch(text)
    return Decimal(f"{match['sign']}{match['digits'].replace(',', '')}{match['exponent']}") if match else None


def _for_math_verify(text: str) -> str:
    r"""Put a bare formula between dollars: outside of them, math-verify would read `2\pi` as 2."""
    formula = _BARE_PI.sub(r"\\pi", text)
    if _NOT_BARE.search(text) or _WORD.search(_COMMAND.sub("", formula)):
        return text
    return f"${formula}$"


_WORKER = """
import faulthandler, json, sys
from math_verify import parse, verify
def equal(*texts):
    parsed = [parse(text, parsing_timeout=None) for text in texts]
    return bool(verify(*parsed, timeout_seconds=None))
equal("$1$", "$x + 1$")  # the first formula takes a while
print("ready", flush=True)
for line in sys.stdin:
    reference, answer, timeout_s = json.loads(line)
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    found = equal(reference, answer)
    faulthandler.cancel_dump_traceback_later()
    print(json.dumps(found), flush=True)
"""


class _MathVerify:
    """`math-verify` in a process of its own.

    A model only has to write `9**9**9**9` to keep it busy forever, inside of one big multiplication that neither a
    signal handler nor a thread can interrupt. A process can be ended: its watchdog (`faulthandler`, which needs
    neither the interpreter lock nor the main thread) does that, and the next answer gets a new process.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[str] | None = None
        self._ready = False
        # One thread: questions go through the pipe one at a time, whichever event loop they come from.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="math-verify")

    async def equal(self, reference: str, answer: str) -> bool | None:
        """Whether they are equal; None when that was not found out in time."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, reference, answer)

    def prepare(self) -> None:
        """Let the process start, so that it is ready when there is a question; what is wrong is told then."""
        self._thread.submit(self._start)

    def close(self) -> None:
        self._thread.shutdown(wait=False)
        self._stop()

    def _ask(self, reference: str, answer: str) -> bool | None:
        process = self._start()
        if not self._ready:
            self._await(process)
        question = json.dumps([reference, answer, self._timeout_s])
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(question + "\n")
            process.stdin.flush()
        reply = process.stdout.readline()
        if not reply:
            self._stop()
            return None
        return bool(json.loads(reply))

    def _start(self) -> subprocess.Popen[str]:
        """The process; begun anew where there is none, or it has ended."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        if find_spec("math_verify") is None:
            raise MissingDependencyError(
                "`MathJudge` needs the package `math-verify` for answers that are not plain numbers; install it with "
                "`pip install math-verify`"
            )
        # -P: a file `math.py` in the working directory must not stand in for the standard library's.
        # Its standard error is dropped: math-verify reports every text that it cannot read, which is most of them.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
        )
        return self._process

    def _await(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._ready = process.stdout.readline() == "ready\n"
        if not self._ready:
            self._stop()
            raise MissingDependencyError(
                f"`math-verify` does not start (exit status {process.returncode}); see what "
                "`python -c 'import math_verify'` says, or install it again with `pip install math-verify`"
            )

    def _stop(self) -> None:
        process, self._process, self._ready = self._process, None, False
        if process is not None:
            # Closing its standard input fails when a question is still unsent.
            with contextlib.suppress(BrokenPipeError), process:
                process.kill()
