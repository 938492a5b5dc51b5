"""Trinity's inference engines as policies: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray
import tinker
from trinity.common.models.model import ModelWrapper
from trinity.manager.synchronizer import Synchronizer

from agentscope_tuner.chat import ChatRenderer
from agentscope_tuner.config import TunerModelConfig
from agentscope_tuner.engine.reading import load_reader
from agentscope_tuner.policy import Sample, SamplingParams, room_for_tokens
from agentscope_tuner.recorder import PolicyModel

_POLL_S = 0.05


class EnginePolicy:
    """What all have in common: Trinity's engines batch by themselves, so episodes need no announcement."""

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.version = 0

    def open_episode(self, episode_id: str) -> None:
        """Nothing to do."""

    def close_episode(self, episode_id: str) -> None:
        """Nothing to do."""

    def pause_episode(self, episode_id: str) -> None:
        """Nothing to do."""

    def resume_episode(self, episode_id: str) -> None:
        """Nothing to do."""

    async def sample(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        episode_id: str,
        adapter: str = "",
        on_token: Callable[[int], None] | None = None,
    ) -> Sample:
        """Complete `prompt_ids`; `on_token` sees all tokens once the last is drawn.

        Raises:
            PromptTooLongError: the prompt leaves no room in the context.
        """
        left = room_for_tokens(prompt_ids, self.max_model_len)
        sample = await self._complete(prompt_ids, replace(params, max_tokens=min(params.max_tokens, left)))
        for token in sample.token_ids if on_token is not None else ():
            on_token(token)  # type: ignore[misc]
        return sample

    async def _complete(self, prompt_ids: list[int], params: SamplingParams) -> Sample:
        raise NotImplementedError


class TinkerPolicy(EnginePolicy):
    """Samples from the Tinker service that holds the weights."""

    def __init__(self, max_model_len: int) -> None:
        super().__init__(max_model_len)
        self._service = tinker.ServiceClient()
        self._path = ""
        self._sampler: Any = None

    async def refresh(self, model: ModelWrapper, seen: int, patience_s: float) -> None:
        """Take the newest weights the trainer has given away; wait until they have seen `seen` updates.

        Trinity's explorer is asked for the base model only: after a resumed start it is one version behind.

        Raises:
            TimeoutError: the trainer gave none in time.
        """
        synchronizer = Synchronizer.get_actor(namespace=ray.get_runtime_context().namespace)
        async with asyncio.timeout(patience_s):
            while True:
                path, version = await synchronizer.get_model_state_dict.remote()
                if version >= seen:
                    break
                await asyncio.sleep(_POLL_S)
        await self.use(path or model.config.model_path, version)

    async def use(self, path: str, version: int) -> None:
        """Sample with these weights from now on: a checkpoint's path on the service, or the name of its base model."""
        self.version = version
        if path != self._path:
            saved = path.startswith("tinker://")
            self._sampler = await self._service.create_sampling_client(
                model_path=path if saved else None, base_model=None if saved else path
            )
            self._path = path

    def close(self) -> None:
        """End the session; the client would go on saying that it is there."""
        self._service.close("success").result()

    async def _complete(self, prompt_ids: list[int], params: SamplingParams) -> Sample:
        response = await self._sampler.sample(
            prompt=tinker.ModelInput.from_ints(prompt_ids),
            num_samples=1,
            sampling_params=tinker.SamplingParams(
                max_tokens=params.max_tokens,
                seed=params.seed,
                stop=list(params.stop) or None,
                temperature=params.temperature,
                top_k=params.top_k or -1,
                top_p=params.top_p,
            ),
        )
        sequence = response.sequences[0]
        return Sample(list(sequence.tokens), list(sequence.logprobs), sequence.stop_reason, self.version)


class VllmPolicy(EnginePolicy):
    """Samples through vLLM's completions interface, which takes and gives token ids."""

    def __init__(self, max_model_len: int) -> None:
        super().__init__(max_model_len)
        self._client: Any = None
        self._name = ""

    async def refresh(self, model: ModelWrapper, seen: int, patience_s: float) -> None:
        """Look which weights the engines have, and where their server is."""
        self.version = max(0, await model.model_version_async)
        if self._client is None:
            from openai import AsyncOpenAI  # takes a second, and with a Tinker service nobody needs it

            address = await model.model.get_api_server_url.remote()
            self._client = AsyncOpenAI(base_url=f"{address}/v1", api_key=model.api_key)
            self._name = model.model_path

    async def _complete(self, prompt_ids: list[int], params: SamplingParams) -> Sample:
        completion = await self._client.completions.create(
            model=self._name,
            prompt=prompt_ids,
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            stop=list(params.stop) or None,
            seed=params.seed % 2**63,
            logprobs=0,
            extra_body={
                "top_k": params.top_k or -1,
                "return_token_ids": True,
                "include_stop_str_in_output": True,
                "skip_special_tokens": False,
            },
        )
        choice: Any = completion.choices[0]
        reason = "length" if choice.finish_reason == "length" else "stop"
        return Sample(list(choice.token_ids), list(choice.logprobs.token_logprobs), reason, self.version)


def kind_of(model: ModelWrapper) -> type[EnginePolicy]:
    """The policy that samples from an engine of Trinity's."""
    return TinkerPolicy if model.config.engine_type == "tinker" else VllmPolicy


def policy_model(settings: TunerModelConfig, kind: type[EnginePolicy]) -> PolicyModel:
    """A model whose weights are elsewhere, with all that is needed to talk to it.

    Raises:
        ModelError: its tokenizer cannot be loaded.
    """
    tokenizer, end_of_turn, longest = load_reader(settings)
    renderer = ChatRenderer(tokenizer, enable_thinking=settings.enable_thinking)
    return PolicyModel(kind(longest), renderer, end_of_turn, settings.model_path, PolicyModel.params_of(settings))
