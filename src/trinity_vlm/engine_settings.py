"""Configuration sections of engines: vLLM in this process, and lists of model servers."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from trinity_vlm.section import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section

ENGINE_KINDS = ("transformers", "vllm", "openai")
ENGINES_WITH_THEIR_OWN_MODEL = ("vllm", "openai")

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_URL = re.compile(r"https?://[^\s/?#@]+(/[^\s?#@]*)?")

VLLM_CPU_CACHE_GIB = 1.0
"""vLLM's key-value cache on a CPU, where ``engine.vllm.kv_cache_gib`` is unset."""


def vllm_block_tokens(on_gpu: bool) -> int:
    """Tokens of a block of the key-value cache: vLLM's own choice on a GPU, this package's on a CPU.

    vLLM's 128 there would never find a short prompt in the prefix cache.
    """
    return 16 if on_gpu else 32


def vllm_batch_tokens(on_gpu: bool, context: int, max_sequences: int) -> int:
    """What vLLM takes into one forward pass, and holds of encoded images; on a CPU prompts go in whole."""
    return 8192 if on_gpu else max(2048, context, max_sequences)


def vllm_adapter_slots(num_adapters: int, on_gpu: bool) -> int:
    """Adapters in vLLM at once: each with a version that is coming or going, and one slot that nobody fills.

    vLLM's CPU kernels apply the last slot's weights to rows without an adapter, so there it must stay empty. A GPU
    keeps one beside the current versions: others wait in host memory.
    """
    return num_adapters + 1 if on_gpu else 2 * num_adapters + 1


class VllmConfig(Section):
    """The in-process vLLM engine: how much memory it may take, and whether it may capture graphs."""

    kv_cache_gib: PositiveFloat | None = Field(
        None, description="size of the key-value cache; unset: what the memory plan leaves (`doctor`), 1 GiB on a CPU"
    )
    mm_cache_gib: NonNegativeFloat = Field(1.0, description="bound of vLLM's cache of processed images; 0: none")
    enforce_eager: bool = Field(False, description="no captured CUDA graphs: a quicker start, slower decoding")
    share_weights: bool = Field(
        True, description="on a GPU: the trainer reads vLLM's base weights instead of holding its own"
    )


class ServersConfig(Section):
    """A list of OpenAI-compatible servers that all serve one model."""

    urls: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        description="base URLs, for example [http://127.0.0.1:8000, http://127.0.0.1:8001]"
    )
    model: str = Field(description="the model's name on the servers (vLLM: --served-model-name)")
    dialect: Literal["vllm", "openai"] = Field(
        "vllm",
        description="openai: send the standard fields only; no token ids and no thinking prefix, so never for a policy",
    )
    prefix: Literal["continue", "omit"] = Field(
        "continue", description="omit: the server's chat template opens the thinking block itself (vllm dialect)"
    )
    api_key_env: str | None = Field(None, description="name of the environment variable that holds the API key")
    max_in_flight: Positive = Field(
        256, description="requests, each of one sample, at one server at a time; further ones wait here"
    )
    timeout: PositiveFloat = Field(1800.0, description="seconds after which one request is sent to another server")
    connect_timeout: PositiveFloat = Field(5.0, description="seconds to open a connection")
    max_retries: NonNegative = Field(5, description="servers that may fail on one request before the run stops")
    backoff: PositiveFloat = Field(0.5, description="seconds before a failed server is tried again; doubles each time")
    backoff_max: PositiveFloat = Field(30.0, description="and is never more than this")
    probe_every: PositiveFloat = Field(5.0, description="seconds between health checks of each server")
    probe_timeout: PositiveFloat = Field(10.0, description="seconds a health check may take; two misses in a row eject")
    give_up_after: PositiveFloat = Field(300.0, description="seconds without any usable server before the run stops")
    adapter_dir: str = Field(
        "/dev/shm", description="where adapters are handed over; the servers must see it under the same path"
    )

    @field_validator("urls")
    @classmethod
    def _plain_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not _URL.fullmatch(url):
                raise ValueError(
                    "urls: each must look like http://host:port, without user, password, query or fragment "
                    "(a key belongs in the environment variable that api_key_env names)"
                )
        roots = [server_root(url) for url in urls]
        if len(set(roots)) != len(roots):
            raise ValueError("urls: a server is listed twice")
        return urls

    @field_validator("api_key_env")
    @classmethod
    def _a_name_not_a_key(cls, name: str | None) -> str | None:
        if name is not None and not _VARIABLE.fullmatch(name):
            raise ValueError(
                "api_key_env: expected the name of an environment variable, for example OPENAI_API_KEY, not a key"
            )
        return name

    @property
    def roots(self) -> tuple[str, ...]:
        """The URLs without a trailing slash or ``/v1``."""
        return tuple(server_root(url) for url in self.urls)


class VerifierEngineConfig(ServersConfig):
    """Another model that plays the Verifier (Appendix D): it is never trained and takes no adapter."""

    kind: Literal["openai"] = Field("openai", description="the only kind so far")


class EngineConfig(Section):
    """The generation backend."""

    kind: str = Field(
        "transformers",
        description="'transformers', 'vllm' (in this process), 'openai' (servers), or the import path of your own",
    )
    vllm: VllmConfig = VllmConfig()
    servers: ServersConfig | None = Field(None, description="of kind 'openai': {urls: [...], model: ...}")
    layout: Literal["adapters", "paper"] = Field(
        "adapters",
        description="paper: one phase after the other and full weight swaps between them, to compare with (vllm only)",
    )
    sub_batch: Positive | None = Field(
        None, description="with layout 'paper': prompts generated at a time (paper: 2); unset: all of a phase"
    )
    max_batch_sequences: Positive = Field(256, description="sequences decoded side by side")
    cuda_graphs: bool = Field(True, description="on a GPU: static cache and captured decode step")

    @model_validator(mode="after")
    def _servers_of_openai(self) -> EngineConfig:
        if (self.kind == "openai") != (self.servers is not None):
            raise ValueError(
                f"engine.kind={self.kind!r} with engine.servers {'unset' if self.servers is None else 'set'}: 'openai' "
                "needs engine.servers={urls: [...], model: ...}, other kinds take none"
            )
        return self

    @model_validator(mode="after")
    def _paper_layout(self) -> EngineConfig:
        if self.layout == "paper" and self.kind != "vllm":
            raise ValueError(f"engine.layout=paper with engine.kind={self.kind!r}: only 'vllm' swaps whole weights")
        if self.sub_batch is not None and self.layout != "paper":
            raise ValueError(f"engine.sub_batch={self.sub_batch} with engine.layout=adapters: it belongs to 'paper'")
        return self


def server_root(url: str) -> str:
    """``http://host:8000/v1/`` and ``http://host:8000`` name the same server."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
