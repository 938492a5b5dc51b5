"""What the service holds: models in training, models to sample from, and checkpoints between them.

Training runs on a worker thread, one operation at a time, in the order in which requests came. Sampling runs on the
event loop, batched over everybody who asks; what is asked about prompts, on a thread beside it.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, get_args

import numpy as np
import torch

from agentscope_tuner.config import EngineConfig, LoraConfig, TunerModelConfig
from agentscope_tuner.engine.checkpoint import (
    TrainerState,
    load_weights,
    read_state,
    restore,
    verify_checkpoint,
    write_checkpoint,
)
from agentscope_tuner.engine.models import LoadedModel, load_model
from agentscope_tuner.engine.optimizer import Optimizer
from agentscope_tuner.engine.reading import model_directory
from agentscope_tuner.engine.sampler import Sampler
from agentscope_tuner.engine.scoring import Row, Scorer
from agentscope_tuner.errors import CheckpointError
from agentscope_tuner.policy import Sample, SamplingParams
from agentscope_tuner.tinker_service.losses import LOSSES
from agentscope_tuner.tinker_service.naming import UserError, checkpoint_folder, checkpoint_path, is_name
from agentscope_tuner.tinker_service.protocol import AdamParams, ForwardBackward, Lora, SampleRequest

P = ParamSpec("P")
T = TypeVar("T")

CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]
"""To train on, to sample from, and to take away."""
_32_BITS = 0xFFFFFFFF
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_MLP = ["gate_proj", "up_proj", "down_proj"]


@dataclass(slots=True)
class _Training:
    """A model that learns."""

    loaded: LoadedModel
    scorer: Scorer
    optimizer: Optimizer | None = None
    """Made at the first step: its settings come with the request."""


@dataclass(slots=True)
class _Sampling:
    """A model that is sampled; its weights are exchanged when others are asked for and nobody uses it."""

    loaded: LoadedModel
    sampler: Sampler
    scorer: Scorer
    weights: str | None = None
    """A checkpoint's path; None: the base model's."""
    users: int = 0
    version: int = 0
    free: asyncio.Event = field(default_factory=asyncio.Event)
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by whoever is told about a prompt."""


