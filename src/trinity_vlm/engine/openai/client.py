"""HTTP calls to one OpenAI-compatible server, and what their failures mean for the caller.

ServerFailure    the server is at fault: try another one
ServerBusy       it asks for patience: come back later
RequestRefused   the request is at fault: no server will take it
PromptTooLong    the prompt leaves no room in the model's context
BudgetTooLarge   the prompt fits, its output budget does not
"""

from __future__ import annotations

import asyncio
import email.utils
import math
import os
import time
from collections.abc import Mapping
from typing import Any

import httpx2

from trinity_vlm.engine.openai.limits import stated_room
from trinity_vlm.engine_settings import ServersConfig
from trinity_vlm.errors import ConfigError

# Below the 5 s after which uvicorn closes idle connections: a request never meets a connection that is being closed.
_KEEPALIVE_SECONDS = 2.0
_ADAPTER_SECONDS = 120.0
_QUOTED_CHARS = 300


class ServerFailure(Exception):
    """No usable answer: not reachable, too slow, a 5xx ``status``, or an answer that is not what was asked for."""

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status


class ServerBusy(Exception):
    """Status 429, or 503 with Retry-After. ``retry_after``: seconds, None when the server does not say."""

    def __init__(self, reason: str, retry_after: float | None) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class RequestRefused(Exception):
    """A 4xx status with the server's own words; ``missing_model`` tells a 404 for the model's name."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.status = status

    @property
    def missing_model(self) -> bool:
        return self.status == 404 and "model" in str(self).lower()


class PromptTooLong(RequestRefused):
    """The prompt does not fit the model's context."""


class BudgetTooLarge(RequestRefused):
    """The prompt fits the model's context. ``room``: the tokens left behind it, None when only the server knows."""

    def __init__(self, reason: str, status: int, room: int | None) -> None:
        super().__init__(reason, status)
        self.room = room


class Client:
    """Connections to all servers of a list. The API key travels in a header and is cut out of every message."""

    def __init__(self, config: ServersConfig, key: str) -> None:
        self._config = config
        self._secret = _read_secret(config, key)
        self._http = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {self._secret}"} if self._secret else {},
            timeout=httpx2.Timeout(None, connect=config.connect_timeout),
            limits=httpx2.Limits(
                max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEPALIVE_SECONDS
            ),
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def chat(self, root: str, payload: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer of ``/v1/chat/completions`` as parsed JSON."""
        return await self._json("POST", f"{root}/v1/chat/completions", self._config.timeout, payload)

    async def models(self, root: str) -> dict[str, Mapping[str, Any]]:
        """What ``/v1/models`` lists, by name; with vLLM the loaded adapters among them."""
        answer = await self._json("GET", f"{root}/v1/models", self._config.probe_timeout)
        try:
            return {entry["id"]: entry for entry in answer["data"]}
        except (KeyError, TypeError):
            raise ServerFailure(f"/v1/models answered {self.clean(str(answer))[:_QUOTED_CHARS]!r}") from None

    async def check_health(self, root: str) -> None:
        """Raises ServerFailure unless the server says it is well; one without ``/health`` must list its models."""
        try:
            await self._send("GET", f"{root}/health", self._config.probe_timeout)
        except RequestRefused:
            await self.models(root)

    async def load_adapter(self, root: str, name: str, path: str) -> None:
        """Make adapter ``name`` servable from the PEFT directory ``path``; fine when it already is.

        vLLM answers an adapter that it can't use with status 500: a server that is well in spite of it has refused.
        """
        body = {"lora_name": name, "lora_path": path}
        try:
            await self._send("POST", f"{root}/v1/load_lora_adapter", _ADAPTER_SECONDS, body)
        except (RequestRefused, ServerFailure) as error:
            await self.check_health(root)
            if name in await self.models(root):
                return
            if error.status is None:
                raise
            raise RequestRefused(f"adapter {name} from {path}: {error}", error.status) from None

    async def loads_adapters(self, root: str) -> bool:
        """Whether adapters can be loaded at run time: a request without a name is understood, and refused."""
        try:
            await self._send(
                "POST", f"{root}/v1/load_lora_adapter", _ADAPTER_SECONDS, {"lora_name": "", "lora_path": ""}
            )
        except RequestRefused as refusal:
            return refusal.status not in (404, 405)
        return True

    async def unload_adapter(self, root: str, name: str) -> None:
        """Forget adapter ``name``; fine when it is unknown."""
        try:
            await self._send("POST", f"{root}/v1/unload_lora_adapter", _ADAPTER_SECONDS, {"lora_name": name})
        except RequestRefused:
            return

    async def _json(
        self, method: str, url: str, seconds: float, body: Mapping[str, Any] | None = None
    ) -> Mapping[str, Any]:
        response = await self._send(method, url, seconds, body)
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ServerFailure(f"a body that is no JSON object: {self._quote(response)}")
        return answer

    async def _send(
        self, method: str, url: str, seconds: float, body: Mapping[str, Any] | None = None
    ) -> httpx2.Response:
        try:
            async with asyncio.timeout(seconds):
                response = await self._http.request(method, url, json=body)
        except TimeoutError:
            raise ServerFailure(f"no answer within {seconds:g} s") from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ServerFailure(self.clean(f"{type(error).__name__}: {error}")) from None
        self._check_status(response)
        return response

    def _check_status(self, response: httpx2.Response) -> None:
        status = response.status_code
        if status == 200:
            return
        reason = f"status {status}: {self._quote(response)}"
        retry_after = seconds_to_wait(response.headers.get("retry-after"), time.time())
        if status == 429 or (status == 503 and retry_after is not None):
            raise ServerBusy(reason, retry_after)
        if not 400 <= status < 500 or status == 408:
            raise ServerFailure(reason, status)
        room = stated_room(response.text) if status in (400, 413) else None
        if room is not None:
            raise PromptTooLong(reason, status) if room.tokens == 0 else BudgetTooLarge(reason, status, room.tokens)
        if status in (401, 403):
            reason += f" (api_key_env is {self._config.api_key_env or 'not set'})"
        raise RequestRefused(reason, status)

    def _quote(self, response: httpx2.Response) -> str:
        try:
            text = str(response.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            text = response.text
        return self.clean(text)[:_QUOTED_CHARS] or "(empty)"

    def clean(self, text: str) -> str:
        """``text`` without the API key."""
        return text.replace(self._secret, "***") if self._secret else text


def seconds_to_wait(header: str | None, now: float) -> float | None:
    """What a Retry-After header asks for, in seconds from ``now`` (Unix time): a finite number or an HTTP date."""
    if header is None:
        return None
    try:
        seconds = float(header)
        return max(0.0, seconds) if math.isfinite(seconds) else None
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - now)
    except ValueError:
        return None


def _read_secret(config: ServersConfig, key: str) -> str | None:
    if config.api_key_env is None:
        return None
    secret = os.environ.get(config.api_key_env)
    if not secret:
        raise ConfigError(f"{key}.api_key_env={config.api_key_env!r}: this environment variable is not set; export it")
    return secret
