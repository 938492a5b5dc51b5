"""The server of a run: one socket on the loopback, one API key per episode and role.

It runs on the event loop of the episodes and of the sampler. Requests and batches take turns, as agents and batches
do, and nothing has to be handed from one thread to another.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from os.path import commonprefix
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from agentscope_tuner.chat import TOOL_CALL_OPEN, Reply
from agentscope_tuner.endpoint.protocol import Answer, ChatRequest, Refusal, parse_chat_request, refusal_of
from agentscope_tuner.errors import ConfigError, EpisodeTimeoutError
from agentscope_tuner.recorder import Completion, Recorder

_logger = logging.getLogger(__name__)

_EXPIRED_KEYS = 4096
"""How many keys of finished episodes are remembered, to tell a late client from a wrong one."""
_IDLE_CONNECTION_S = 24 * 3600
"""Agents may think for long between two calls; a connection that closes meanwhile would fail the second."""
_CLOSING_S = 2
"""How long clients may take to read the end of their last answers."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where clients of OpenAI's chat completions find a trained role; valid until the episode ends."""

    base_url: str
    """On the loopback interface, ending in `/v1`."""
    api_key: str = field(repr=False)
    """Says which episode and role a call belongs to. Never stored or logged."""
    model: str
    """What to send as `model`."""


@dataclass(frozen=True, slots=True)
class _Grant:
    """What a key is for."""

    recorder: Recorder
    role: str
    agent: str
    model: str


class EndpointServer:
    """Serves the episodes of a run. It listens from the first `open` until `close`, or until the event loop ends."""

    def __init__(self) -> None:
        self._grants: dict[str, _Grant] = {}
        self._expired: deque[str] = deque(maxlen=_EXPIRED_KEYS)
        self._serving: asyncio.Task[None] | None = None
        self._base_url = ""

    def open(self, recorder: Recorder, role: str, name: str = "") -> Endpoint:
        """A new key for a role of an episode.

        Args:
            recorder: of the episode.
            role: a trained one.
            name: what the model is called; its own name when empty.

        Raises:
            ConfigError: there is no running event loop here, as in a thread.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise ConfigError(
                "`model_tuner.endpoint()` was called where no event loop runs, as in a thread; call it in `execute` "
                "itself, and hand the endpoint to the thread"
            ) from None
        if self._serving is None or self._serving.done():
            self._listen(loop)
        endpoint = Endpoint(self._base_url, secrets.token_urlsafe(32), name or recorder.model.name)
        self._grants[endpoint.api_key] = _Grant(recorder, role, recorder.name_agent(role), endpoint.model)
        return endpoint

    def expire(self, recorder: Recorder) -> None:
        """An episode is over, and so are its keys."""
        for key in [key for key, grant in self._grants.items() if grant.recorder is recorder]:
            del self._grants[key]
            self._expired.append(key)

    async def close(self) -> None:
        """Stop listening."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait({self._serving})

    # ------------------------------------------------------------------------------------------------ serving

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        # Bound here and now: whoever connects before the server's first turn waits in the socket's backlog.
        listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self._base_url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        server = _Server(
            uvicorn.Config(
                self._app(),
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                backlog=2048,
                timeout_keep_alive=_IDLE_CONNECTION_S,
                timeout_graceful_shutdown=_CLOSING_S,
            )
        )
        self._serving = loop.create_task(_serve(server, listener), name="endpoint")
        # A task that is cancelled before its first turn never runs a `finally` of its own.
        self._serving.add_done_callback(lambda _: listener.close())

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/chat/completions", _Chat(self), methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
            ],
            exception_handlers={Refusal: _refuse, HTTPException: _no_route, ClientDisconnect: _nobody_listens},
        )

    async def _models(self, request: Request) -> Response:
        model = {"id": self.grant_of(request).model, "object": "model", "created": 0, "owned_by": "agentscope-tuner"}
        return _json({"object": "list", "data": [model]})

    def grant_of(self, request: Request) -> _Grant:
        """What the request's key is for.

        Raises:
            Refusal: there is no key, or not a valid one.
        """
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Refusal(401, "there is no API key; send the endpoint's as `Authorization: Bearer <api_key>`")
        grant = self._grants.get(key)
        if grant is not None:
            return grant
        if key in self._expired:
            message = "the API key has expired: its episode is over, and records nothing more"
            raise Refusal(401, message, code="expired_api_key")
        raise Refusal(401, "the API key is not one of this run; use the endpoint's own", code="invalid_api_key")


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Ctrl-C belongs to the run, which stops this server too.
        yield


async def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    try:
        await server.serve(sockets=[listener])
    except asyncio.CancelledError:
        if server.started:
            await server.shutdown(sockets=[listener])
        raise


# --------------------------------------------------------------------------------------------------- completions


