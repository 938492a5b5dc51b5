"""One episode's calls to its models: who may speak, what was said, token for token.

Nothing here knows AgentScope; each framework gets a thin face over this.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from agentscope_tuner.chat import ChatRenderer, Conversation, Reply, parse_reply
from agentscope_tuner.config import TunerModelConfig
from agentscope_tuner.errors import ConfigError, EpisodeTimeoutError, RoleError
from agentscope_tuner.policy import Policy, SamplingParams
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
    def params_of(config: TunerModelConfig, *, greedy: bool = False) -> SamplingParams:
        """Sampling parameters of a model's configuration."""
        return SamplingParams(
            temperature=0.0 if greedy else config.temperature,
            top_p=1.0 if greedy else config.top_p,
            top_k=0 if greedy else config.top_k,
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
        helps: Recorder | None = None,
    ) -> None:
        """`helps` is the recorder of the episode that an auxiliary model serves."""
        self.model = model
        self.episode_id = episode_id
        self.calls: list[ModelCall] = []
        self.roles: dict[str, Any] = {}
        """Registered roles and their default models."""
        self._seed = seed
        self._targets = None if trainable_targets is None else frozenset(trainable_targets)
        self._conversation = Conversation(model.renderer, model.end_of_turn_ids)
        self._sent = 0
        self._closed = False
        self._helps = helps

    def close(self) -> None:
        """The episode is over; a workflow that was abandoned can record nothing more."""
        self._closed = True

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

    # ----------------------------------------------------------------------------------------------- calls

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Around a call to another model: the policy need not wait for this episode meanwhile."""
        self.model.policy.pause_episode(self.episode_id)
        try:
            yield
        finally:
            self.model.policy.resume_episode(self.episode_id)

    async def complete(
        self,
        role: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | None = None,
        options: Mapping[str, Any] | None = None,
        on_token: Callable[[int], None] | None = None,
    ) -> Completion:
        """Let the policy speak for a trained role, and record it.

        Args:
            role: who speaks.
            messages: in OpenAI's or DashScope's form.
            tools: JSON schemas the model may call.
            tool_choice: with `none`, tool calls stay text. `required` and names are requests that a policy learns to
                fulfil; they are not forced upon it, since forced tokens are not sampled ones.
            options: `temperature`, `top_p`, `top_k`, `max_tokens`, `stop` of this call.
            on_token: sees each token as it is drawn.

        Raises:
            ConfigError: an option that cannot be honoured.
            EpisodeFailure: the prompt is too long or holds more than text, or the episode is over.
        """
        if self._closed:
            raise EpisodeTimeoutError(f"episode `{self.episode_id}` is over")
        params = self._params(options or {})
        prompt = self._conversation.render(messages, tools)
        with self._helps.elsewhere() if self._helps is not None else nullcontext():
            sample = await self.model.policy.sample(prompt.ids, params, episode_id=self.episode_id, on_token=on_token)
        text = self.text_of(sample.token_ids, params.stop)
        if self._closed:
            raise EpisodeTimeoutError(f"episode `{self.episode_id}` is over")
        reply = parse_reply(text, tools=bool(tools) and tool_choice != "none")
        self._conversation.add(prompt, sample.token_ids, reply)
        self.calls.append(
            ModelCall(
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
            )
        )
        return Completion(
            reply, len(prompt.ids), sample.token_ids, sample.logprobs, sample.finish_reason, sample.policy_version
        )

    def text_of(self, token_ids: Sequence[int], stop: Sequence[str] = ()) -> str:
        """The text of a completion: without its end-of-turn token, and cut before the first stop string."""
        ids = list(token_ids)
        if ids and ids[-1] in self.model.end_of_turn_ids:
            ids.pop()
        text = self.model.renderer.decode(ids)
        cuts = [text.index(mark) for mark in stop if mark in text]
        return text[: min(cuts)] if cuts else text

    def stop_strings(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """What ends the text of a call with these options."""
        stop = options.get("stop") or ()
        return self.model.params.stop + ((stop,) if isinstance(stop, str) else tuple(stop))

    def _params(self, options: Mapping[str, Any]) -> SamplingParams:
        given = {key: value for key, value in options.items() if value is not None}
        unknown = sorted(set(given) - _SAMPLING_KEYS)
        if unknown:
            raise ConfigError(
                f"a trained model does not honour `{unknown[0]}`; it takes {', '.join(sorted(_SAMPLING_KEYS))}"
            )
        base = self.model.params
        limit = given.get("max_tokens", given.get("max_completion_tokens", base.max_tokens))
        # Each call has its own random numbers, from the run's seed and the call's place alone.
        seed = zlib.crc32(f"{self._seed}/{self._sent}".encode()) | self._seed << 32
        self._sent += 1
        params = SamplingParams(
            temperature=float(given.get("temperature", base.temperature)),
            top_p=float(given.get("top_p", base.top_p)),
            top_k=int(given.get("top_k", base.top_k)),
            max_tokens=min(int(limit), base.max_tokens),
            stop=self.stop_strings(given),
            seed=seed,
        )
        in_range = 0 <= params.temperature < math.inf and 0 < params.top_p <= 1
        if not in_range or params.top_k < 0 or params.max_tokens < 1:
            raise ConfigError(
                f"sampling options are out of range: {dict(given)}; needed are temperature >= 0, 0 < top_p <= 1, "
                "top_k >= 0 and max_tokens >= 1"
            )
        # Greedy evaluation is the run's decision, whatever temperature an agent asks for.
        if base.temperature == 0:
            params = SamplingParams(0.0, 1.0, 0, params.max_tokens, params.stop, params.seed)
        return params


def _kind(model: Any) -> tuple[type, Any]:
    return type(model), getattr(model, "model_name", None)


def _describe(model: Any) -> str:
    name = getattr(model, "model_name", None)
    return f"{type(model).__name__}({name})" if name else ("none" if model is None else type(model).__name__)
