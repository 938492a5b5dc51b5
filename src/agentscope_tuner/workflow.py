"""What can be trained: the `Workflow` class, AgentScope's two function forms, and the checks that tell them apart.

Every form becomes a `WorkflowRunner`, so nothing above this room knows how the user wrote theirs.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import types
import typing
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from agentscope_tuner.errors import ConfigError, RewardError, SignatureError
from agentscope_tuner.judges import Judge
from agentscope_tuner.model_tuner import ModelTuner
from agentscope_tuner.readers import task_to_row
from agentscope_tuner.types import JudgeOutput, WorkflowOutput, WorkflowTask

WORKFLOW_FORMS = """\
    class MyWorkflow(Workflow):
        async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput

    async def my_workflow(task: Dict, model: ChatModelBase) -> float
    async def my_workflow(task, model[, system_prompt][, auxiliary_models][, logger]) -> WorkflowOutput"""

JUDGE_FORMS = """\
    class MyJudge(Judge):
        async def judge(self, task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput

    async def my_judge(task, response[, auxiliary_models][, logger]) -> JudgeOutput"""

_WORKFLOW_RETURNS = (float, int, "WorkflowOutput")

_logger = logging.getLogger("agentscope_tuner.workflow")


class Workflow(BaseModel):
    """The user's own agent code, around one `execute`.

    Every episode gets an instance of its own, so `self.agent = ...` is safe.
    """

    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True)

    name: str = ""
    """Shown in logs; the class name when empty."""
    trainable_targets: list[str] | None = None
    """Roles that learn. None: every role."""

    async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        """Run the agents on one task.

        Args:
            task: what to do, with the episode's own seed.
            model_tuner: stands where a chat model stands; registers roles where there are several.

        Returns:
            The reward, or None to leave it to the judge, and what the judge needs.
        """
        raise NotImplementedError


class WorkflowRunner:
    """A checked workflow of any form."""

    def __init__(self, workflow: Any) -> None:
        check_workflow(workflow)
        self._workflow = workflow
        self.takes_auxiliary_models = _takes_auxiliary_models(workflow)
        target = workflow if isinstance(workflow, (type, Workflow)) else None
        fields = target() if isinstance(target, type) else target
        self.trainable_targets: list[str] | None = fields.trainable_targets if fields is not None else None
        self.name: str = (fields.name or type(fields).__name__) if fields is not None else _function_name(workflow)

    async def run(
        self, task: WorkflowTask, model_tuner: ModelTuner, auxiliary_models: Mapping[str, Any]
    ) -> WorkflowOutput:
        """Run it on one task.

        Raises:
            RewardError: it returned something that is not an output.
        """
        if isinstance(self._workflow, (type, Workflow)):
            one = self._workflow() if isinstance(self._workflow, type) else self._workflow.model_copy()
            return _as_output(await one.execute(task, model_tuner))
        optional = {"auxiliary_models": dict(auxiliary_models), "logger": _logger}
        returned = await _call(self._workflow, (task_to_row(task.task), model_tuner), optional)
        return _as_output(returned)


class JudgeRunner:
    """A checked judge of either form."""

    def __init__(self, judge: Any) -> None:
        check_judge(judge)
        self._judge = judge() if isinstance(judge, type) else judge
        self.takes_auxiliary_models = _takes_auxiliary_models(judge)

    async def run(self, task: WorkflowTask, output: WorkflowOutput, auxiliary_models: Mapping[str, Any]) -> JudgeOutput:
        """Score one output.

        Raises:
            RewardError: the judge returned something that is not a finite reward.
        """
        if isinstance(self._judge, Judge):
            returned: Any = await self._judge.judge(task, output)
        else:
            optional = {"auxiliary_models": dict(auxiliary_models), "logger": _logger}
            returned = await _call(self._judge, (task_to_row(task.task), output.response), optional)
        return _as_judgement(returned)


def _takes_auxiliary_models(one: Any) -> bool:
    """Whether it is a function with a parameter for them."""
    return not isinstance(one, type | Workflow | Judge) and "auxiliary_models" in _free_parameters(one)


# ----------------------------------------------------------------------------------------------------- checks


def check_auxiliary_models(names: Iterable[str], workflow: WorkflowRunner, judge: JudgeRunner | None) -> None:
    """See that somebody uses the auxiliary models of these names.

    Raises:
        ConfigError: nobody does.
    """
    taken = workflow.takes_auxiliary_models or (judge is not None and judge.takes_auxiliary_models)
    if not taken and (name := next(iter(names), None)) is not None:
        raise ConfigError(
            f"`auxiliary_models.{name}` has no effect: neither the workflow nor the judge is a function with a "
            "parameter `auxiliary_models`; remove it, or write a function that takes it"
        )


def check_workflow(workflow: Any) -> None:
    """Check that something can be trained, without running it.

    Raises:
        SignatureError: shows the accepted forms and what was got.
    """
    if isinstance(workflow, (type, Workflow)):
        _check_workflow_class(workflow)
    elif callable(workflow):
        _check_function(
            workflow,
            what="workflow",
            forms=WORKFLOW_FORMS,
            required=("task", "model"),
            optional=("system_prompt", "auxiliary_models", "logger"),
            returns=_WORKFLOW_RETURNS,
        )
    else:
        raise _mismatch("workflow", WORKFLOW_FORMS, f"got {_show(workflow)}, which is neither a class nor a function")


def check_judge(judge: Any) -> None:
    """Check that something can judge, without running it.

    Raises:
        SignatureError: shows the accepted forms and what was got.
    """
    if isinstance(judge, (type, Judge)):
        cls = judge if isinstance(judge, type) else type(judge)
        if not issubclass(cls, Judge):
            raise _mismatch("judge", JUDGE_FORMS, f"class `{cls.__name__}` does not inherit from `Judge`")
        _check_method(cls, "judge", ("task", "output"), "judge", JUDGE_FORMS, ("JudgeOutput",))
        if isinstance(judge, type):
            _instantiate(judge, "judge", JUDGE_FORMS)
    elif callable(judge):
        _check_function(
            judge,
            what="judge",
            forms=JUDGE_FORMS,
            required=("task", "response"),
            optional=("auxiliary_models", "logger"),
            returns=("JudgeOutput",),
        )
    else:
        raise _mismatch("judge", JUDGE_FORMS, f"got {_show(judge)}, which is neither a judge nor a function")


def _check_workflow_class(workflow: Any) -> None:
    cls = workflow if isinstance(workflow, type) else type(workflow)
    if not issubclass(cls, Workflow):
        raise _mismatch("workflow", WORKFLOW_FORMS, f"class `{cls.__name__}` does not inherit from `Workflow`")
    if cls.execute is Workflow.execute:
        raise _mismatch("workflow", WORKFLOW_FORMS, f"class `{cls.__name__}` does not define `execute`")
    _check_method(cls, "execute", ("task", "model_tuner"), "workflow", WORKFLOW_FORMS, _WORKFLOW_RETURNS)
    one = _instantiate(workflow, "workflow", WORKFLOW_FORMS) if isinstance(workflow, type) else workflow
    if isinstance(one.trainable_targets, str):
        raise SignatureError(
            f"`{cls.__name__}.trainable_targets` must be a list of roles, got {one.trainable_targets!r}; write "
            f"`[{one.trainable_targets!r}]`"
        )
    if one.trainable_targets == []:
        raise SignatureError(
            f"`{cls.__name__}.trainable_targets` is empty, so nothing would be trained; name the roles that learn, or "
            "leave it None to train every role"
        )


def _instantiate(cls: type, what: str, forms: str) -> Any:
    try:
        return cls()
    except (TypeError, ValidationError) as exc:
        raise _mismatch(
            what, forms, f"`{cls.__name__}()` cannot be made without arguments ({_first_line(exc)}); pass an instance"
        ) from exc


def _check_method(
    cls: type, name: str, parameters: tuple[str, ...], what: str, forms: str, returns: tuple[Any, ...]
) -> None:
    method = getattr(cls, name)
    shown = f"`{cls.__name__}.{name}{_signature(method)}`"
    if not inspect.iscoroutinefunction(method):
        raise _mismatch(what, forms, f"{shown} is not `async def`")
    got = list(inspect.signature(method).parameters.values())[1:]
    by_position = all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in got)
    if tuple(p.name for p in got) != parameters or not by_position:
        raise _mismatch(what, forms, f"{shown} must take exactly ({', '.join(('self', *parameters))})")
    if why := _wrong_return(method, returns):
        raise _mismatch(what, forms, f"{shown} {why}")


def _check_function(
    function: Callable[..., Any],
    *,
    what: str,
    forms: str,
    required: tuple[str, ...],
    optional: tuple[str, ...],
    returns: tuple[Any, ...],
) -> None:
    shown = f"`{_function_name(function)}{_signature(function)}`"

    def wrong(why: str) -> SignatureError:
        return _mismatch(what, forms, f"{shown} {why}")

    if inspect.isasyncgenfunction(function):
        raise wrong("yields; it must return once")
    if not inspect.iscoroutinefunction(function) and not inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    ):
        raise wrong("is not `async def`")
    parameters = _free_parameters(function)
    for parameter in parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise wrong(f"takes `{parameter}`; name the parameters")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise wrong(f"has the positional-only parameter `{parameter.name}`")
    missing = [name for name in required if name not in parameters]
    if missing:
        raise wrong(f"lacks the parameter `{missing[0]}`")
    unknown = [name for name in parameters if name not in required + optional]
    if unknown:
        raise wrong(f"has the unknown parameter `{unknown[0]}`; known are {', '.join(required + optional)}")
    if "system_prompt" in parameters and parameters["system_prompt"].default is inspect.Parameter.empty:
        raise wrong("needs a default for `system_prompt`: training changes weights, not prompts")
    if why := _wrong_return(function, returns):
        raise wrong(why)


def _free_parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters that are left to give: a `partial` has bound some."""
    bound = function.keywords if isinstance(function, functools.partial) else {}
    return {name: p for name, p in inspect.signature(function).parameters.items() if name not in bound}


def _wrong_return(function: Callable[..., Any], returns: tuple[Any, ...]) -> str:
    """What is wrong with the return annotation; empty when nothing is."""
    annotation = _return_annotation(function)
    if annotation is inspect.Signature.empty or _may_return(annotation, returns):
        return ""
    names = " or ".join(f"`{r if isinstance(r, str) else r.__name__}`" for r in returns if r is not int)
    return f"is annotated to return `{_name(annotation)}`, not {names}"


def _return_annotation(function: Callable[..., Any]) -> Any:
    try:
        return typing.get_type_hints(function).get("return", inspect.Signature.empty)
    except Exception:  # names that exist only for type checkers
        return inspect.signature(function).return_annotation


def _may_return(annotation: Any, returns: tuple[Any, ...]) -> bool:
    if annotation is Any:
        return True
    if isinstance(annotation, str):
        return annotation.split(".")[-1].strip("'\"") in {r if isinstance(r, str) else r.__name__ for r in returns}
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return all(_may_return(part, returns) for part in typing.get_args(annotation))
    # By name: AgentScope's own output classes have the same names, and are accepted.
    return annotation in returns or getattr(annotation, "__name__", "") in returns


def _function_name(function: Any) -> str:
    return str(getattr(getattr(function, "func", function), "__name__", type(function).__name__))


def _name(annotation: Any) -> str:
    return getattr(annotation, "__name__", str(annotation))


class _Hidden:
    def __repr__(self) -> str:
        return "..."


def _signature(function: Any) -> str:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return "(...)"
    # Values are not shown: what a `partial` has bound may be a key.
    hidden = [p if p.default is p.empty else p.replace(default=_Hidden()) for p in signature.parameters.values()]
    return str(signature.replace(parameters=hidden))


def _show(value: Any) -> str:
    return f"`{value!r}` of type `{type(value).__name__}`"


def _first_line(exc: Exception) -> str:
    return str(exc).splitlines()[0]


def _mismatch(what: str, forms: str, got: str) -> SignatureError:
    return SignatureError(f"this {what} cannot be used: {got}\nexpected one of:\n{forms}")


# --------------------------------------------------------------------------------------------- calls and results


async def _call(
    function: Callable[..., Awaitable[Any]], positional: tuple[Any, Any], optional: Mapping[str, Any]
) -> Any:
    parameters = _free_parameters(function)
    first, second = ("task", "model") if "model" in parameters else ("task", "response")
    named = {first: positional[0], second: positional[1]}
    named |= {name: value for name, value in optional.items() if name in parameters}
    return await function(**named)


def _as_output(returned: Any) -> WorkflowOutput:
    if isinstance(returned, WorkflowOutput):
        return returned
    if isinstance(returned, bool) or not isinstance(returned, (int, float)):
        # AgentScope's own class has fewer fields of the same names.
        if type(returned).__name__ == "WorkflowOutput" and hasattr(returned, "reward"):
            try:
                return WorkflowOutput(
                    reward=returned.reward,
                    response=getattr(returned, "response", None),
                    metrics=getattr(returned, "metrics", None),
                )
            except ValidationError as exc:
                raise RewardError(f"the workflow's output is not valid: {exc.errors()[0]['msg']}") from exc
        raise RewardError(
            f"the workflow returned {_show(returned)}; return a `WorkflowOutput`, or a float in the two-argument form"
        )
    if not math.isfinite(returned):
        raise RewardError(f"the workflow returned the reward {returned}; a reward must be a finite number")
    return WorkflowOutput(reward=float(returned))


def _as_judgement(returned: Any) -> JudgeOutput:
    if isinstance(returned, JudgeOutput):
        return returned
    if type(returned).__name__ == "JudgeOutput" and hasattr(returned, "reward"):
        try:
            return JudgeOutput(reward=returned.reward, metrics=getattr(returned, "metrics", None))
        except ValidationError as exc:
            raise RewardError(f"the judge's output is not valid: {exc.errors()[0]['msg']}") from exc
    raise RewardError(f"the judge returned {_show(returned)}; return a `JudgeOutput` with a finite `reward`")
