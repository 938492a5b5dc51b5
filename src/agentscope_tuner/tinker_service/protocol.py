"""Tinker's wire format: JSON, and protocol buffers where there are many numbers.

Only fields that the service reads are declared; newer clients may send more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tinker.proto import tinker_public_pb2 as wire

from agentscope_tuner.engine.scoring import Row
from agentscope_tuner.policy import Sample
from agentscope_tuner.tinker_service.losses import LOSSES
from agentscope_tuner.tinker_service.naming import UserError

T = TypeVar("T", bound=BaseModel)

_DTYPES = {wire.DTYPE_FLOAT32: np.float32, wire.DTYPE_INT64: np.int64, wire.DTYPE_INT32: np.int32}
_NO_TOKEN, _NO_LOGPROB = 0, -99999.0
"""What fills the first row of top-k tables: nothing comes before the first token."""


# --------------------------------------------------------------------------------------------------- requests


class _Request(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class Chunk(_Request):
    """A part of a prompt."""

    type: str = "encoded_text"
    tokens: list[int] = Field(default_factory=list)


class Prompt(_Request):
    """Token ids, in parts."""

    chunks: list[Chunk]

    @property
    def ids(self) -> list[int]:
        """All of them.

        Raises:
            UserError: a part holds something else.
        """
        for chunk in self.chunks:
            if chunk.type != "encoded_text":
                raise UserError(f"a prompt holds a chunk of type `{chunk.type}`; this service reads token ids only")
        return [token for chunk in self.chunks for token in chunk.tokens]


class Sampling(_Request):
    """How to draw completions."""

    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(default=1.0, ge=0.0)
    top_k: int = -1
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)


class SampleRequest(_Request):
    """`asample`."""

    sampling_session_id: str
    prompt: Prompt
    sampling_params: Sampling
    num_samples: int = Field(default=1, ge=1)
    seq_id: int = 0
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = Field(default=0, ge=0)


class OfSession(_Request):
    """Requests that name nothing but a session."""

    session_id: str


class Lora(_Request):
    """The form of an adapter."""

    rank: int = Field(ge=1)
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True


class NewModel(_Request):
    """Who is to be trained; clients know the id without asking."""

    session_id: str
    model_seq_id: int

    @property
    def model_id(self) -> str:
        """Of the new model."""
        return f"{self.session_id}:train:{self.model_seq_id}"


class CreateModel(NewModel):
    """`create_model`."""

    base_model: str
    lora_config: Lora | None = None


class OfModel(_Request):
    """Requests that name nothing but a model."""

    model_id: str


class AdamParams(_Request):
    """One step of AdamW."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(_Request):
    """`optim_step`."""

    model_id: str
    adam_params: AdamParams


class SaveWeights(_Request):
    """`save_weights`, `save_weights_for_sampler` and `save_weights_external`."""

    model_id: str
    path: str | None = None
    sampling_session_seq_id: int | None = None


class LoadWeights(NewModel):
    """`load_weights`."""

    path: str
    optimizer: bool = False


class CreateSampler(_Request):
    """`create_sampling_session`."""

    base_model: str | None = None
    model_path: str | None = None


class RetrieveFuture(_Request):
    """`retrieve_future`."""

    request_id: str


