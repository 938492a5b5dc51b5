"""What a workflow receives in place of a chat model."""

from __future__ import annotations

from typing import Any

from agentscope_tuner.agentscope_face import RoleModel
from agentscope_tuner.endpoint import Endpoint, EndpointServer
from agentscope_tuner.errors import ConfigError, RoleError
from agentscope_tuner.recorder import Recorder
from agentscope_tuner.types import DEFAULT_ROLE


class ModelTuner(RoleModel):
    """A chat model (of role `default`), and the place where further roles are registered.

    ```python
    model_tuner.register_model("werewolf", default_model=DashScopeChatModel(...))
    agent = ReActAgent(model=model_tuner.get_model("werewolf"), ...)
    ```

    Which roles learn is said by the workflow's `trainable_targets`, or by `workflow.trainable_targets` in the
    configuration; the workflow itself does not change.
    """

    def __init__(self, recorder: Recorder, endpoints: EndpointServer | None = None) -> None:
        super().__init__(recorder, DEFAULT_ROLE)
        self._endpoints = endpoints

    def register_model(self, role: str, default_model: Any = None) -> None:
        """Make a role known, with the model that plays it while it is not trained.

        Registering a role again with an equal kind of default model is fine: nine players, five roles.

        Raises:
            RoleError: the role has no name, or is known with another kind of default model.
        """
        self._recorder.register(role, default_model)

    def get_model(self, role: str, name: str | None = None) -> RoleModel:
        """The chat model of one player of a role.

        Args:
            role: as registered.
            name: the player's, for records and metrics; by default players are numbered.

        Raises:
            RoleError: the role is not registered, or is untrained and has no default model.
        """
        self._recorder.require(role)
        if not self._recorder.is_trained(role):
            self._recorder.default_model(role)
        return RoleModel(self._recorder, role, name or self._recorder.name_agent(role))

    def reward(self, role: str, value: float, name: str | None = None) -> None:
        """Let the last turn of a role (or of one of its players) earn something by itself.

        It counts for that turn and, discounted by `algorithm.turn_discount`, for the earlier ones, beside the reward
        that the workflow returns in the end. Without effect while the role is not trained.

        Raises:
            RoleError: the role is not registered.
            RewardError: the value is not finite, or there was no turn yet.
        """
        self._recorder.reward(role, value, name)

    def endpoint(self, role: str = DEFAULT_ROLE, *, name: str = "") -> Endpoint:
        """An OpenAI-compatible server of a trained role, for agents of any framework, in threads and other processes.

        ```python
        endpoint = model_tuner.endpoint()
        client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        await client.chat.completions.create(model=endpoint.model, messages=...)
        ```

        Every call with this key belongs to this role and episode, is recorded token for token, and trained on. The key
        expires when the episode ends.

        Args:
            role: who speaks.
            name: what the server calls its model, for frameworks that look at that; the trained model's own when empty.

        Raises:
            RoleError: the role is not registered, or not trained; only trained roles are played by the policy.
            ConfigError: there is no rollout around this tuner, or no event loop here, as in a thread.
        """
        self._recorder.require(role)
        if not self._recorder.is_trained(role):
            raise RoleError(
                f"role `{role}` is not trained, so it has no endpoint; name it in `trainable_targets`, or let its "
                "agent call a service of its own"
            )
        if self._endpoints is None:
            raise ConfigError(
                "this `ModelTuner` has no endpoints: it was made by hand; let a `Rollout` run the workflow"
            )
        return self._endpoints.open(self._recorder, role, name)