class _Chat:
    """`POST /v1/chat/completions`."""

    def __init__(self, server: EndpointServer) -> None:
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; a client that goes away takes its call with it."""
        request = Request(scope, receive)
        grant = self._server.grant_of(request)
        chat = parse_chat_request(await request.body(), serves=grant.model)
        answer = Answer(grant.model, grant.recorder.model.renderer.token_text)
        # (choice, token) as they are drawn; None once the call is over, or the client gone.
        drawn: asyncio.Queue[tuple[int, int] | None] = asyncio.Queue()
        call = asyncio.create_task(_complete(grant, chat, drawn))
        gone = asyncio.create_task(_disconnected(receive))
        for task in (call, gone):
            task.add_done_callback(lambda _: drawn.put_nowait(None))
        try:
            if (first := await drawn.get()) is not None:
                await _stream(send, answer, grant, chat, first, drawn, call)
            elif call.done():
                completions = call.result()
                await _json(answer.whole(completions, logprobs=chat.logprobs))(scope, receive, send)
        except Exception as exc:
            raise _reported(exc) from exc
        finally:
            call.cancel()
            gone.cancel()
            await asyncio.wait({call, gone})
            if not call.cancelled():
                call.exception()  # seen


async def _complete(grant: _Grant, chat: ChatRequest, drawn: asyncio.Queue[tuple[int, int] | None]) -> list[Completion]:
    """All choices of a request, at once."""

    def tell(choice: int, token: int) -> None:
        drawn.put_nowait((choice, token))

    try:
        async with asyncio.TaskGroup() as group:
            choices = [
                group.create_task(
                    grant.recorder.draw(
                        grant.role,
                        chat.messages,
                        tools=chat.tools,
                        tool_choice=chat.tool_choice,
                        options=chat.options,
                        on_token=partial(tell, choice) if chat.stream else None,
                        agent=grant.agent,
                    )
                )
                for choice in range(chat.n)
            ]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    if any(choice.cancelled() for choice in choices):
        # Not by us: the policy drops what an ended episode still waits for.
        raise EpisodeTimeoutError(f"episode `{grant.recorder.episode_id}` is over")
    # None of them is recorded where the client has gone before all are there: it asks again.
    return [grant.recorder.record(choice.result()) for choice in choices]


async def _stream(
    send: Send,
    answer: Answer,
    grant: _Grant,
    chat: ChatRequest,
    first: tuple[int, int],
    drawn: asyncio.Queue[tuple[int, int] | None],
    call: asyncio.Task[list[Completion]],
) -> None:
    """Server-sent events, one per settled piece of text."""

    async def event(content: dict[str, Any] | str) -> None:
        data = content if isinstance(content, str) else json.dumps(content)
        await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})

    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    texts = [_GrowingText(grant.recorder, chat) for _ in range(chat.n)]
    for index in range(chat.n):
        await event(answer.chunk(index, {"role": "assistant", "content": ""}))
    item: tuple[int, int] | None = first
    while item is not None:
        index, token = item
        if piece := texts[index].grow(token):
            await event(answer.chunk(index, {"content": piece}))
        item = await drawn.get()
    if not call.done():
        return
    try:
        completions = call.result()
    except Exception as exc:
        # The status is sent already; clients raise this event as an error.
        await event(_reported(exc).body)
    else:
        for index, completion in enumerate(completions):
            rest = texts[index].rest(completion.reply)
            for chunk in answer.last_chunks(index, completion, rest, logprobs=chat.logprobs):
                await event(chunk)
        if chat.include_usage:
            await event(answer.usage_chunk(completions))
        await event("[DONE]")
    await send({"type": "http.response.body", "body": b""})


class _GrowingText:
    """The text of one choice, in pieces that are never taken back."""

    def __init__(self, recorder: Recorder, chat: ChatRequest) -> None:
        marks = recorder.stop_strings(chat.options)
        if chat.tools and chat.tool_choice != "none":
            marks = (TOOL_CALL_OPEN, *marks)
        self._read = recorder.reading(marks)
        self._sent = ""

    def grow(self, token: int) -> str:
        """What can be sent now that a token was drawn: half a tool call or stop string cannot."""
        settled = self._read(token).text
        if settled.endswith("�") or not settled.startswith(self._sent):
            return ""
        piece = settled[len(self._sent) :]
        self._sent = settled
        return piece

    def rest(self, reply: Reply) -> str:
        """What is left of the text once the reply is complete."""
        return reply.text[len(commonprefix([self._sent, reply.text])) :]  # noqa: RUF071  # characters are meant


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# ------------------------------------------------------------------------------------------------------- answers


def _json(content: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(content), status, media_type="application/json")


def _reported(exc: Exception) -> Refusal:
    """The error for the client; one that nobody foresaw is logged with its traceback, which a client never sees."""
    refusal = refusal_of(exc)
    if refusal.status >= 500:
        _logger.error("a call of an endpoint failed", exc_info=exc)
    return refusal


async def _refuse(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, Refusal)
    return _json(exc.body, exc.status)


async def _no_route(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    message = f"`{request.method} {request.url.path}` is not served; use `POST /v1/chat/completions`"
    return _json(Refusal(exc.status_code, message).body, exc.status_code)


async def _nobody_listens(request: Request, exc: Exception) -> Response:
    return Response(status_code=499)