def parse(kind: type[T], body: bytes) -> T:
    """Read a JSON request.

    Raises:
        UserError: it is malformed.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as exc:
        problem = exc.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "the body"
        raise UserError(f"`{where}`: {problem['msg']}") from exc


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """`forward_backward`."""

    model_id: str
    rows: list[Row]
    loss: str
    settings: dict[str, float]
    inputs: dict[str, np.ndarray[Any, Any]]
    """What the loss reads, for the tokens of all rows one after the other."""
    forward_only: bool


def parse_forward_backward(body: bytes) -> ForwardBackward:
    """Read a protocol buffer.

    Raises:
        UserError: it is malformed, or asks for a loss that this service does not know.
    """
    request = wire.ForwardBackwardRequest()
    try:
        request.ParseFromString(body)
    except DecodeError as exc:
        raise UserError(f"the body is not a `ForwardBackwardRequest`: {exc}") from exc
    loss = LOSSES.get(request.loss_fn)
    if loss is None:
        raise UserError(f"there is no loss `{request.loss_fn}` here; there are {', '.join(LOSSES)}")
    given = dict(request.loss_fn_config)
    given |= {name: value.number for name, value in request.loss_fn_config_v2.items() if value.HasField("number")}
    unknown = sorted({*given, *request.loss_fn_config_v2} - set(loss.defaults))
    if unknown:
        known = ", ".join(loss.defaults) or "none"
        raise UserError(f"loss `{request.loss_fn}` has no setting `{unknown[0]}`; it has {known}")
    if not request.data:
        raise UserError("there is no data")
    rows: list[Row] = []
    inputs: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in loss.inputs}
    for number, datum in enumerate(request.data):
        if any(chunk.WhichOneof("chunk") != "encoded_text" for chunk in datum.model_input):
            raise UserError(f"datum {number} holds more than token ids")
        ids = [
            token
            for chunk in datum.model_input
            for token in np.frombuffer(chunk.encoded_text.tokens, np.int32).tolist()
        ]
        columns = {name: _tensor(tensor) for name, tensor in datum.loss_fn_inputs.items()}
        for name in ("target_tokens", *loss.inputs):
            if name not in columns:
                raise UserError(f"datum {number} has no `{name}`, which loss `{request.loss_fn}` reads")
            if columns[name].shape != (len(ids),):
                raise UserError(
                    f"`{name}` of datum {number} must have one value per token, ({len(ids)},), got "
                    f"{columns[name].shape}"
                )
        rows.append(Row(ids, columns["target_tokens"].astype(np.int64).tolist()))
        for name in loss.inputs:
            inputs[name].append(columns[name].astype(np.float32))
    return ForwardBackward(
        request.model_id,
        rows,
        request.loss_fn,
        {**loss.defaults, **given},
        {name: np.concatenate(parts) for name, parts in inputs.items()},
        request.forward_only,
    )


def _tensor(message: Any) -> np.ndarray[Any, Any]:
    if message.dtype not in _DTYPES or message.WhichOneof("encoding") != "dense":
        raise UserError("tensors must be dense, of float32 or int64")
    values = np.frombuffer(message.dense, _DTYPES[message.dtype])
    return values.reshape(tuple(message.shape)) if message.shape else values


# ---------------------------------------------------------------------------------------------------- answers


def forward_backward_output(logprobs: Sequence[np.ndarray[Any, Any]], metrics: Mapping[str, float]) -> bytes:
    """Log-probabilities of each row's targets, and metrics, whose names say how those of several answers are joined."""
    output = wire.ForwardBackwardOutput(loss_fn_output_type="TokenLogprobs", metrics=dict(metrics))
    record = output.loss_fn_outputs.add()
    record.type_tag = "TokenLogprobs"
    record.num_datums = len(logprobs)
    field = record.fields["logprobs"]
    field.data = b"".join(row.astype(np.float32).tobytes() for row in logprobs)
    field.offsets = np.cumsum([0, *(4 * len(row) for row in logprobs)], dtype=np.int64).tobytes()
    field.dtype = wire.DTYPE_FLOAT32
    return bytes(output.SerializeToString())


def sample_response(
    samples: Sequence[Sample],
    prompt_logprobs: np.ndarray[Any, Any] | None,
    top: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None,
) -> bytes:
    """Completions, and what was asked for about their prompt.

    Args:
        samples: the completions.
        prompt_logprobs: (N,) of a prompt of N tokens, the first NaN.
        top: token ids and log-probabilities (N - 1, k) of what was likeliest after each token but the last.
    """
    response = wire.SampleResponse()
    for sample in samples:
        sequence = response.sequences.add()
        sequence.stop_reason = wire.STOP_REASON_STOP if sample.finish_reason == "stop" else wire.STOP_REASON_LENGTH
        sequence.tokens = np.asarray(sample.token_ids, np.int32).tobytes()
        sequence.logprobs = np.asarray(sample.logprobs, np.float32).tobytes()
    if prompt_logprobs is not None:
        response.prompt_logprobs = prompt_logprobs.astype(np.float32).tobytes()
    if top is not None:
        ids, values = top
        k = ids.shape[1]
        table = response.topk_prompt_logprobs
        table.token_ids = np.concatenate([np.full((1, k), _NO_TOKEN), ids]).astype(np.int32).tobytes()
        table.logprobs = np.concatenate([np.full((1, k), _NO_LOGPROB), values]).astype(np.float32).tobytes()
        table.k, table.length = k, len(ids) + 1
    return bytes(response.SerializeToString())


def failure(message: str, *, by_user: bool) -> Mapping[str, Any]:
    """What a future that failed answers."""
    return {"error": message, "category": "user" if by_user else "server"}
