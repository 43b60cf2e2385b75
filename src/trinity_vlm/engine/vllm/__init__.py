"""The in-process vLLM engine. Import ``trinity_vlm.engine.vllm.engine``; vLLM itself loads with the first engine."""
