"""A small real HTTP server on loopback that behaves like vLLM's, and can be killed, hung, overloaded or broken.

Its "model" is a script from a request's body to texts. Its tokenizer gives one id per character, and ``Tokens`` reads
prompts just so: what a trainer's backbone is to a real server.
"""

import json
import socket
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

from safetensors.torch import load_file

END_ID = 0
CONTEXT = 2000
FREE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 11\r\n\r\n<!doctype h"


class LoopbackServer:
    """vLLM's endpoints for one base model.

    script: body -> texts, one per sample; the default names the model that was asked
    faults: what happens to the next chat calls, one item each: a status, (status, headers), "hang", "garbage",
        "drop" (cut the connection), "late" (cut it when ``late`` is set)
    refuses: what is said, with status 400, to a prompt and budget beyond the context: its format fields are context,
        budget, prompt, total, bound (one more than what the budget leaves); None cuts the budget
    always: the same for every chat call once ``faults`` is empty; None: answer
    bodies: every chat body received; answered: those that were answered in full
    adapters: loaded adapter name -> path; weights: name -> sum of its tensors when it was loaded
    log: every request as "METHOD path", in order
    """

    def __init__(self, script=None, model="base", runtime_lora=True, token_ids=True):
        self.script = script or (lambda body: [f"by {body['model']}"] * body["n"])
        self.model = model
        self.runtime_lora = runtime_lora
        self.token_ids = token_ids
        self.faults, self.always, self.sick = [], None, False
        self.refuses = None
        self.bodies, self.answered, self.log, self.keys = [], [], [], []
        self.adapters, self.weights = {}, {}
        self.gate = threading.Event()
        self.gate.set()
        self.late = threading.Event()
        self.lock = threading.Lock()
        self.running = self.most_at_once = 0
        self.port = 0
        self.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        """Listen, on the same port as before; a new process knows no adapters."""
        self.adapters, self.weights = {}, {}
        self._http = _Listener(self.port, self)
        self.port = self._http.server_address[1]
        self._thread = threading.Thread(target=lambda: self._http.serve_forever(poll_interval=0.005), daemon=True)
        self._thread.start()

    def kill(self):
        """End like a killed process: nothing listens, every open connection is cut."""
        self._http.shutdown()
        self._http.server_close()
        self._http.cut()
        self.gate.set()
        self._thread.join()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        with suppress(OSError):
            self.kill()

    def chat(self, body):
        """The answer to a chat body, as vLLM forms it: (status, JSON)."""
        if body["model"] != self.model and body["model"] not in self.adapters:
            return _error(404, f"The model `{body['model']}` does not exist.", "model")
        if not Path(self.adapters.get(body["model"], "/")).is_dir():
            self.sick, self.always = True, 500  # vLLM ends when it has to read a directory that is gone
            return _error(500, "EngineCore encountered an issue", None)
        if body["n"] > 1 and body["temperature"] == 0:
            return _error(400, "n must be 1 when using greedy sampling", None)
        prompt = conversation(body)
        size, asked = len(prompt), body.get("max_tokens", 0)
        if self.refuses and size + asked > CONTEXT:
            numbers = {"prompt": size, "total": size + asked, "bound": CONTEXT - asked + 1}
            return _error(400, self.refuses.format(context=CONTEXT, budget=asked, **numbers), None)
        if size >= CONTEXT:
            return _error(400, f"This model's maximum context length is {CONTEXT} tokens.", "input_tokens")
        budget = min(asked or CONTEXT, CONTEXT - size)
        choices = [self._choice(i, text, body, budget) for i, text in enumerate(self.script(body))]
        counts = {"prompt_tokens": len(prompt), "completion_tokens": sum(c.pop("count") for c in choices)}
        answer = {"object": "chat.completion", "model": body["model"], "choices": choices[::-1], "usage": counts}
        if body.get("return_token_ids") and self.token_ids:
            answer["prompt_token_ids"] = list(ids(prompt))
        return 200, answer

    def _choice(self, index, text, body, budget):
        sampled = [*ids(text), END_ID][:budget]
        stopped = sampled[-1] == END_ID
        choice = {
            "index": index,
            "finish_reason": "stop" if stopped else "length",
            "message": {"role": "assistant", "content": text if stopped else text[:budget]},
            "count": len(sampled),
        }
        if body.get("return_token_ids") and self.token_ids:
            choice["token_ids"] = sampled
        if body.get("logprobs"):
            choice["logprobs"] = {"content": [{"token": "?", "logprob": -0.5} for _ in sampled]}
        return choice

    def load(self, body):
        name, path = body["lora_name"], body["lora_path"]
        if not name or not path:
            return _error(400, "Both 'lora_name' and 'lora_path' must be provided.", None)
        if name in self.adapters:
            return _error(400, f"The lora adapter '{name}' has already been loaded.", None)
        if not (Path(path) / "adapter_config.json").is_file():
            return _error(404, f"Loading lora {name} failed: No adapter found for {path}", None)
        tensors = load_file(Path(path) / "adapter_model.safetensors")
        self.weights[name] = float(sum(t.sum() for t in tensors.values()))
        self.adapters[name] = path
        return 200, "Success"

    def models(self):
        own = {"id": self.model, "parent": None, "max_model_len": CONTEXT}
        return 200, {"data": [own, *({"id": n, "parent": self.model, "root": p} for n, p in self.adapters.items())]}


