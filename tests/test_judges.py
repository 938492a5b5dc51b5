"""Judging answers."""

import asyncio
import copy
import gc
import pickle
import sys
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentscope_tuner.errors import ConfigError, MissingDependencyError, RewardError
from agentscope_tuner.judges import Judge, MathJudge
from agentscope_tuner.judges.math import _MANY
from agentscope_tuner.types import JudgeOutput, Task, WorkflowOutput, WorkflowTask


def task(answer: Any) -> WorkflowTask:
    return WorkflowTask(task=Task(task_id="gsm8k-7", metadata={"answer": answer}))


def said(answer: Any) -> WorkflowOutput:
    return WorkflowOutput(metadata={"final_answer": answer})


def reward(reference: Any, output: WorkflowOutput, judge: MathJudge | None = None) -> Any:
    return asyncio.run((judge or MathJudge()).judge(task(reference), output)).reward


@pytest.fixture(scope="module")
def judge() -> MathJudge:
    """One for all tests, so that they share its process, as the episodes of a run do."""
    return MathJudge(timeout_s=30)


@pytest.mark.parametrize(
    ("reference", "answer", "equal"),
    [
        ("42", "42", True),
        ("42", "41", False),
        ("42", "-42", False),
        ("42", 42, True),
        (42, "42.0", True),
        (0.1, "0.10", True),
        ("1,234", "1234", True),
        ("$18", "18.00", True),
        ("-$18.", r"-\$18", True),
        ("18", "$18$", True),
        (".5", "0.5", True),
        ("1e3", "1000", True),
        ("0.1", "0.1000000000000000001", False),
        ("9007199254740993", "9007199254740992", False),
        ("6 * 7 = 42\n#### 42", "42", True),
        ("6 * 7 = 42\n#### 42", "6", False),
        (r"So it is \boxed{42}.", "42", True),
        ("42", r"first \boxed{41}, no: \boxed{ 42 }", True),
        ("42", r"\boxed{42}, no: \boxed{41}", False),
        ("42", r"\boxed{\boxed{42}}", True),
        ("42", "#### 41\nno:\n#### 42  \n", True),
        ("42", "#### \\boxed{42}", True),
        ("Paris", " Paris ", True),
    ],
)
def test_plain_answers_need_no_math_verify(
    reference: Any, answer: Any, equal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert reward(reference, said(answer)) == float(equal)


@given(st.decimals(allow_nan=False, allow_infinity=False, places=4), st.integers(0, 3), st.booleans())
def test_notation_of_a_number_does_not_matter(value: Any, zeros: int, tail: bool) -> None:
    written = f"{value:,.4f}" + "0" * zeros
    assert reward(f"#### {value:f}" if tail else f"{value:f}", said(f"${written}$.")) == 1.0
    assert reward(f"{value:f}", said(f"{value + 1:f}")) == 0.0


@pytest.mark.parametrize(
    ("reference", "answer", "equal"),
    [
        (r"\frac{1}{2}", "0.5", True),
        (r"\frac{1}{2}", "1/2", True),
        (r"\frac{1}{2}", r"\boxed{\dfrac{2}{4}}", True),
        (r"\frac{1}{2}", "2", False),
        (r"2\pi", "2*pi", True),
        (r"2\pi", "2", False),
        ("2xy", "2", False),
        ("2xy", "2yx", True),
        ("10^{3}", "1000", True),
        ("10^{3}", "10", False),
        ("2**3", "8", True),
        ("2**3", "2", False),
        ("(x-1)(x+1)", "x^2 - 1", True),
        ("1, 2", "2, 1", True),
        ("(1, 2)", "(2, 1)", False),
        (r"\frac{\sqrt{2}}{2}", "sqrt(2)/2", True),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", "2", False),
        ("42", r"42\text{ cm}", True),
        ("42", "42 apples", True),
        ("42", "x = 42", True),
        ("42", r"\boxed{4", False),
        ("42", "}{$$\\", False),
        ("42", "I do not know", False),
        ("42", "\ud800", False),
        ("Paris", "Pairs", False),
    ],
)
def test_mathematics_is_understood(judge: MathJudge, reference: str, answer: str, equal: bool) -> None:
    assert reward(reference, said(answer), judge) == float(equal)


class Message:
    """As agent frameworks have them."""

    def __init__(self, text: str | None) -> None:
        self.text = text

    def get_text_content(self) -> str | None:
        return self.text


def test_the_response_is_judged_where_there_is_no_final_answer(judge: MathJudge) -> None:
    assert reward("42", WorkflowOutput(response="We get $x=41$, so the answer is 42."), judge) == 1.0
    assert reward("42", WorkflowOutput(response=Message("#### 42"))) == 1.0
    assert reward("42", WorkflowOutput(response="42", metadata={"final_answer": "41"})) == 0.0


@pytest.mark.parametrize("response", [None, "", " \n", "####", r"\boxed{}", Message(None)])
def test_no_answer_is_wrong(response: Any) -> None:
    assert reward("42", WorkflowOutput(response=response)) == 0.0
    assert reward("42", WorkflowOutput(response="42", metadata={"final_answer": None})) == 0.0


@pytest.mark.parametrize("reference", [None, "", "why\n####", ["42"]])
def test_a_task_without_reference_is_an_error_that_names_it(reference: Any) -> None:
    with pytest.raises(RewardError, match=r"`gsm8k-7`.*set `answer_column`"):
        reward(reference, said("42"))
    with pytest.raises(RewardError, match="`t`"):
        asyncio.run(MathJudge().judge(WorkflowTask(task=Task(task_id="t")), said("42")))


def test_a_response_that_is_not_text_is_an_error() -> None:
    with pytest.raises(RewardError, match="`response` must be text or a message, got dict"):
        reward("42", WorkflowOutput(response={"result": 42}))


@pytest.mark.parametrize("endless", ["9**9**9**9", "9^{9^{9^{9}}}"])
def test_an_answer_that_cannot_be_computed_is_wrong_and_holds_up_nobody(
    endless: str, caplog: pytest.LogCaptureFixture
) -> None:
    judge = MathJudge(timeout_s=2)

    async def run() -> list[float]:
        waiting = asyncio.create_task(judge.judge(task("x + 42"), said(endless)))
        ticks = []
        while not waiting.done():
            ticks.append(time.perf_counter())
            await asyncio.sleep(0.01)
        assert (await waiting).reward == 0.0
        assert (await judge.judge(task(r"\frac{1}{2}"), said("0.5"))).reward == 1.0
        return [later - earlier for earlier, later in pairwise(ticks)]

    assert max(asyncio.run(run())) < 1.5
    assert "`gsm8k-7`" in caplog.text


def test_many_episodes_and_several_event_loops_share_one_judge(judge: MathJudge) -> None:
    async def run() -> list[Any]:
        outputs = [judge.judge(task(rf"\frac{{{n}}}{{2}}"), said(str(m / 2))) for n in range(1, 5) for m in (n, n + 1)]
        return [output.reward for output in await asyncio.gather(*outputs)]

    assert asyncio.run(run()) == asyncio.run(run()) == [1.0, 0.0] * 4


def test_the_process_ends_with_its_judge() -> None:
    judge = MathJudge()
    assert reward(r"\frac{1}{2}", said("0.5"), judge) == 1.0
    assert judge._math_verify is not None
    process = judge._math_verify._process
    assert process is not None and process.poll() is None
    del judge
    gc.collect()
    assert process.poll() is not None


def test_after_many_plain_answers_the_process_is_started_ahead() -> None:
    judge = MathJudge()

    async def judge_plainly(answers: int) -> None:
        for number in range(answers):
            assert (await judge.judge(task(number), said(number))).reward == 1.0

    asyncio.run(judge_plainly(_MANY - 1))
    assert judge._math_verify is None
    asyncio.run(judge_plainly(_MANY))
    assert judge._math_verify is not None
    verifier = judge._math_verify
    process = verifier._thread.submit(lambda: verifier._process).result()
    assert process is not None and not verifier._ready, "nobody waited for it"
    assert reward(r"\frac{1}{2}", said("0.5"), judge) == 1.0
    assert verifier._process is process
    copied = pickle.loads(pickle.dumps(judge))
    assert copied._math_verify is None and reward("x + 1", said("1 + x"), copied) == 1.0


def test_a_start_ahead_that_fails_is_told_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = MathJudge()
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "math_verify", None)
        for number in range(2 * _MANY):
            assert reward(number, said(number), judge) == 1.0
        with pytest.raises(MissingDependencyError, match="pip install math-verify"):
            reward(r"\frac{1}{2}", said("0.5"), judge)
    assert reward(r"\frac{1}{2}", said("0.5"), judge) == 1.0


def test_without_math_verify_the_install_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(MissingDependencyError, match="pip install math-verify"):
        reward(r"\frac{1}{2}", said("0.5"))


def test_a_judge_can_be_sent_to_other_processes() -> None:
    for other in (pickle.loads(pickle.dumps(MathJudge(timeout_s=3))), copy.deepcopy(MathJudge(timeout_s=3))):
        assert other.timeout_s == 3
        assert reward("42", said("42"), other) == 1.0


def test_the_time_limit_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="`timeout_s` must be above 0, got 0"):
        MathJudge(timeout_s=0)


def test_judges_of_one_s_own() -> None:
    class Short(Judge):
        async def judge(self, task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
            return JudgeOutput(reward=1.0 / len(output.response))

    assert asyncio.run(Short().judge(task("42"), WorkflowOutput(response="four"))).reward == 0.25
    with pytest.raises(TypeError, match="abstract"):
        Judge()  # type: ignore[abstract]
