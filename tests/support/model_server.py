"""The server on loopback with a real model behind it: the embedded one, with whatever adapters it was told to load."""

import asyncio
import base64
import io

from loop_factory import tiny_backbone
from openai_server import LoopbackServer
from PIL import Image
from safetensors.torch import load_file

from trinity_vlm.engine.protocol import GenerationRequest, Sampling
from trinity_vlm.engine.transformers_engine import TransformersEngine
from trinity_vlm.types import CallType, ImageRecord, Message, Prompt


class ModelServer(LoopbackServer):
    """deaf: answers with the base model wherever an adapter whose name begins with this is asked for."""

    def __init__(self):
        self.deaf = None
        self.backbone = tiny_backbone()
        self.engine = TransformersEngine(self.backbone, 16, False)
        super().__init__()

    def load(self, body):
        status, answer = super().load(body)
        if status == 200:
            state = load_file(f"{body['lora_path']}/adapter_model.safetensors")
            rank = next(t.shape[0] for name, t in state.items() if "lora_A" in name)
            with self.lock:
                self.backbone.add_adapter(body["lora_name"], rank, float(rank))
                self.backbone.load_adapter_state(body["lora_name"], state)
        return status, answer

    def chat(self, body):
        name = body["model"]
        adapter = None if name == self.model or (self.deaf and name.startswith(self.deaf)) else name
        prompt = prompt_of(body)
        sampling = Sampling(
            body["temperature"], body.get("top_p", 1.0), max(0, body.get("top_k", 0)), body["max_tokens"]
        )
        request = GenerationRequest(
            prompt, adapter, sampling, body.get("seed", 0), CallType.SOLVE, ("x",), want_logprobs=True
        )
        with self.lock:
            (completion,) = asyncio.run(self.engine.generate(request))
        choice = {
            "index": 0,
            "finish_reason": completion.finish_reason,
            "message": {"role": "assistant", "content": completion.text},
            "token_ids": list(completion.token_ids),
            "logprobs": {"content": [{"token": "?", "logprob": value} for value in completion.logprobs]},
        }
        counts = {"prompt_tokens": len(completion.prompt_token_ids), "completion_tokens": len(completion.token_ids)}
        prompt_ids = list(completion.prompt_token_ids)
        return 200, {"model": name, "choices": [choice], "usage": counts, "prompt_token_ids": prompt_ids}


def prompt_of(body):
    """The prompt that a chat body was made of; its images have no names."""
    messages, prefix = list(body["messages"]), ""
    if body.get("continue_final_message"):
        prefix = messages.pop()["content"]
        prefix = prefix if isinstance(prefix, str) else prefix[0]["text"]
    return Prompt(tuple(_message(m) for m in messages), prefix)


def _message(message):
    parts = message["content"]
    if isinstance(parts, str):
        return Message(message["role"], parts)
    text = "".join(part["text"] for part in parts if part["type"] == "text")
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    images = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB") for url in urls]
    return Message(message["role"], text, *(ImageRecord("sent", image) for image in images))