class Tokens:
    """Reads prompts as the server does; the part of a backbone that an engine needs."""

    context = CONTEXT
    eos_ids = frozenset({END_ID})
    placeholder_ids = frozenset({7})
    adapter_names = ("policy", "verifier")
    model = SimpleNamespace(peft_config=dict.fromkeys(adapter_names, SimpleNamespace(lora_alpha=4.0)))

    def encode(self, prompt):
        return SimpleNamespace(input_ids=ids(self.render(prompt)))

    def render(self, prompt):
        return "".join(f"{m.role}:{'#' * (m.image is not None)}{m.text}\n" for m in prompt.messages) + (
            f"assistant:{prompt.assistant_prefix}"
        )

    def decode(self, token_ids):
        return "".join(chr(i - 1) for i in token_ids if i != END_ID)


def eventually(condition, seconds=30.0):
    """Wait for what other threads do; fails when it never happens."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)


def ids(text):
    """One id per character."""
    return tuple(ord(character) + 1 for character in text)


def conversation(body):
    """The prompt as text; ``#`` stands for an image."""
    lines = []
    for message in body["messages"]:
        parts = message["content"]
        if isinstance(parts, str):
            parts = [{"type": "text", "text": parts}]
        texts = ["#" if part["type"] == "image_url" else part["text"] for part in parts]
        lines.append(f"{message['role']}:{''.join(texts)}")
    opened = "" if body.get("continue_final_message") else "\nassistant:"
    return "\n".join(lines) + opened


def _error(status, message, parameter):
    return status, {"error": {"message": message, "param": parameter, "code": status}}


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 256

    def __init__(self, port, owner):
        self.owner = owner
        self.open = set()
        super().__init__(("127.0.0.1", port), _Handler)

    def cut(self):
        for connection in list(self.open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request, client_address):
        """Cut connections are part of the game."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self):
        super().setup()
        self.server.open.add(self.connection)

    def finish(self):
        self.server.open.discard(self.connection)
        super().finish()

    def log_message(self, *arguments):
        """Silent."""

    def do_GET(self):
        owner = self._note()
        if owner.sick == "hang":
            self._hold()
        elif self.path == "/v1/models":
            self._reply(*owner.models())
        elif self.path == "/health":
            self._reply(503 if owner.sick else 200, "")
        else:
            self._reply(404, {"detail": "Not Found"})

    def do_POST(self):
        owner = self._note()
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/chat/completions":
            self._chat(owner, {"n": 1, "temperature": 1.0, **body})
        elif owner.sick == "hang":
            self._hold()
        elif self.path == "/v1/load_lora_adapter" and owner.runtime_lora:
            self._reply(*owner.load(body))
        elif self.path == "/v1/unload_lora_adapter" and owner.runtime_lora:
            known = owner.adapters.pop(body["lora_name"], None)
            self._reply(*((200, "Success") if known else _error(404, "cannot be found", None)))
        else:
            self._reply(404, {"detail": "Not Found"})

    def _chat(self, owner, body):
        with owner.lock:
            owner.bodies.append(body)
            fault = owner.faults.pop(0) if owner.faults else owner.always
            owner.running += 1
            owner.most_at_once = max(owner.most_at_once, owner.running)
        try:
            owner.gate.wait(30)
            self._fault(owner, fault) if fault is not None else self._answer(owner, body)
        finally:
            with owner.lock:
                owner.running -= 1

    def _answer(self, owner, body):
        status, answer = owner.chat(body)
        self._reply(status, answer)
        if status == 200:
            owner.answered.append(body)

    def _fault(self, owner, fault):
        if fault == "hang":
            self._hold()
        elif fault == "garbage":
            self.wfile.write(FREE)
        elif fault in ("drop", "late"):
            if fault == "late":
                owner.late.wait(30)
            self.connection.shutdown(socket.SHUT_RDWR)
        else:
            status, headers = fault if isinstance(fault, tuple) else (fault, {})
            self._reply(*_error(status, f"told to answer {status}", None), headers)

    def _hold(self):
        """Say nothing until the client hangs up or the server is killed."""
        with suppress(OSError):
            self.connection.recv(1)
        self.close_connection = True

    def _note(self):
        owner = self.server.owner
        owner.log.append(f"{self.command} {self.path}")
        owner.keys.append(self.headers.get("Authorization"))
        return owner

    def _reply(self, status, content, headers=None):
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)
