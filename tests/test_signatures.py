"""What can be trained and what can judge: every accepted form works, every other is refused with what was got."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Dict  # noqa: UP035  # AgentScope's examples write `Dict`

import agentscope
import pytest
from agentscope.model import OpenAIChatModel, TrinityChatModel
from pydantic import Field

from agentscope_tuner import Judge, JudgeOutput, ModelTuner, Workflow, WorkflowOutput, WorkflowTask, evaluate, tune
from agentscope_tuner.errors import ConfigError, RewardError, SignatureError
from agentscope_tuner.types import Task
from agentscope_tuner.workflow import (
    JUDGE_FORMS,
    WORKFLOW_FORMS,
    JudgeRunner,
    WorkflowRunner,
    check_judge,
    check_workflow,
)


def agentscope_tuner_module(name: str) -> Any:
    """A module of `agentscope.tuner`, by its file: importing the package needs more than `agentscope` installs."""
    path = Path(agentscope.__file__).parent / "tuner" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"agentscopes_own{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TheirWorkflowOutput = agentscope_tuner_module("_workflow").WorkflowOutput
TheirJudgeOutput = agentscope_tuner_module("_judge").JudgeOutput

TASK = WorkflowTask(task=Task(main_query="2 + 2?", metadata={"answer": "4"}), episode_id="e1", seed=5)
MODEL: Any = object()
"""Stands for a `ModelTuner` where nothing is asked of it: runners hand it through."""


def run_workflow(workflow: Any, auxiliary: dict[str, Any] | None = None) -> WorkflowOutput:
    return asyncio.run(WorkflowRunner(workflow).run(TASK, MODEL, auxiliary or {}))


def run_judge(judge: Any, auxiliary: dict[str, Any] | None = None, response: Any = "four") -> JudgeOutput:
    return asyncio.run(JudgeRunner(judge).run(TASK, WorkflowOutput(response=response), auxiliary or {}))


# ------------------------------------------------------------------------------------- wrong workflow functions


def sync_function(task, model):
    return 1.0


def sync_annotated(task: dict, model: Any) -> WorkflowOutput:
    return WorkflowOutput(reward=1.0)


async def no_parameters():
    return 1.0


async def no_model(task):
    return 1.0


async def no_task(model):
    return 1.0


async def wrong_names(row, llm):
    return 1.0


async def extra_parameter(task, model, temperature):
    return 1.0


async def misspelt_optional(task, model, auxiliary_model=None):
    return 1.0


async def takes_args(task, model, *args):
    return 1.0


async def takes_kwargs(task, model, **kwargs):
    return 1.0


async def positional_only(task, /, model):
    return 1.0


async def generator(task, model) -> AsyncIterator[float]:
    yield 1.0


def sync_generator(task, model):
    yield 1.0


async def returns_text(task, model) -> str:
    return "1"


async def returns_none(task, model) -> None:
    pass


async def returns_maybe(task, model) -> WorkflowOutput | None:
    return None


async def returns_a_judgement(task, model) -> JudgeOutput:
    return JudgeOutput(reward=1.0)


async def prompt_without_default(task, model, system_prompt):
    return 1.0


async def class_form_as_function(task, model_tuner):
    return WorkflowOutput(reward=1.0)


class SyncCallable:
    def __call__(self, task, model):
        return 1.0


@pytest.mark.parametrize(
    ("workflow", "got"),
    [
        (sync_function, "`sync_function(task, model)` is not `async def`"),
        (sync_annotated, "is not `async def`"),
        (lambda task, model: 1.0, "`<lambda>(task, model)` is not `async def`"),
        (SyncCallable(), "`SyncCallable(task, model)` is not `async def`"),
        (functools.partial(sync_function), "is not `async def`"),
        (no_parameters, "`no_parameters()` lacks the parameter `task`"),
        (no_model, "`no_model(task)` lacks the parameter `model`"),
        (no_task, "`no_task(model)` lacks the parameter `task`"),
        (wrong_names, "`wrong_names(row, llm)` lacks the parameter `task`"),
        (class_form_as_function, "lacks the parameter `model`"),
        (extra_parameter, "has the unknown parameter `temperature`; known are task, model, system_prompt, "),
        (misspelt_optional, "has the unknown parameter `auxiliary_model`; known are"),
        (takes_args, "takes `*args`; name the parameters"),
        (takes_kwargs, "takes `**kwargs`; name the parameters"),
        (positional_only, "has the positional-only parameter `task`"),
        (generator, "yields; it must return once"),
        (sync_generator, "is not `async def`"),
        (returns_text, "is annotated to return `str`, not `float` or `WorkflowOutput`"),
        (returns_none, "is annotated to return `NoneType`, not"),
        (returns_maybe, "is annotated to return"),
        (returns_a_judgement, "is annotated to return `JudgeOutput`, not"),
        (prompt_without_default, "needs a default for `system_prompt`: training changes weights, not prompts"),
        (None, "got `None` of type `NoneType`, which is neither a class nor a function"),
        (42, "got `42` of type `int`"),
        ("my_module:my_workflow", "got `'my_module:my_workflow'` of type `str`"),
    ],
)
def test_a_workflow_that_cannot_be_used_is_refused(workflow: Any, got: str) -> None:
    with pytest.raises(SignatureError) as caught:
        check_workflow(workflow)
    message = str(caught.value)
    assert message.startswith("this workflow cannot be used: ")
    assert got in message
    assert WORKFLOW_FORMS in message


# --------------------------------------------------------------------------------------- wrong workflow classes


class NotAWorkflow:
    async def execute(self, task, model_tuner):
        return WorkflowOutput(reward=1.0)


class WithoutExecute(Workflow):
    name: str = "lazy"


class SyncExecute(Workflow):
    def execute(self, task, model_tuner):
        return WorkflowOutput(reward=1.0)


class GeneratorExecute(Workflow):
    async def execute(self, task, model_tuner):
        yield WorkflowOutput(reward=1.0)


class FunctionParameters(Workflow):
    async def execute(self, task, model):
        return WorkflowOutput(reward=1.0)


class SwappedParameters(Workflow):
    async def execute(self, model_tuner, task):
        return WorkflowOutput(reward=1.0)


class MissingParameter(Workflow):
    async def execute(self, task):
        return WorkflowOutput(reward=1.0)


class ExtraParameter(Workflow):
    async def execute(self, task, model_tuner, logger=None):
        return WorkflowOutput(reward=1.0)


class KwargsExecute(Workflow):
    async def execute(self, task, model_tuner, **options):
        return WorkflowOutput(reward=1.0)


class ArgsExecute(Workflow):
    async def execute(self, task, *model_tuner):
        return WorkflowOutput(reward=1.0)


class KeywordOnlyExecute(Workflow):
    async def execute(self, *, task, model_tuner):
        return WorkflowOutput(reward=1.0)


class ReturnsText(Workflow):
    async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> str:
        return "1"


class NeedsArguments(Workflow):
    difficulty: int

    async def execute(self, task, model_tuner):
        return WorkflowOutput(reward=1.0)


class OwnConstructor(Workflow):
    def __init__(self, environment):
        super().__init__(environment=environment)

    async def execute(self, task, model_tuner):
        return WorkflowOutput(reward=1.0)


@pytest.mark.parametrize(
    ("workflow", "got"),
    [
        (NotAWorkflow, "class `NotAWorkflow` does not inherit from `Workflow`"),
        (int, "class `int` does not inherit from `Workflow`"),
        (Workflow, "class `Workflow` does not define `execute`"),
        (WithoutExecute, "class `WithoutExecute` does not define `execute`"),
        (WithoutExecute(), "class `WithoutExecute` does not define `execute`"),
        (SyncExecute, "`SyncExecute.execute(self, task, model_tuner)` is not `async def`"),
        (SyncExecute(), "`SyncExecute.execute(self, task, model_tuner)` is not `async def`"),
        (GeneratorExecute, "is not `async def`"),
        (FunctionParameters, "`FunctionParameters.execute(self, task, model)` must take exactly (self, task, model_tu"),
        (SwappedParameters, "must take exactly (self, task, model_tuner)"),
        (MissingParameter, "must take exactly (self, task, model_tuner)"),
        (ExtraParameter, "must take exactly (self, task, model_tuner)"),
        (KwargsExecute, "must take exactly (self, task, model_tuner)"),
        (ArgsExecute, "must take exactly (self, task, model_tuner)"),
        (KeywordOnlyExecute, "must take exactly (self, task, model_tuner)"),
        (ReturnsText, "is annotated to return `str`"),
        (NeedsArguments, "`NeedsArguments()` cannot be made without arguments"),
        (OwnConstructor, "`OwnConstructor()` cannot be made without arguments"),
    ],
)
def test_a_workflow_class_that_cannot_be_used_is_refused(workflow: Any, got: str) -> None:
    with pytest.raises(SignatureError) as caught:
        check_workflow(workflow)
    assert got in str(caught.value)
    assert WORKFLOW_FORMS in str(caught.value)


def test_a_class_that_needs_arguments_is_used_as_an_instance() -> None:
    with pytest.raises(SignatureError, match="pass an instance"):
        check_workflow(NeedsArguments)
    assert run_workflow(NeedsArguments(difficulty=3)).reward == 1.0
    assert run_workflow(OwnConstructor(environment="shop")).reward == 1.0


def test_training_no_role_is_refused() -> None:
    class Nobody(Workflow):
        trainable_targets: list[str] | None = []  # noqa: RUF012

        async def execute(self, task, model_tuner):
            return WorkflowOutput(reward=1.0)

    for workflow in (Nobody, Nobody(), Nobody(trainable_targets=[])):
        with pytest.raises(
            ConfigError, match=r"`Nobody.trainable_targets` is empty, so nothing would be trained; name"
        ):
            check_workflow(workflow)
    check_workflow(Nobody(trainable_targets=None))


def test_a_role_is_not_taken_for_a_list_of_letters() -> None:
    class OneRole(Workflow):
        trainable_targets: list[str] | None = "werewolf"  # type: ignore[assignment]

        async def execute(self, task, model_tuner):
            return WorkflowOutput(reward=1.0)

    with pytest.raises(SignatureError, match="OneRole"):
        check_workflow(OneRole)


# ------------------------------------------------------------------------------------------------- wrong judges


def sync_judge(task, response):
    return JudgeOutput(reward=1.0)


async def judge_without_response(task):
    return JudgeOutput(reward=1.0)


async def judge_with_class_names(task, output):
    return JudgeOutput(reward=1.0)


async def judge_with_model(task, response, model):
    return JudgeOutput(reward=1.0)


async def judge_with_prompt(task, response, system_prompt=""):
    return JudgeOutput(reward=1.0)


async def judge_with_args(task, response, *rest):
    return JudgeOutput(reward=1.0)


async def judge_with_kwargs(task, response, **rest):
    return JudgeOutput(reward=1.0)


async def positional_judge(task, response, /):
    return JudgeOutput(reward=1.0)


async def judge_that_yields(task, response):
    yield JudgeOutput(reward=1.0)


async def judge_annotated_float(task, response) -> float:
    return 1.0


async def judge_annotated_output(task, response) -> WorkflowOutput:
    return WorkflowOutput(reward=1.0)


class NotAJudge:
    async def judge(self, task, output):
        return JudgeOutput(reward=1.0)


class WithoutJudge(Judge):
    pass


class SyncJudge(Judge):
    def judge(self, task, output):
        return JudgeOutput(reward=1.0)


class FunctionNames(Judge):
    async def judge(self, task, response):
        return JudgeOutput(reward=1.0)


class ExtraArgument(Judge):
    async def judge(self, task, output, strict=True):
        return JudgeOutput(reward=1.0)


class KeywordOnlyJudge(Judge):
    async def judge(self, *, task, output):
        return JudgeOutput(reward=1.0)


class JudgeReturnsFloat(Judge):
    async def judge(self, task, output) -> float:
        return 1.0


class JudgeNeedsArguments(Judge):
    def __init__(self, rubric):
        self.rubric = rubric

    async def judge(self, task, output):
        return JudgeOutput(reward=float(output.response == self.rubric))


@pytest.mark.parametrize(
    ("judge", "got"),
    [
        (sync_judge, "`sync_judge(task, response)` is not `async def`"),
        (judge_without_response, "lacks the parameter `response`"),
        (judge_with_class_names, "lacks the parameter `response`"),
        (judge_with_model, "has the unknown parameter `model`; known are task, response, auxiliary_models, logger"),
        (judge_with_prompt, "has the unknown parameter `system_prompt`"),
        (judge_with_args, "takes `*rest`; name the parameters"),
        (judge_with_kwargs, "takes `**rest`; name the parameters"),
        (positional_judge, "has the positional-only parameter `task`"),
        (judge_that_yields, "yields; it must return once"),
        (judge_annotated_float, "is annotated to return `float`, not `JudgeOutput`"),
        (judge_annotated_output, "is annotated to return `WorkflowOutput`, not `JudgeOutput`"),
        (None, "got `None` of type `NoneType`, which is neither a judge nor a function"),
        ("math", "got `'math'` of type `str`"),
        (NotAJudge, "class `NotAJudge` does not inherit from `Judge`"),
        (WithoutJudge, "`WithoutJudge()` cannot be made"),
        (SyncJudge, "`SyncJudge.judge(self, task, output)` is not `async def`"),
        (SyncJudge(), "`SyncJudge.judge(self, task, output)` is not `async def`"),
        (FunctionNames, "must take exactly (self, task, output)"),
        (ExtraArgument, "must take exactly (self, task, output)"),
        (KeywordOnlyJudge, "must take exactly (self, task, output)"),
        (JudgeReturnsFloat, "is annotated to return `float`"),
        (JudgeNeedsArguments, "`JudgeNeedsArguments()` cannot be made without arguments"),
    ],
)
def test_a_judge_that_cannot_be_used_is_refused(judge: Any, got: str) -> None:
    with pytest.raises(SignatureError) as caught:
        check_judge(judge)
    message = str(caught.value)
    assert message.startswith("this judge cannot be used: ")
    assert got in message
    assert JUDGE_FORMS in message


def test_signature_errors_are_config_errors_and_come_before_anything_is_loaded(tmp_path: Any) -> None:
    assert issubclass(SignatureError, ConfigError)
    assert issubclass(SignatureError, ValueError)
    with pytest.raises(SignatureError, match="this workflow cannot be used"):
        tune(sync_function, tmp_path / "no-such-config.yaml")
    with pytest.raises(SignatureError, match="this judge cannot be used"):
        tune(short_form, tmp_path / "no-such-config.yaml", judge_func=sync_judge)
    with pytest.raises(ConfigError, match="does not exist"):
        tune(short_form, tmp_path / "no-such-config.yaml", judge_func=short_judge)


def test_auxiliary_models_that_nobody_takes_are_refused() -> None:
    config = {"model.model_path": "no-model", "auxiliary_models.grader.model_path": "no-model"}
    for workflow, judge in ((short_form, None), (short_form, short_judge), (Counts, None), (Counts, ClassJudge)):
        with pytest.raises(ConfigError, match=r"`auxiliary_models.grader` has no effect"):
            evaluate(workflow, None, judge_func=judge, overrides=config)
        with pytest.raises(ConfigError, match=r"`auxiliary_models.grader` has no effect"):
            tune(workflow, None, judge_func=judge, overrides=config)
    for workflow, judge in ((auxiliary_without_default, None), (Counts, judge_with_everything)):
        with pytest.raises(ConfigError, match="is required"):  # what is checked next
            tune(workflow, None, judge_func=judge, overrides=config)


def test_what_a_partial_has_bound_is_not_shown() -> None:
    async def with_key(task: dict[str, Any], model: Any, *, api_key: str, extra: int) -> float:
        return 0.0

    with pytest.raises(SignatureError, match=r"api_key: 'str' = \.\.\., extra") as error:
        check_workflow(functools.partial(with_key, api_key="sk-1234"))
    assert "sk-1234" not in str(error.value)


# --------------------------------------------------------------------------------------------- accepted workflows


async def short_form(task: Dict, model: TrinityChatModel) -> float:  # noqa: UP006
    assert model is MODEL
    return float(task["question"] == "2 + 2?" and task["answer"] == "4")


async def long_form(
    task: Dict,  # noqa: UP006
    model: OpenAIChatModel,
    system_prompt: str = "You are helpful.",
    auxiliary_models: Dict[str, OpenAIChatModel] | None = None,  # noqa: UP006
    logger: logging.Logger | None = None,
) -> WorkflowOutput:
    logger.info("called")
    return WorkflowOutput(reward=0.5, response=system_prompt, metadata={"auxiliary": auxiliary_models})


async def without_annotations(model, task):
    return float(model is MODEL) + (task["question"] == "2 + 2?")


async def keyword_only(*, task, model):
    return float(model is MODEL)


async def auxiliary_without_default(task, model, auxiliary_models, logger):
    return WorkflowOutput(reward=len(auxiliary_models))


async def returns_int(task, model) -> int:
    return 3


async def returns_either(task, model) -> float | WorkflowOutput:
    return 0.25


async def returns_anything(task, model) -> Any:
    return WorkflowOutput(reward=0.25)


async def string_annotation(task: dict, model: UnknownHere) -> tuner.WorkflowOutput:  # type: ignore  # noqa: F821
    return WorkflowOutput(reward=0.75)


async def with_agentscopes_own_output(task, model) -> TheirWorkflowOutput:
    return TheirWorkflowOutput(reward=0.75, response="r", metrics={"m": 1.0})


async def with_environment(environment, task, model):
    return float(environment == "shop")


async def with_options(task, model, temperature):
    return temperature


class AsyncCallable:
    async def __call__(self, task, model):
        return 0.5

    async def method(self, task, model):
        return 0.75

    @staticmethod
    async def static(task, model):
        return 0.25


@pytest.mark.parametrize(
    ("workflow", "reward"),
    [
        (short_form, 1.0),
        (long_form, 0.5),
        (without_annotations, 2.0),
        (keyword_only, 1.0),
        (auxiliary_without_default, 1.0),
        (returns_int, 3.0),
        (returns_either, 0.25),
        (returns_anything, 0.25),
        (string_annotation, 0.75),
        (with_agentscopes_own_output, 0.75),
        (AsyncCallable(), 0.5),
        (AsyncCallable().method, 0.75),
        (AsyncCallable.static, 0.25),
        (functools.partial(short_form), 1.0),
        (functools.partial(with_environment, "shop"), 1.0),
        (functools.partial(with_options, temperature=0.5), 0.5),
        (functools.partial(functools.partial(with_options, temperature=0.5), temperature=0.25), 0.25),
        (functools.partial(long_form, system_prompt="Be brief."), 0.5),
    ],
)
def test_every_function_form_runs(workflow: Any, reward: float) -> None:
    check_workflow(workflow)
    output = run_workflow(workflow, {"judge": object()})
    assert output.reward == reward
    assert isinstance(output, WorkflowOutput)


def test_a_partial_may_not_bind_what_training_hands_in() -> None:
    with pytest.raises(SignatureError, match="lacks the parameter `model`"):
        check_workflow(functools.partial(short_form, model=object()))
    with pytest.raises(SignatureError, match="has the unknown parameter `environment`"):
        check_workflow(with_environment)
    with pytest.raises(SignatureError, match="is annotated to return `str`"):
        check_workflow(functools.partial(returns_text))


def test_functions_receive_what_they_name(caplog: pytest.LogCaptureFixture) -> None:
    helper = object()
    with caplog.at_level(logging.INFO, logger="agentscope_tuner"):
        output = run_workflow(long_form, {"judge": helper})
    assert output.response == "You are helpful."
    assert output.metadata["auxiliary"] == {"judge": helper}
    assert [record.message for record in caplog.records] == ["called"]


def test_agentscopes_own_output_keeps_its_fields() -> None:
    output = run_workflow(with_agentscopes_own_output)
    assert (output.reward, output.response, output.metrics) == (0.75, "r", {"m": 1.0})


# ---------------------------------------------------------------------------------------------- accepted classes


class Counts(Workflow):
    """Keeps state, as workflows do."""

    name: str = "counts"
    start: int = 0
    shared: list[str] = Field(default_factory=list)

    async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        self.start += 1
        self.agent = getattr(self, "agent", 0) + 1
        await asyncio.sleep(0)
        self.start += 1
        return WorkflowOutput(reward=self.start + 0.1 * self.agent, response=id(self), metadata={"task": task})


class PositionalOnly(Workflow):
    async def execute(self, task, model_tuner, /):
        return WorkflowOutput(reward=1.0)


class Inherits(Counts):
    name: str = ""


@pytest.mark.parametrize(("workflow", "start"), [(Counts, 0), (Counts(start=10), 10), (Inherits, 0)])
def test_every_episode_gets_an_instance_of_its_own(workflow: Any, start: int) -> None:
    runner = WorkflowRunner(workflow)

    async def three() -> list[WorkflowOutput]:
        return await asyncio.gather(*(runner.run(TASK, MODEL, {}) for _ in range(3)))

    outputs = asyncio.run(three())
    assert [output.reward for output in outputs] == [start + 2.1] * 3
    assert len({output.response for output in outputs}) == 3
    assert outputs[0].metadata == {"task": TASK}
    if isinstance(workflow, Workflow):
        assert workflow.start == start
        assert not hasattr(workflow, "agent")


def test_attributes_given_to_an_instance_reach_every_episode() -> None:
    class Uses(Workflow):
        async def execute(self, task, model_tuner):
            return WorkflowOutput(reward=1.0, response=self.environment)

    environment = object()
    instance = Uses(environment=environment)
    instance.late = "set after it was made"
    assert run_workflow(instance).response is environment


def test_names_and_targets_of_a_workflow() -> None:
    assert WorkflowRunner(Counts).name == "counts"
    assert WorkflowRunner(Inherits).name == "Inherits"
    assert WorkflowRunner(Counts(name="other")).name == "other"
    assert WorkflowRunner(short_form).name == "short_form"
    assert WorkflowRunner(functools.partial(short_form)).name == "short_form"
    assert WorkflowRunner(Counts).trainable_targets is None
    assert WorkflowRunner(Counts(trainable_targets=["a"])).trainable_targets == ["a"]
    assert WorkflowRunner(short_form).trainable_targets is None


def test_a_positional_only_execute_runs() -> None:
    assert run_workflow(PositionalOnly).reward == 1.0


# ------------------------------------------------------------------------------------------------ accepted judges


async def short_judge(task: Dict, response: Any) -> JudgeOutput:  # noqa: UP006
    return JudgeOutput(reward=float(task["answer"] == "4" and response == "four"), metrics={"seen": 1.0})


async def judge_with_everything(task, response, auxiliary_models, logger) -> JudgeOutput:
    logger.warning("judged")
    return JudgeOutput(reward=len(auxiliary_models))


async def judge_with_agentscopes_own_output(task, response) -> TheirJudgeOutput:
    return TheirJudgeOutput(reward=0.5, metrics={"m": 2.0})


async def judge_by_rubric(rubric, task, response):
    return JudgeOutput(reward=float(rubric == response))


class ClassJudge(Judge):
    async def judge(self, task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        return JudgeOutput(reward=float(task is TASK and output.response == "four"))


@pytest.mark.parametrize(
    ("judge", "reward"),
    [
        (short_judge, 1.0),
        (judge_with_everything, 2.0),
        (judge_with_agentscopes_own_output, 0.5),
        (functools.partial(judge_by_rubric, "four"), 1.0),
        (functools.partial(judge_by_rubric, rubric="five"), 0.0),
        (ClassJudge, 1.0),
        (ClassJudge(), 1.0),
        (JudgeNeedsArguments("four"), 1.0),
    ],
)
def test_every_judge_form_runs(judge: Any, reward: float) -> None:
    check_judge(judge)
    assert run_judge(judge, {"a": object(), "b": object()}).reward == reward


def test_a_judge_s_metrics_are_kept() -> None:
    assert run_judge(short_judge).metrics == {"seen": 1.0}
    assert run_judge(judge_with_agentscopes_own_output).metrics == {"m": 2.0}


# ----------------------------------------------------------------------------------------- what is not a result


@pytest.mark.parametrize("returned", [None, True, "1.0", [1.0], {"reward": 1.0}, JudgeOutput(reward=1.0)])
def test_what_is_not_an_output_is_named(returned: Any) -> None:
    async def workflow(task, model):
        return returned

    with pytest.raises(RewardError) as caught:
        run_workflow(workflow)
    assert f"the workflow returned `{returned!r}` of type `{type(returned).__name__}`" in str(caught.value)
    assert "return a `WorkflowOutput`" in str(caught.value)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_is_a_finite_number(reward: float) -> None:
    async def short(task, model):
        return reward

    async def foreign(task, model):
        return TheirWorkflowOutput(reward=reward)

    async def foreign_judge(task, response):
        return TheirJudgeOutput(reward=reward)

    for workflow in (short, foreign):
        with pytest.raises(RewardError, match="finite"):
            run_workflow(workflow)
    with pytest.raises(RewardError, match="finite"):
        run_judge(foreign_judge)
    for kind in (WorkflowOutput, JudgeOutput):
        with pytest.raises(ValueError, match="must be a finite number"):
            kind(reward=reward)
        with pytest.raises(ValueError, match="`reward` of role `seer` must be a finite number"):
            kind(reward={"wolf": 1.0, "seer": reward})


@pytest.mark.parametrize("returned", [None, 1.0, True, WorkflowOutput(reward=1.0)])
def test_what_is_not_a_judgement_is_named(returned: Any) -> None:
    async def judge(task, response):
        return returned

    with pytest.raises(RewardError) as caught:
        run_judge(judge)
    assert f"the judge returned `{returned!r}`" in str(caught.value)


def test_checking_loads_no_engine() -> None:
    code = (
        "import sys\n"
        "from agentscope_tuner import check_workflow\n"
        "async def w(task, model): return 1.0\n"
        "check_workflow(w)\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
