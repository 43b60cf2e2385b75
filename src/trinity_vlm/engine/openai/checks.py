"""Ask the servers, before a model is loaded, whether they can play what the configuration wants of them."""

from __future__ import annotations

import asyncio

from trinity_vlm.engine.openai.client import Client, RequestRefused, ServerBusy, ServerFailure
from trinity_vlm.engine.openai.pool import missing_model
from trinity_vlm.engine_settings import ServersConfig
from trinity_vlm.errors import ConfigError

_ONE_TOKEN = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "return_token_ids": True}


def check_servers(config: ServersConfig, key: str, context: int | None = None) -> None:
    """Raises ConfigError, naming ``key`` and the server, when no server answers or one that does can't play.

    context: set when the servers play the policy, to the tokens of prompt plus completion: they must then return token
        ids, load adapters at run time and hold that many tokens
    """
    if context is not None and config.dialect != "vllm":
        raise ConfigError(
            f"{key}.dialect={config.dialect!r}: a policy is trained on the server's own token ids, which only "
            "dialect 'vllm' asks for"
        )
    asyncio.run(_check(config, key, context))


async def _check(config: ServersConfig, key: str, context: int | None) -> None:
    client = Client(config, key)
    try:
        results = await asyncio.gather(*(_check_one(client, config, key, root, context) for root in config.roots))
    finally:
        await client.close()
    if all(result is not None for result in results):
        instead = "unset roles.verifier_engine" if context is None else "set engine.kind=transformers"
        raise ConfigError(
            f"{key}.urls: no server answers: {'; '.join(map(str, results))}. Is one running, and reachable from here? "
            f"Try: curl {config.roots[0]}/v1/models; docs/engines.md shows how to start one; or {instead}"
        )


async def _check_one(client: Client, config: ServersConfig, key: str, root: str, context: int | None) -> str | None:
    """None for a server that can play, a text for one that is away; ConfigError for one that never can."""
    try:
        listed = await client.models(root)
        if config.model not in listed:
            raise ConfigError(f"{root}: {missing_model(config.model, listed, key)}")
        if context is not None:
            await _check_policy(client, config, key, root, context, listed[config.model].get("max_model_len"))
    except (ServerFailure, ServerBusy) as error:
        return f"{root}: {error}"
    except RequestRefused as refusal:
        raise ConfigError(f"{key}.urls: {root}: {refusal}") from None
    return None


async def _check_policy(
    client: Client, config: ServersConfig, key: str, root: str, context: int, served_context: object
) -> None:
    if isinstance(served_context, int) and served_context < context:
        raise ConfigError(
            f"{root} holds {served_context} tokens, model.context={context}: start it with --max-model-len {context}"
        )
    answer = await client.chat(root, {"model": config.model, **_ONE_TOKEN})
    if not answer.get("prompt_token_ids"):
        raise ConfigError(
            f"{key}.urls: {root} returns no token ids, which a policy is trained on; use vLLM's own server, or point "
            "only roles.verifier_engine at this one"
        )
    if not await client.loads_adapters(root):
        raise ConfigError(
            f"{key}.urls: {root} can't load adapters at run time; start vLLM with --enable-lora and "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
        )