class Service:
    """One base model, its descendants, and the folder their checkpoints are in."""

    def __init__(
        self, model: TunerModelConfig, engine: EngineConfig, folder: Path, *, full_weights: bool, samplers: int = 2
    ) -> None:
        """Find the model.

        Args:
            model: the base model, and the form of adapters where a client does not say.
            engine: how it computes.
            folder: where checkpoints go.
            full_weights: train all weights, whatever adapter a client asks for.
            samplers: models held for sampling at the same time.

        Raises:
            ModelError: there is no such model.
        """
        self.model = model
        self.engine = engine
        self.folder = folder
        self.full_weights = full_weights
        self.directory = _client_name(model_directory(model.model_path))
        self._names = {model.model_path, self.directory, self.directory.rstrip("./")}
        self._limit = samplers
        self._training: dict[str, _Training] = {}
        self._turn = asyncio.Lock()
        """Held by the operation that trains."""
        self._samplings: list[_Sampling] = []
        self._exchange = asyncio.Lock()

    # ---------------------------------------------------------------------------------------------- training

    def check_base(self, name: str) -> None:
        """Whether a client asks for the model that is served.

        Raises:
            UserError: it asks for another.
        """
        if name not in self._names:
            raise UserError(f"this service has model `{self.directory}`, not `{name}`")

    async def create(self, model_id: str, lora: Lora | None) -> None:
        """Begin to train a copy of the base model.

        Raises:
            UserError: the adapter's form is not possible.
        """
        await self._train(self._create, model_id, lora)

    async def load(self, model_id: str, path: str, *, optimizer: bool) -> None:
        """Go on from a checkpoint.

        Raises:
            UserError: there is no such checkpoint, or it does not fit.
        """
        await self._train(self._load, model_id, path, optimizer)

    async def forward_backward(self, request: ForwardBackward) -> tuple[list[np.ndarray[Any, Any]], dict[str, float]]:
        """Log-probabilities of every row's targets, and metrics; the gradient of the loss is added to the model's.

        Metrics are the loss, summed, and how many tokens were run where prefixes are shared.

        Raises:
            UserError: a row is too long, or holds a token that does not exist.
        """
        return await self._train(self._forward_backward, request)

    async def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        """Update the weights from the gradients gathered."""
        return await self._train(self._optim_step, model_id, params)

    async def save(self, model_id: str, name: str | None, kind: CheckpointKind) -> str:
        """Write a checkpoint, with the optimizer's state if it is to train on; returns its path.

        Raises:
            UserError: the name cannot be a file's.
            CheckpointError: it cannot be written.
        """
        return await self._train(self._save, model_id, name, kind)

    async def _train(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        async with self._turn:
            return await asyncio.to_thread(work, *args, **options)

    def training(self, model_id: str) -> _Training:
        """A model that learns.

        Raises:
            UserError: there is none of this id.
        """
        if model_id not in self._training:
            raise UserError(f"there is no model `{model_id}` in training here; it may have ended with the service")
        return self._training[model_id]

    def forget(self, session_id: str) -> None:
        """Let go of the models that a session trained; its checkpoints stay."""
        for model_id in [one for one in self._training if one.startswith(f"{session_id}:")]:
            del self._training[model_id]

    def _create(self, model_id: str, lora: Lora | None) -> None:
        if lora is not None and lora.seed is not None:
            torch.manual_seed(lora.seed)
        self._training[model_id] = self._copy(self._form(lora))

    def _form(self, lora: Lora | None) -> LoraConfig | None:
        if self.full_weights:
            return None
        if lora is None:
            return self.model.lora or LoraConfig()
        targets = _ATTENTION * lora.train_attn + _MLP * lora.train_mlp
        if not targets:
            raise UserError("`train_attn` and `train_mlp` are both off, so there is nothing to train")
        # As the service this protocol comes from: the update is scaled by 32 / rank.
        return LoraConfig(rank=lora.rank, alpha=32.0, target_modules=targets)

    def _copy(self, form: LoraConfig | None) -> _Training:
        loaded = load_model(self.model.model_copy(update={"lora": form}), self.engine)
        return _Training(loaded, Scorer(loaded, self.engine))

    def _load(self, model_id: str, path: str, optimizer: bool) -> None:
        source = self.checkpoint(path)
        try:
            verify_checkpoint(source)
            state = read_state(source)
            training = self._copy(None if state.lora is None else LoraConfig(**state.lora))
            kept = self._optimizer(training, AdamParams())
            restore(source, training.loaded, kept)
            if not optimizer:
                kept.forget()
        except CheckpointError as exc:
            raise UserError(str(exc)) from exc
        self._training[model_id] = training

    def _forward_backward(self, request: ForwardBackward) -> tuple[list[np.ndarray[Any, Any]], dict[str, float]]:
        training = self.training(request.model_id)
        check_rows(request.rows, training.loaded)
        device = training.loaded.device
        given = {name: torch.from_numpy(values).to(device) for name, values in request.inputs.items()}
        compute = LOSSES[request.loss].compute

        def loss(logprobs: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
            return compute(logprobs, {name: column[entries] for name, column in given.items()}, request.settings).sum()

        if request.forward_only:
            found = training.scorer.logprobs(request.rows)
            metrics = {"loss:sum": loss(found.to(device), torch.arange(len(found), device=device)).item()}
        else:
            found, total, packed = training.scorer.backward(request.rows, loss)
            metrics = {"loss:sum": total, "packed_tokens:sum": packed}
        return [part.numpy() for part in found.split([len(row.ids) for row in request.rows])], metrics

    def _optimizer(self, training: _Training, params: AdamParams) -> Optimizer:
        if training.optimizer is None:
            training.optimizer = Optimizer(
                training.loaded,
                betas=(params.beta1, params.beta2),
                weight_decay=0.0,
                keep_memory=self.engine.step_memory_gb is None,
            )
        for group in training.optimizer.adamw.param_groups:
            group.update(betas=(params.beta1, params.beta2), eps=params.eps, weight_decay=params.weight_decay)
        return training.optimizer

    def _optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        optimizer = self._optimizer(self.training(model_id), params)
        limit = params.grad_clip_norm if params.grad_clip_norm > 0 else torch.inf
        return {"grad_norm": optimizer.step(params.learning_rate, limit)}

    def _save(self, model_id: str, name: str | None, kind: CheckpointKind) -> str:
        training = self.training(model_id)
        name = name or secrets.token_hex(4)
        if not is_name(name):
            raise UserError(f"a checkpoint cannot be called `{name}`; use letters, digits, `.`, `-` and `_`")
        path = checkpoint_path(model_id, kind, name)
        optimizer = self._optimizer(training, AdamParams()) if kind == "weights" else None
        updates = training.optimizer.updates if training.optimizer is not None else 0
        lora = training.loaded.lora
        state = TrainerState(updates, updates, 0, lora=None if lora is None else lora.model_dump())
        write_checkpoint(checkpoint_folder(self.folder, path), training.loaded, optimizer, state)
        return path

    # ------------------------------------------------------------------------------------------- checkpoints

    def checkpoint(self, path: str) -> Path:
        """The folder of a checkpoint.

        Raises:
            UserError: there is none of this path.
        """
        folder = checkpoint_folder(self.folder, path)
        if not folder.is_dir():
            raise UserError(f"there is no checkpoint `{path}` in `{self.folder}`")
        return folder

    async def delete(self, model_id: str, name: str) -> None:
        """Remove a checkpoint; who samples from it at this moment goes on, since its weights are in memory.

        Raises:
            UserError: there is none of this name.
        """
        kind, _, bare = name.rpartition("/")
        kinds = [kind] if kind else get_args(CheckpointKind)  # a bare name is of any kind
        paths = (checkpoint_path(model_id, kind, bare) for kind in kinds)
        found = [folder for path in paths if (folder := checkpoint_folder(self.folder, path)).is_dir()]
        if not found:
            raise UserError(f"there is no checkpoint `{name}` of model `{model_id}`")
        await asyncio.to_thread(shutil.rmtree, found[0])

    # ---------------------------------------------------------------------------------------------- sampling

    async def sample(
        self, request: SampleRequest, weights: str | None
    ) -> tuple[list[Sample], np.ndarray[Any, Any] | None, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None]:
        """Completions, and what was asked for about the prompt (see `protocol.sample_response`).

        Raises:
            UserError: the prompt is empty, too long, or holds a token that does not exist; an option is not honoured.
        """
        ids = request.prompt.ids
        async with self._sampling(weights) as sampling:
            check_rows([Row(ids, ids)], sampling.loaded)
            params = self._params(request, sampling.loaded, len(ids))
            about = None
            if request.prompt_logprobs or request.topk_prompt_logprobs:
                # It may take seconds, in which others sample.
                async with sampling.reading:
                    about = await asyncio.to_thread(_about_prompt, sampling.scorer, ids, request.topk_prompt_logprobs)
            samples = await self._complete(sampling.sampler, ids, params, request)
        if about is None:
            return samples, None, None
        logprobs, ids_of, values = about
        top = (ids_of, values) if request.topk_prompt_logprobs else None
        return samples, logprobs if request.prompt_logprobs else None, top

    async def _complete(
        self, sampler: Sampler, ids: list[int], params: SamplingParams, request: SampleRequest
    ) -> list[Sample]:
        sampling = request.sampling_params
        seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        name = secrets.token_hex(8)
        sampler.open_episode(name)
        try:
            # A client sends one seed with all its requests; equal prompts are to get different answers all the same.
            streams = [
                zlib.crc32(f"{seed}/{request.sampling_session_id}/{request.seq_id}/{number}".encode())
                | (seed & _32_BITS) << 32
                for number in range(request.num_samples)
            ]
            return list(
                await asyncio.gather(
                    *[sampler.sample(ids, replace(params, seed=stream), episode_id=name) for stream in streams]
                )
            )
        finally:
            sampler.close_episode(name)

    def _params(self, request: SampleRequest, loaded: LoadedModel, prompt: int) -> SamplingParams:
        given = request.sampling_params
        room = loaded.max_model_len - prompt
        if room < 1:
            raise UserError(f"the prompt has {prompt} tokens, and the context {loaded.max_model_len}; none is left")
        stop = [given.stop] if isinstance(given.stop, str) else given.stop or []
        return SamplingParams(
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=max(0, given.top_k),
            max_tokens=min(given.max_tokens or room, room),
            stop=tuple(one for one in stop if isinstance(one, str)),
            stop_ids=frozenset(one for one in stop if isinstance(one, int)),
        )

    @asynccontextmanager
    async def _sampling(self, weights: str | None) -> AsyncIterator[_Sampling]:
        async with self._exchange:
            sampling = next((one for one in self._samplings if one.weights == weights), None)
            if sampling is None:
                sampling = await self._exchanged(weights)
            # The one used last goes last: the first is the next to be given other weights.
            self._samplings.remove(sampling)
            self._samplings.append(sampling)
            sampling.users += 1
            sampling.free.clear()
        try:
            yield sampling
        finally:
            sampling.users -= 1
            if not sampling.users:
                sampling.free.set()

    async def _exchanged(self, weights: str | None) -> _Sampling:
        """A model with these weights: a new one, or one that nobody uses any more."""
        source = None if weights is None else self.checkpoint(weights)
        if len(self._samplings) < self._limit:
            loaded = await asyncio.to_thread(load_model, self.model.model_copy(update={"lora": None}), self.engine)
            sampling = _Sampling(loaded, Sampler(loaded, self.engine), Scorer(loaded, self.engine))
            self._samplings.append(sampling)
        else:
            sampling = next((one for one in self._samplings if not one.users), self._samplings[0])
            if sampling.users:
                await sampling.free.wait()
            source = Path(self.directory) if source is None else source
        if source is not None:
            await asyncio.to_thread(load_weights, source, sampling.loaded)
        sampling.version += 1
        sampling.sampler.weights_changed(sampling.version)
        sampling.weights = weights
        return sampling


def _client_name(directory: str) -> str:
    """A model's directory as clients can send it: they take a path with exactly two slashes for another thing."""
    return f"{directory}/." if directory.count("/") == 2 else directory


def check_rows(rows: Sequence[Row], loaded: LoadedModel) -> None:
    """Whether a model can read these.

    Raises:
        UserError: a row is empty, too long, or holds a token that does not exist.
    """
    vocabulary = loaded.vocabulary
    for number, row in enumerate(rows):
        if not 1 <= len(row.ids) <= loaded.max_model_len:
            raise UserError(f"row {number} has {len(row.ids)} tokens; there must be 1 to {loaded.max_model_len}")
        unknown = [token for token in (*row.ids, *row.targets) if not 0 <= token < vocabulary]
        if unknown:
            raise UserError(f"row {number} holds token {unknown[0]}, and the vocabulary has {vocabulary}")


def _about_prompt(
    scorer: Scorer, ids: list[int], k: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Log-probabilities (N,) of a prompt's tokens, and the k likeliest (N - 1, k) after each but the last."""
    found, top_ids, top_values = [], [], []
    start = 0
    for block in scorer.next_token_logprobs(ids):
        following = torch.tensor(ids[start + 1 : start + 1 + len(block)], device=block.device)
        block = block[: len(following)]
        found.append(block.gather(1, following[:, None])[:, 0].cpu())
        best = block.topk(k) if k else None
        if best is not None:
            top_ids.append(best.indices.cpu())
            top_values.append(best.values.cpu())
        start += len(following)
    logprobs = np.concatenate([[np.nan], torch.cat(found).numpy()])
    empty = torch.empty(0, k)
    return logprobs, torch.cat(top_ids or [empty]).numpy(), torch.cat(top_values or [empty]).numpy()
