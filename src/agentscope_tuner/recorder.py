"""One episode's calls to its models: who may speak, what was said, token for token.

Nothing here knows AgentScope; each framework gets a thin face over this.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from agentscope_tuner.chat import ChatRenderer, Conversation, Prompt, Reply, parse_reply, settled_text
from agentscope_tuner.config import TunerModelConfig
from agentscope_tuner.errors import ConfigError, EpisodeTimeoutError, ReplayError, RewardError, RoleError
from agentscope_tuner.policy import Policy, Sample, SamplingParams
from agentscope_tuner.types import DEFAULT_ROLE, ModelCall

_SAMPLING_KEYS = {"temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "stop"}


@dataclass(frozen=True, slots=True)
class PolicyModel:
    """A policy with all that is needed to talk to it: what every episode's recorder shares."""

    policy: Policy
    renderer: ChatRenderer
    end_of_turn_ids: frozenset[int]
    name: str
    params: SamplingParams
    """Used where a call does not say otherwise."""

    @staticmethod
    def params_of(config: TunerModelConfig) -> SamplingParams:
        """Sampling parameters of a model's configuration."""
        return SamplingParams(
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            max_tokens=config.max_tokens,
            stop=tuple(config.stop),
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """What a face needs of one call."""

    reply: Reply
    prompt_tokens: int
    token_ids: list[int]
    """(T,) as they were sampled and recorded, end-of-turn token included."""
    logprobs: list[float]
    """(T,) as recorded."""
    finish_reason: str
    """`stop` or `length`."""
    policy_version: int

    @property
    def completion_tokens(self) -> int:
        """T."""
        return len(self.token_ids)


class Drawn(NamedTuple):
    """A call that is not recorded yet."""

    place: int
    """Of the answer, see `Recorder.ask`."""
    prompt: Prompt
    call: ModelCall
    reply: Reply


class Recorder:
    """The calls of one episode.

    Roles are registered with the model that plays them while they are not trained. A role in `trainable_targets` is
    played by the policy, and every call of it is recorded.
    """

    def __init__(
        self,
        model: PolicyModel,
        *,
        episode_id: str,
        seed: int,
        trainable_targets: Sequence[str] | None = None,
        cast: Mapping[str, str] | None = None,
        helps: Recorder | None = None,
        replay: Sequence[Any] = (),
        on_answer: Callable[[str, str, Sequence[Mapping[str, Any]], Any], None] | None = None,
    ) -> None:
        """Begin an episode.

        Args:
            model: the policy.
            episode_id: unique within the run.
            seed: fixes the random numbers of the policy's completions.
            trainable_targets: roles the policy plays; None: every role.
            cast: the adapter each role speaks with, where it is not the weights all roles share.
            helps: the recorder of the episode that an auxiliary model serves.
            replay: answers of another episode (its `answers`), given again before anybody is asked. The last one is a
                call of a trained role, and is sampled anew, from the same prompt.
            on_answer: is told what default models answer: role, agent, messages, answer.
        """
        self.model = model
        self.episode_id = episode_id
        self.calls: list[ModelCall] = []
        self.roles: dict[str, Any] = {}
        """Registered roles and their default models."""
        self._seed = seed
        self._targets = None if trainable_targets is None else frozenset(trainable_targets)
        self._conversation = Conversation(model.renderer, model.end_of_turn_ids)
        self.cast = cast or {}
        self.answers: list[Any] = []
        """Everything that was answered, in the order it was asked for: calls of trained roles, and whatever the face
        keeps of the others (see `replayed`)."""
        self._replay = replay
        self.divergence: ReplayError | None = None
        """Where this is not the episode that is repeated. Whoever tries again hears of it again."""
        self.on_answer = on_answer
        self.rewarded = False
        """Whether a turn has earned something by itself, be it nothing."""
        self._agents = Counter[str]()
        self._closed = False
        self._helps = helps
        self._helpers = 0
        self._speaker = 0
        """Which of the episode's models this is, the policy being the first."""
        if helps is not None:
            helps._helpers += 1
            self._speaker = helps._helpers

    def close(self) -> None:
        """The episode is over; a workflow that was abandoned can record nothing more.

        What was recorded is let go. Agents and their tools refer to each other, so they, and what they hold, stay until
        Python looks for garbage in cycles.
        """
        self._closed = True
        self.calls, self.answers, self._replay = [], [None] * len(self.answers), ()
        del self._conversation

    # ----------------------------------------------------------------------------------------------- roles

    def is_trained(self, role: str) -> bool:
        """Whether the policy plays this role."""
        return self._targets is None or role in self._targets

    def register(self, role: str, default_model: Any) -> None:
        """Make a role known; the same role again, with an equal kind of default model, is fine.

        Raises:
            RoleError: the role has no name, or another kind of default model.
        """
        if not isinstance(role, str) or not role:
            raise RoleError(f"a role must be a non-empty string, got {role!r}")
        known = self.roles.get(role)
        if role in self.roles and _kind(known) != _kind(default_model):
            raise RoleError(
                f"role `{role}` is already registered with {_describe(known)} as its default model, got "
                f"{_describe(default_model)}; players of one role share a kind of default model"
            )
        self.roles.setdefault(role, default_model)

    def default_model(self, role: str) -> Any:
        """The model that plays an untrained role.

        Raises:
            RoleError: the role is not registered, or has no default model.
        """
        self.require(role)
        model = self.roles.get(role)
        if model is None:
            raise RoleError(
                f"role `{role}` is not in `trainable_targets` ({self._named_targets()}) and has no default model; add "
                f"it there, or call `model_tuner.register_model({role!r}, default_model=...)`"
            )
        return model

    def require(self, role: str) -> None:
        """Check that a role is registered.

        Raises:
            RoleError: it is not.
        """
        if role not in self.roles and role != DEFAULT_ROLE:
            names = ", ".join(f"`{name}`" for name in self.roles) or "none"
            raise RoleError(
                f"role `{role}` is not registered; registered: {names}. Call `model_tuner.register_model({role!r}, "
                "default_model=...)` first"
            )

    def unknown_targets(self) -> list[str]:
        """Targets that this episode never registered."""
        return sorted((self._targets or frozenset()) - set(self.roles) - {DEFAULT_ROLE})

    def _named_targets(self) -> str:
        return ", ".join(sorted(self._targets or ()))

    def name_agent(self, role: str) -> str:
        """A name for one more player of a role: `seer`, or `villager-2` for the second villager."""
        self._agents[role] += 1
        count = self._agents[role]
        return role if count == 1 else f"{role}-{count}"

    # ----------------------------------------------------------------------------------------------- calls

    def ask(self) -> int:
        """Somebody is asked; returns the place of the answer in `answers`.

        Raises:
            ReplayError: this is not the episode that is repeated.
        """
        if self.divergence is not None:
            raise self.divergence
        self.answers.append(None)
        return len(self.answers) - 1

    def replayed(self, place: int) -> Any:
        """The answer that is given again at this place; None where one has to be asked for."""
        return self._replay[place] if place < len(self._replay) else None

    def diverged(self, place: int) -> ReplayError:
        """What to raise where somebody else is asked, or something else, than in the episode that is repeated."""
        self.divergence = ReplayError(
            f"call {place + 1} of the episode that is continued came from another role or with other messages; draw "
            "all that is random in the workflow from `WorkflowTask.seed`, or remove `algorithm.branching`"
        )
        return self.divergence

    def reward(self, role: str, value: float, agent: str | None = None) -> None:
        """Let a role's last turn earn something by itself; without effect for roles that do not learn.

        Raises:
            RoleError: the role is not registered.
            RewardError: the value is not finite, or the role has not spoken yet.
        """
        self.require(role)
        if not self.is_trained(role):
            return
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise RewardError(f"the reward of a turn must be a finite number, got {value!r} for role `{role}`")
        for call in reversed(self.calls):
            if call.role == role and agent in (None, call.agent):
                call.reward += value
                self.rewarded = True
                return
        who = f"role `{role}`" if agent is None else f"agent `{agent}` of role `{role}`"
        raise RewardError(f"{who} earned a reward of {value} before its first turn; give it after a call")

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Around a call to another model: the policy need not wait for this episode meanwhile."""
        self.model.policy.pause_episode(self.episode_id)
        try:
            yield
        finally:
            self.model.policy.resume_episode(self.episode_id)

    async def draw(
        self,
        role: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | None = None,
        options: Mapping[str, Any] | None = None,
        on_token: Callable[[int], None] | None = None,
        agent: str | None = None,
    ) -> Drawn:
        """Let the policy speak for a trained role. Whoever hears of it has to `record` it.

        Args:
            role: who speaks.
            messages: in OpenAI's or DashScope's form.
            tools: JSON schemas the model may call.
            tool_choice: with `none`, tool calls stay text. `required` and names are requests that a policy learns to
                fulfil; they are not forced upon it, since forced tokens are not sampled ones.
            options: `temperature`, `top_p`, `top_k`, `max_tokens`, `stop` of this call.
            on_token: sees each token as it is drawn.
            agent: which of the role's players speaks.

        Raises:
            ConfigError: an option that cannot be honoured.
            EpisodeFailure: the prompt is too long or holds more than text, or the episode is over.
        """
        if self._closed:
            raise EpisodeTimeoutError(f"episode `{self.episode_id}` is over")
        place = self.ask()
        params = self._params(options or {}, place)
        prompt = self._conversation.render(messages, tools)
        adapter = self.cast.get(role, "")
        sample = self._sample_again(place, role, prompt.ids, on_token)
        if sample is None:
            with self._helps.elsewhere() if self._helps is not None else nullcontext():
                sample = await self.model.policy.sample(
                    prompt.ids, params, episode_id=self.episode_id, adapter=adapter, on_token=on_token
                )
        text = self._text_of(sample.token_ids, params.stop)
        call = ModelCall(
            role=role,
            messages=prompt.messages,
            tools=prompt.tools,
            prompt_ids=prompt.ids,
            completion_ids=sample.token_ids,
            logprobs=sample.logprobs,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            finish_reason=sample.finish_reason,
            text=text,
            policy_version=sample.policy_version,
            extends=prompt.extends,
            agent=agent or role,
            adapter=adapter,
        )
        reply = self._reply_of(text, tools=bool(tools) and tool_choice != "none", place=place)
        return Drawn(place, prompt, call, reply)

    def record(self, drawn: Drawn) -> Completion:
        """Keep what was drawn.

        Raises:
            EpisodeTimeoutError: the episode is over.
        """
        if self._closed:
            raise EpisodeTimeoutError(f"episode `{self.episode_id}` is over")
        call = drawn.call
        self._conversation.add(drawn.prompt, call.completion_ids, drawn.reply)
        self.calls.append(call)
        self.answers[drawn.place] = call
        return Completion(
            reply=drawn.reply,
            prompt_tokens=len(call.prompt_ids),
            token_ids=call.completion_ids,
            logprobs=call.logprobs,
            finish_reason=call.finish_reason,
            policy_version=call.policy_version,
        )

    def _sample_again(
        self, place: int, role: str, prompt_ids: list[int], on_token: Callable[[int], None] | None
    ) -> Sample | None:
        """What was sampled at this place of the episode that is repeated; None from where it is continued."""
        call = self.replayed(place)
        if call is None:
            return None
        if not isinstance(call, ModelCall) or call.role != role or call.prompt_ids != prompt_ids:
            raise self.diverged(place)
        if place == len(self._replay) - 1:
            return None
        for token in call.completion_ids if on_token is not None else ():
            on_token(token)  # type: ignore[misc]
        return Sample(call.completion_ids, call.logprobs, call.finish_reason, call.policy_version)

    def _text_of(self, token_ids: Sequence[int], stop: Sequence[str]) -> str:
        """The text of a completion: without its end-of-turn token, and cut before the first stop string."""
        ids = list(token_ids)
        if ids and ids[-1] in self.model.end_of_turn_ids:
            ids.pop()
        text = self.model.renderer.decode(ids)
        cuts = [text.index(mark) for mark in stop if mark in text]
        return text[: min(cuts)] if cuts else text

    def _reply_of(self, text: str, *, tools: bool, place: int | None = None) -> Reply:
        """What the text of a completion says; with `tools=False` tool calls stay text. See `parse_reply`."""
        thinks = self.model.renderer.opens_thinking
        return parse_reply(text, tools=tools, thinks=thinks, place=place, speaker=self._speaker)

    def reading(self, marks: Sequence[str]) -> Callable[[int], Reply]:
        """What a completion says while it is drawn: takes the next token, and gives what will stay.

        That is nothing from one of the marks on, nor what may be the beginning of one; tool calls are text.
        """
        text_after = self.model.renderer.decoding()
        text = ""

        def read(token: int) -> Reply:
            nonlocal text
            if token not in self.model.end_of_turn_ids:
                text = text_after(token)
            return self._reply_of(settled_text(text, marks), tools=False)

        return read

    def stop_strings(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """What ends the text of a call with these options."""
        stop = options.get("stop") or ()
        return self.model.params.stop + ((stop,) if isinstance(stop, str) else tuple(stop))

    def _params(self, options: Mapping[str, Any], place: int) -> SamplingParams:
        base = self.model.params
        # Each call has its own random numbers, from the run's seed and the call's place alone.
        params = replace(base, seed=zlib.crc32(f"{self._seed}/{place}".encode()) | self._seed << 32)
        if given := {key: value for key, value in options.items() if value is not None}:
            params = self._with_options(params, given)
        # Greedy evaluation is the run's decision, whatever temperature an agent asks for.
        return params.greedy() if base.temperature == 0 else params

    def _with_options(self, base: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
        unknown = sorted(given.keys() - _SAMPLING_KEYS)
        if unknown:
            raise ConfigError(
                f"a trained model does not honour `{unknown[0]}`; it takes {', '.join(sorted(_SAMPLING_KEYS))}"
            )
        limit = given.get("max_tokens", given.get("max_completion_tokens", base.max_tokens))
        params = replace(
            base,
            temperature=float(given.get("temperature", base.temperature)),
            top_p=float(given.get("top_p", base.top_p)),
            top_k=int(given.get("top_k", base.top_k)),
            max_tokens=min(int(limit), base.max_tokens),
            stop=self.stop_strings(given),
        )
        in_range = 0 <= params.temperature < math.inf and 0 < params.top_p <= 1
        if not in_range or params.top_k < 0 or params.max_tokens < 1:
            raise ConfigError(
                f"sampling options are out of range: {dict(given)}; needed are temperature >= 0, 0 < top_p <= 1, "
                "top_k >= 0 and max_tokens >= 1"
            )
        return params


def _kind(model: Any) -> tuple[type, Any]:
    return type(model), getattr(model, "model_name", None)


def _describe(model: Any) -> str:
    name = getattr(model, "model_name", None)
    return f"{type(model).__name__}({name})" if name else ("none" if model is None else type(model).__name__)


def check_targets(targets: Sequence[str] | None, registered: Collection[str]) -> None:
    """A target that no episode of a batch knows is a mistake, even where others are trained.

    Raises:
        RoleError: names it.
    """
    unknown = sorted(set(targets or ()) - set(registered))
    if unknown:
        raise RoleError(
            f"`trainable_targets` names `{unknown[0]}`, which no episode registered; registered: "
            f"{', '.join(f'`{role}`' for role in sorted(registered)) or 'none'}"
        )
