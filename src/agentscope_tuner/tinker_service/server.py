"""The HTTP face of the service: `/api/v1`, a key with every request, futures for everything that takes time."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from agentscope_tuner.errors import CheckpointError, EpisodeFailure
from agentscope_tuner.tinker_service.naming import UserError, checkpoint_path
from agentscope_tuner.tinker_service.protocol import (
    CreateModel,
    CreateSampler,
    LoadWeights,
    OfModel,
    OfSession,
    OptimStep,
    RetrieveFuture,
    SampleRequest,
    SaveWeights,
    failure,
    forward_backward_output,
    parse,
    parse_forward_backward,
    sample_response,
)
from agentscope_tuner.tinker_service.service import CheckpointKind, Service

_logger = logging.getLogger(__name__)

_CLOSING_S = 2
"""How long clients may take to read the end of their last answers."""
_PATIENCE_S = 20.0
"""A client that asks for a result that is not there yet is answered after this long, and asks again."""
_KEPT_RESULTS = 4096
"""Results that were fetched stay for a while: an answer may get lost on its way."""
_SILENCE_S = 900.0
"""Clients say every few seconds that they are there; one that does not any more has ended without saying so."""
_SIGNED_FOR = timedelta(hours=1)
_PROTO = "application/x-protobuf"

_Answer = bytes | Mapping[str, Any]
_Handler = Callable[[Request], Awaitable[_Answer]]


class TinkerServer:
    """Serves one `Service`."""

    def __init__(self, service: Service, key: str) -> None:
        self._service = service
        self._key = key
        self._futures: OrderedDict[str, asyncio.Task[_Answer]] = OrderedDict()
        self._samplers: dict[str, str | None] = {}
        """Sampling sessions, and the checkpoints they sample from."""
        self._heard: dict[str, float] = {}
        """Sessions, and when their clients were last heard of."""
        self._grants: dict[str, tuple[Path, datetime]] = {}
        """Checkpoints whose files may be fetched without the key, and until when."""

    async def serve(self, listener: socket.socket) -> None:
        """Answer requests until cancelled or interrupted."""
        config = uvicorn.Config(
            self.app(),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=_CLOSING_S,
        )
        server = uvicorn.Server(config)
        try:
            await server.serve(sockets=[listener])
        except asyncio.CancelledError:
            if server.started:
                await server.shutdown(sockets=[listener])
            raise
        finally:
            listener.close()
            for future in self._futures.values():
                future.cancel()

    def app(self) -> Starlette:
        """The routes."""
        posts: dict[str, _Handler] = {
            "client/config": self._client_config,
            "client/dynamic_config": self._nothing,
            "telemetry": self._telemetry,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session_id}/finish": self._finish_session,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "weights_info": self._weights_info,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "save_weights_external": self._save_external,
            "load_weights": self._load_weights,
            "retrieve_future": self._retrieve_future,
        }
        gets: dict[str, _Handler] = {
            "healthz": self._health,
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler_id}": self._get_sampler,
        }
        routes = [Route(f"/api/v1/{path}", self._guarded(handler), methods=["POST"]) for path, handler in posts.items()]
        routes += [Route(f"/api/v1/{path}", self._guarded(handler), methods=["GET"]) for path, handler in gets.items()]
        checkpoints = "/api/v1/training_runs/{model_id}/checkpoints"
        routes += [
            Route(f"{checkpoints}/external_weights/{{name}}/external_weights_urls", self._guarded(self._sign)),
            Route(f"{checkpoints}/{{name:path}}", self._guarded(self._delete_checkpoint), methods=["DELETE"]),
            Route("/downloads/{grant}/{file:path}", self._download),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _no_route})

    def _guarded(self, handler: _Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            if not hmac.compare_digest(request.headers.get("x-api-key", "").encode(), self._key.encode()):
                return _json({"detail": "the API key is missing or wrong; set TINKER_API_KEY to the service's"}, 401)
            try:
                found = await handler(request)
            except UserError as exc:
                return _json({"detail": str(exc)}, 422)
            return Response(found, media_type=_PROTO) if isinstance(found, bytes) else _json(found)

        return answer

    # ------------------------------------------------------------------------------------------------ futures

    def _promise(self, work: Awaitable[_Answer], **known: Any) -> dict[str, Any]:
        """Begin a piece of work; the answer names the future that will hold its result."""
        request_id = secrets.token_hex(8)
        self._futures[request_id] = asyncio.create_task(_settled(work))
        while len(self._futures) > _KEPT_RESULTS and next(iter(self._futures.values())).done():
            self._futures.popitem(last=False)
        return {"request_id": request_id, **known}

    async def _retrieve_future(self, request: Request) -> _Answer:
        request_id = parse(RetrieveFuture, await request.body()).request_id
        task = self._futures.get(request_id)
        if task is None:
            raise UserError(f"there is no request `{request_id}`")
        await asyncio.wait({task}, timeout=_PATIENCE_S)
        if not task.done():
            return {"type": "try_again", "request_id": request_id, "queue_state": "active"}
        return task.result()

    # ------------------------------------------------------------------------------------------------ sessions

    async def _client_config(self, request: Request) -> _Answer:
        return {
            "pjwt_auth_enabled": False,
            "credential_default_source": "api_key",
            "parallel_fwdbwd_chunks": False,
            "use_pyqwest_transport": False,
        }

    async def _nothing(self, request: Request) -> _Answer:
        return {}

    async def _telemetry(self, request: Request) -> _Answer:
        return {"status": "accepted"}  # and forgotten

    async def _health(self, request: Request) -> _Answer:
        return {"status": "ok"}

    async def _create_session(self, request: Request) -> _Answer:
        session_id = secrets.token_hex(8)
        self._heard[session_id] = time.monotonic()
        return {"type": "create_session", "session_id": session_id}

    async def _heartbeat(self, request: Request) -> _Answer:
        now = time.monotonic()
        self._heard[parse(OfSession, await request.body()).session_id] = now
        for session_id in [one for one, heard in self._heard.items() if now - heard > _SILENCE_S]:
            self._forget(session_id)
        return {"type": "session_heartbeat"}

    async def _finish_session(self, request: Request) -> _Answer:
        self._forget(request.path_params["session_id"])
        return {}

    def _forget(self, session_id: str) -> None:
        """Nobody comes back for what a session trained, so its memory is free."""
        self._heard.pop(session_id, None)
        self._service.forget(session_id)

    async def _capabilities(self, request: Request) -> _Answer:
        length = self._service.model.max_model_len
        model = {
            "model_name": self._service.directory,
            "max_context_length": length,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    # ------------------------------------------------------------------------------------------------ training

    async def _create_model(self, request: Request) -> _Answer:
        asked = parse(CreateModel, await request.body())
        self._service.check_base(asked.base_model)

        async def work() -> _Answer:
            await self._service.create(asked.model_id, asked.lora_config)
            return {"model_id": asked.model_id, "type": "create_model"}

        return self._promise(work(), model_id=asked.model_id)

    async def _get_info(self, request: Request) -> _Answer:
        model_id = parse(OfModel, await request.body()).model_id
        lora = self._service.training(model_id).loaded.lora
        directory = self._service.directory
        return {
            "type": "get_info",
            "model_id": model_id,
            "is_lora": lora is not None,
            "lora_rank": None if lora is None else lora.rank,
            "model_name": directory,
            "model_data": {"model_name": directory, "tokenizer_id": directory},
        }

    async def _weights_info(self, request: Request) -> _Answer:
        return {"base_model": self._service.directory, "is_lora": False}

    async def _forward_backward(self, request: Request) -> _Answer:
        asked = parse_forward_backward(await request.body())

        async def work() -> _Answer:
            return forward_backward_output(*await self._service.forward_backward(asked))

        return self._promise(work())

    async def _optim_step(self, request: Request) -> _Answer:
        asked = parse(OptimStep, await request.body())

        async def work() -> _Answer:
            return {"metrics": await self._service.optim_step(asked.model_id, asked.adam_params)}

        return self._promise(work())

    async def _save_weights(self, request: Request) -> _Answer:
        return self._saved(parse(SaveWeights, await request.body()), "weights", "save_weights")

    async def _save_for_sampler(self, request: Request) -> _Answer:
        asked = parse(SaveWeights, await request.body())
        return self._saved(asked, "sampler_weights", "save_weights_for_sampler")

    async def _save_external(self, request: Request) -> _Answer:
        return self._saved(parse(SaveWeights, await request.body()), "external_weights", "save_weights_external")

    def _saved(self, asked: SaveWeights, kind: CheckpointKind, answer_type: str) -> _Answer:
        async def work() -> _Answer:
            path = await self._service.save(asked.model_id, asked.path, kind)
            answer = {"path": path, "type": answer_type}
            if asked.sampling_session_seq_id is not None and asked.path is None:
                answer["sampling_session_id"] = self._open_sampler(path)
            return answer

        return self._promise(work())

    async def _sign(self, request: Request) -> _Answer:
        """Addresses that need no key, for a while, of all files of a checkpoint that was saved to be taken away."""
        model_id, name = request.path_params["model_id"], request.path_params["name"]
        folder = self._service.checkpoint(checkpoint_path(model_id, "external_weights", name))
        expires = datetime.now(UTC) + _SIGNED_FOR
        grant = secrets.token_urlsafe(16)
        self._grants[grant] = (folder, expires)
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        base = f"{str(request.base_url).rstrip('/')}/downloads/{grant}"
        return {"urls": {file: f"{base}/{file}" for file in files}, "expires": expires.isoformat()}

    async def _download(self, request: Request) -> Response:
        folder, expires = self._grants.get(request.path_params["grant"], (None, None))
        if folder is None or expires is None or expires < datetime.now(UTC):
            return _json({"detail": "this address has expired; ask for a new one"}, 403)
        file = (folder / request.path_params["file"]).resolve()
        if not file.is_relative_to(folder.resolve()) or not file.is_file():
            return _json({"detail": "the checkpoint has no such file"}, 404)
        return FileResponse(file)

    async def _load_weights(self, request: Request) -> _Answer:
        asked = parse(LoadWeights, await request.body())

        async def work() -> _Answer:
            await self._service.load(asked.model_id, asked.path, optimizer=asked.optimizer)
            return {"path": asked.path, "model_id": asked.model_id, "type": "load_weights"}

        return self._promise(work(), model_id=asked.model_id)

    async def _delete_checkpoint(self, request: Request) -> _Answer:
        await self._service.delete(request.path_params["model_id"], request.path_params["name"])
        return {}

    # ------------------------------------------------------------------------------------------------ sampling

    async def _create_sampler(self, request: Request) -> _Answer:
        asked = parse(CreateSampler, await request.body())
        if asked.model_path is not None:
            self._service.checkpoint(asked.model_path)
        else:
            self._service.check_base(asked.base_model or "")
        return {"type": "create_sampling_session", "sampling_session_id": self._open_sampler(asked.model_path)}

    def _open_sampler(self, weights: str | None) -> str:
        sampler_id = secrets.token_hex(8)
        self._samplers[sampler_id] = weights
        return sampler_id

    async def _get_sampler(self, request: Request) -> _Answer:
        sampler_id = request.path_params["sampler_id"]
        weights = self._weights_of(sampler_id)
        return {"sampler_id": sampler_id, "base_model": self._service.directory, "model_path": weights}

    def _weights_of(self, sampler_id: str) -> str | None:
        if sampler_id not in self._samplers:
            raise UserError(f"there is no sampling session `{sampler_id}`; it may have ended with the service")
        return self._samplers[sampler_id]

    async def _sample(self, request: Request) -> _Answer:
        asked = parse(SampleRequest, await request.body())
        weights = self._weights_of(asked.sampling_session_id)

        async def work() -> _Answer:
            return sample_response(*await self._service.sample(asked, weights))

        names = [f"{asked.sampling_session_id}-{asked.seq_id}-{number}" for number in range(asked.num_samples)]
        return self._promise(work(), sample_sequence_ids=names)


async def _settled(work: Awaitable[_Answer]) -> _Answer:
    """What the work answers, a failure included."""
    try:
        return await work
    except (UserError, EpisodeFailure) as exc:
        return failure(str(exc), by_user=True)
    except CheckpointError as exc:
        return failure(str(exc), by_user=False)
    except Exception as exc:
        _logger.exception("a request of the Tinker service failed")
        return failure(f"{type(exc).__name__}: {exc}", by_user=False)


def _json(content: Any, status: int = 200) -> Response:
    return Response(json.dumps(content), status, media_type="application/json")


async def _no_route(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    return _json({"detail": f"`{request.method} {request.url.path}` is not served here"}, exc.status_code)
