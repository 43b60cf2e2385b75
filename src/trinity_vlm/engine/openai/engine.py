"""The engine that asks servers: requests leave this machine, tokens and log-probabilities come back.

episode coroutines ──generate──▶ chat payload ──pool──▶ one of the servers ──answer──▶ Completions

Nothing is batched here, the servers do that; so the batch a request runs in, and with it the last bits of its logits,
depends on timing. Draws depend on the request's seed alone, but outputs are not bit-reproducible: a resumed run goes
on from the same weights and asks the same questions, it does not repeat the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trinity_vlm.engine.background import BackgroundLoop
from trinity_vlm.engine.expansion import difference
from trinity_vlm.engine.openai.adapters import AdapterShelf
from trinity_vlm.engine.openai.answers import empty_completions, read_completions
from trinity_vlm.engine.openai.client import BudgetTooLarge, Client, PromptTooLong, RequestRefused, ServerFailure
from trinity_vlm.engine.openai.payload import ImageUrls, chat_payload, with_budget
from trinity_vlm.engine.openai.pool import Pool
from trinity_vlm.engine.protocol import GenerationRequest
from trinity_vlm.engine_settings import ServersConfig
from trinity_vlm.errors import EngineError
from trinity_vlm.types import Completion, Prompt

if TYPE_CHECKING:
    from torch import Tensor

    from trinity_vlm.backbone import Backbone


class OpenAIEngine:
    """Engine over a list of OpenAI-compatible servers. ``close`` it: it owns a thread, connections and adapter files.

    config, key: the servers, and the configuration key that names them in messages
    backbone: what the trainer trains. With it, adapters are loaded into the servers, and every prompt must come back
        in the very tokens the trainer will see. Without it, the servers' model plays as it is, whichever adapter a
        request names: for a Verifier that is never trained.

    Raises ConfigError for an unset API key variable or an adapter directory that can't be written.
    """

    def __init__(self, config: ServersConfig, key: str, backbone: Backbone | None = None) -> None:
        self._config = config
        self._key = key
        self._backbone = backbone
        self._images = ImageUrls()
        self._client = Client(config, key)
        self._pool = Pool(config, key, self._client)
        self._shelf = None if backbone is None else AdapterShelf(config.adapter_dir, key)
        self._background = BackgroundLoop("trinity-openai")

    @contextmanager
    def episode(self) -> Iterator[None]:
        """Servers batch what they get, when they get it: there is nothing to hold."""
        yield

    @property
    def counters(self) -> dict[str, int]:
        """Since the start: ``resent``, ``ejections``, ``readmissions``, ``busy``."""
        return dict(self._pool.counters)

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """``request.n`` completions in sample order; see the protocol.

        Raises EngineError, naming server, status and attempts, when a request is refused, fails on too many servers
        or finds none for too long; for an adapter that was never loaded; and for a prompt the server reads otherwise.
        """
        prompt_ids = self._prompt_ids(request)
        budget = request.sampling.max_tokens
        if self._backbone is not None:
            budget = min(budget, self._backbone.context - len(prompt_ids))
        if budget <= 0:
            return empty_completions(request.n, prompt_ids, request.want_logprobs)
        payload = self._payload(self._enforceable(request), budget)
        try:
            completions = await self._background.run(self._send(payload, request))
        except PromptTooLong:
            return empty_completions(request.n, prompt_ids, request.want_logprobs)
        except RequestRefused as refusal:
            raise EngineError(f"{self._key}: a {request.call} call was refused: {refusal}") from None
        if self._backbone is not None:
            completions = [self._as_trained(completion, prompt_ids, request) for completion in completions]
        return completions * (request.n // len(completions))

    def load_adapter(self, name: str, version: int, state: Mapping[str, Tensor]) -> None:
        """Put this version on every server that can be reached; the others get it before they are used again.

        Raises EngineError for keys that are not LoRA pairs or a server that refuses, ConfigError for a full disk.
        """
        if self._shelf is None or self._backbone is None:
            raise EngineError(f"{self._key}: its servers play as they are and take no adapter {name!r}")
        if name not in self._backbone.adapter_names:
            raise EngineError(f"unknown adapter {name!r}; the backbone has {', '.join(self._backbone.adapter_names)}")
        alpha = float(self._backbone.model.peft_config[name].lora_alpha)  # type: ignore[index, union-attr]
        self._shelf.put(name, version, state, alpha)
        self._background.call(self._pool.publish(self._shelf.current))
        self._shelf.drop_old()

    def close(self) -> None:
        """Unload the adapters, end the connections and the thread, and delete the adapter files."""
        try:
            self._background.close(self._leave)
        finally:
            if self._shelf is not None:
                self._shelf.close()

    async def _leave(self) -> None:
        await self._pool.retire()
        await self._client.close()

    async def _send(self, payload: Mapping[str, Any], request: GenerationRequest) -> list[Completion]:
        """What the request gives; a budget beyond the context is cut, once, to what the prompt leaves of it."""
        self._pool.start()
        try:
            return await self._pool.call(lambda root: self._ask(root, payload, request))
        except BudgetTooLarge as refusal:
            fitting = with_budget(payload, refusal.room)
        return await self._pool.call(lambda root: self._ask(root, fitting, request))

    async def _ask(self, root: str, payload: Mapping[str, Any], request: GenerationRequest) -> list[Completion]:
        try:
            answer = await self._client.chat(root, payload)
        except RequestRefused as refusal:
            if refusal.missing_model and payload["model"] != self._config.model:
                raise ServerFailure(f"it lost adapter {payload['model']}") from None
            refusal.args = (f"{root}: {refusal}",)
            raise
        return read_completions(answer, payload["n"], request.want_logprobs)

    def _prompt_ids(self, request: GenerationRequest) -> tuple[int, ...]:
        if self._backbone is None:
            return ()
        try:
            return self._backbone.encode(request.prompt).input_ids
        except ValueError as error:
            raise EngineError(f"the prompt of a {request.call} call can't be encoded: {error}") from error

    def _payload(self, request: GenerationRequest, budget: int) -> dict[str, Any]:
        return chat_payload(
            request,
            self._served_name(request.adapter),
            self._config.dialect,
            self._images,
            budget=budget,
            continues=self._continues(request.prompt),
            end_ids=sorted(self._backbone.eos_ids) if self._backbone is not None else (),
            banned_ids=sorted(self._backbone.placeholder_ids) if self._backbone is not None else (),
        )

    def _enforceable(self, request: GenerationRequest) -> GenerationRequest:
        """Without its schema where the completion thinks first and only the server knows where that ends.

        A schema would then bind the first token; the parser and its retries decide instead.
        """
        opaque = self._config.dialect == "openai" or self._config.prefix == "omit"
        return replace(request, json_schema=None) if opaque and request.schema_after is not None else request

    def _served_name(self, adapter: str | None) -> str:
        if adapter is None or self._backbone is None:
            return self._config.model
        if self._shelf is None or adapter not in self._shelf.current:
            known = ", ".join(self._shelf.current) if self._shelf is not None else ""
            raise EngineError(f"{self._key}: unknown adapter {adapter!r}; loaded: {known or 'none'}")
        return self._shelf.current[adapter].served_name

    def _continues(self, prompt: Prompt) -> bool:
        """Whether the thinking prefix has to be sent: not when the chat template opens the block by itself."""
        if not prompt.assistant_prefix or self._config.dialect == "openai" or self._config.prefix == "omit":
            return False
        if self._backbone is None:
            return True
        return self._backbone.render(prompt) != self._backbone.render(replace(prompt, assistant_prefix=""))

    def _as_trained(
        self, completion: Completion, prompt_ids: tuple[int, ...], request: GenerationRequest
    ) -> Completion:
        """The completion with the trainer's own decoding; refused unless the server saw the trainer's prompt."""
        assert self._backbone is not None
        if completion.prompt_token_ids != prompt_ids:
            raise EngineError(
                f"{self._key}: the server read the prompt of a {request.call} call as other tokens than the trainer "
                f"({difference(completion.prompt_token_ids, prompt_ids)}); it must serve the same checkpoint "
                "with the same chat template and pixel bounds (model.min_pixels, model.max_pixels)"
            )
        return replace(completion, text=self._backbone.decode(completion.token_ids))
