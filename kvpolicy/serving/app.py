"""The paths of the server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from kvpolicy.errors import UserError
from kvpolicy.serving.access import check_key, check_policy, read_body
from kvpolicy.serving.calls import Call, Defaults, chat_call, completion_call
from kvpolicy.serving.delivery import Delivery, Outcome, error_response
from kvpolicy.serving.errors import ApiError, bad_request, unavailable
from kvpolicy.serving.fields import ChatBody, CompletionBody, parse_body, read_object
from kvpolicy.serving.link import Choice, EngineLink
from kvpolicy.serving.policy import PolicyBlock, check_remote
from kvpolicy.serving.prometheus import CONTENT_TYPE_LATEST, ServerMetrics
from kvpolicy.serving.settings import ServerSettings

__all__ = ["Server", "make_app"]

log = logging.getLogger(__name__)

# A scrape shows the engine as it is now, or as it was if it does not answer by then.
SCRAPE_SECONDS = 1.0
Handler = Callable[[Request], Awaitable[Response]]


class Server:
    """What the paths share. draining: nothing new is taken. abort: cuts a connection off."""

    def __init__(
        self,
        settings: ServerSettings,
        link: EngineLink,
        model: str,
        defaults: Callable[[], Defaults],
        abort: Callable[[Scope], None] = lambda scope: None,
    ) -> None:
        self.settings = settings
        self.link = link
        self.model = model
        self.defaults = defaults
        self.abort = abort
        self.draining = False
        self.started = int(time.time())
        self.metrics = ServerMetrics(
            lambda: link.sample, lambda: (link.ready, link.restarts, link.policy)
        )
        self._swap = asyncio.Lock()

    def ended(self, choice: Choice) -> None:
        """Told of each request that has ended."""
        self.metrics.note_end(choice)

    # --- completions -----------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return self._answer(completion_call(await self._read(request, CompletionBody), self.known))

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return self._answer(chat_call(await self._read(request, ChatBody), self.known))

    @property
    def known(self) -> Defaults:
        """What calls are checked against. ApiError before the engine was ready for the first time."""
        if not self.link.about:
            raise unavailable(self.link.why_down)
        return self.defaults()

    async def _read(self, request: Request, kind: Any) -> Any:
        check_key(request, self.settings)
        body = await read_body(request, self.settings)
        if self.draining:
            raise unavailable(
                "the server is draining: it ends what runs and takes no more", "draining"
            )
        return parse_body(kind, body)

    def _answer(self, call: Call) -> Response:
        try:
            submission = self.link.submit(call.jobs, call.stream)
        except ApiError as error:
            if error.status == 429:
                self.metrics.rejected.labels(error.headers["x-kvpolicy-binding-tier"]).inc()
            raise
        stall = self.settings.stall_seconds
        path = "/v1/chat/completions" if call.kind == "chat" else "/v1/completions"
        note = partial(self._note, path)
        return Delivery(call, self.model, submission, stall, self.abort, note)

    def _note(self, path: str, outcome: Outcome) -> None:
        self.metrics.calls.labels(path, str(outcome.status)).inc()
        if outcome.status == 499:
            self.metrics.lost.labels(outcome.what).inc()

    # --- models and health -----------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        check_key(request, self.settings)
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def one_model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        check_key(request, self.settings)
        if request.path_params["name"] != self.model:
            raise ApiError(404, "the model does not exist", "model_not_found", "model")
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.model,
            "object": "model",
            "created": self.started,
            "owned_by": "kvpolicy",
            "max_model_len": self.link.about.get("max_context"),
        }

    async def health(self, request: Request) -> Response:
        """GET /health: the server lives, and how its engine is."""
        engine = "running" if self.link.ready else self.link.why_down
        return JSONResponse({"status": "ok", "engine": engine, "restarts": self.link.restarts})

    async def ready(self, request: Request) -> Response:
        """GET /ready: whether a request would be taken."""
        if self.draining:
            raise unavailable("the server is draining", "draining")
        if not self.link.ready:
            raise unavailable(self.link.why_down)
        return JSONResponse({"status": "ready"})

    async def show_metrics(self, request: Request) -> Response:
        """GET /metrics."""
        try:
            async with asyncio.timeout(SCRAPE_SECONDS):
                await self.link.status()
        except (ApiError, TimeoutError):
            log.debug("metrics: the engine does not answer; its last sample is shown")
        return Response(self.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    # --- policy ----------------------------------------------------------------------------------

    async def show_policy(self, request: Request) -> Response:
        """GET /v1/policy."""
        check_policy(request, self.settings)
        return JSONResponse(await self._policy())

    async def put_policy(self, request: Request) -> Response:
        """PUT /v1/policy: change what the body names, and show what holds then."""
        check_policy(request, self.settings)
        values = read_object(await read_body(request, self.settings))
        try:
            settings = PolicyBlock(**values).settings(str(self.link.policy["controller"]))
            spec = settings.get("controller")
            if spec is not None and not self.settings.allow_controller_files:
                check_remote(spec)
            found = await self.swap(settings, "PUT /v1/policy")
        except UserError as error:
            if values:  # what came was no policy, or not one that can be had
                self.metrics.swaps.labels("put", "refused").inc()
            raise bad_request(None, f"{error} (the policy stays as it is)", "bad_policy") from None
        return JSONResponse({**await self._policy(), "changed": found["changed"]})

    async def swap(self, settings: Mapping[str, Any], origin: str) -> dict[str, Any]:
        """Hand a new policy to the engine, one at a time. UserError leaves the old one in place."""
        async with self._swap:
            found = await self.link.set_policy(settings, origin)
        self.metrics.swaps.labels("put" if "PUT" in origin else "reload", "done").inc()
        log.info("%s: policy %s from step %s on", origin, self.link.policy, found.get("step"))
        return found

    async def _policy(self) -> dict[str, Any]:
        sample = await self.link.status()
        spec = str(self.link.policy["controller"])
        return {
            "name": spec.partition(":")[0] if ".py:" not in spec else spec,
            **self.link.policy,
            **{key: sample[key] for key in ("decisions", "projections", "fallbacks")},
            "shadows": [],
            "restarts": self.link.restarts,
            "engine_pid": self.link.pid,
            "pending": self.link.pending,
            "record": self.link.about.get("record"),
            "sample": sample,
        }


def make_app(server: Server) -> FastAPI:
    """The application. Its paths answer errors in the form of the API."""
    app = FastAPI(title="kvpolicy", docs_url=None, redoc_url=None, openapi_url=None)
    paths: list[tuple[str, str, Handler]] = [
        ("POST", "/v1/completions", server.completions),
        ("POST", "/v1/chat/completions", server.chat),
        ("GET", "/v1/models", server.models),
        ("GET", "/v1/models/{name:path}", server.one_model),
        ("GET", "/health", server.health),
        ("GET", "/ready", server.ready),
        ("GET", "/metrics", server.show_metrics),
        ("GET", "/v1/policy", server.show_policy),
        ("PUT", "/v1/policy", server.put_policy),
    ]
    for method, path, handler in paths:
        app.add_route(path, handler, methods=[method])
    counted = {path for _, path, _ in paths}

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        path = request.url.path if request.url.path in counted else "other"
        server.metrics.calls.labels(path, str(error.status)).inc()
        return error_response(error)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        text = f"{request.method} {request.url.path}: {error.detail}"[:300]
        found = ApiError(error.status_code, text, "no_such_path", headers=error.headers)
        return await api_error(request, found)

    async def any_error(request: Request, error: Exception) -> Response:
        return error_response(ApiError(500, "internal error", "internal"))

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, any_error)
    return app
