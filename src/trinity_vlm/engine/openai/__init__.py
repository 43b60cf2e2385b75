"""The ``openai`` engine: text from a list of OpenAI-compatible servers (vLLM's own is the reference)."""

from trinity_vlm.engine.openai.checks import check_servers
from trinity_vlm.engine.openai.engine import OpenAIEngine
from trinity_vlm.engine_settings import ServersConfig, VerifierEngineConfig

__all__ = ["OpenAIEngine", "ServersConfig", "VerifierEngineConfig", "check_servers"]
