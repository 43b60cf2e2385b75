"""The README.md of an exported adapter: what it is, what it was trained from, and how it is loaded."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from trinity_vlm.rundir import RunDirectory

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What ``--max-lora-rank`` takes."""
LOCAL_BASE = "PATH/OF/THE/BASE"
CARD = """\
---
{base_model}library_name: peft
tags:
- lora
- trinity-vlm
---

# A Solver trained without labels

A LoRA adapter (rank {rank}, alpha {alpha:g}) of `{base}`{revision}.
It was trained by trinity-vlm {version} from images alone: the model asked questions about them, verified and solved
them. These are the weights after step {step} of {steps}.

| | |
|---|---|
| run | {run_id} |
| digest of its fixed settings | {config_hash} |
| digest of its prompts | {prompt_digest} |
| images | `{images}` |
| method | *Trinity: Self-Evolving Vision-Language Models with a Self-Verifier* |

It was trained to answer in the form that the run's prompts ask for: reasoning, then the answer in a box. It has no
license of its own here: that of the base model applies to what is derived from it.

With peft:

```python
from peft import PeftModel
from transformers import AutoModelForImageTextToText

base = AutoModelForImageTextToText.from_pretrained({base_yaml}{revision_argument}, dtype="auto")
model = PeftModel.from_pretrained(base, "PATH/OF/THIS/FOLDER")
```

With vLLM, where it takes LoRA for this family:

```
vllm serve {base_shell}{revision_option} \\
  --enable-lora --max-lora-rank {vllm_rank} --lora-modules solver=PATH/OF/THIS/FOLDER
```

and then ask for the model `solver`.
"""


def write_card(folder: Path, run: RunDirectory, step: int) -> None:
    """Describe the adapter in ``folder``, the policy of ``run`` after ``step`` steps, as far as it is known."""
    adapter = json.loads((folder / "adapter_config.json").read_text())
    base, rank = adapter["base_model_name_or_path"], adapter["r"]
    if _is_local(base):
        base = LOCAL_BASE
    config, manifest = run.config, run.manifest
    revision, source = config.model.revision, config.images.source
    text = CARD.format(
        base=base,
        base_model="" if base == LOCAL_BASE else f"base_model: {json.dumps(base)}\n",
        base_yaml=json.dumps(base),
        base_shell=shlex.quote(base),
        rank=rank,
        vllm_rank=next((bound for bound in VLLM_RANKS if bound >= rank), rank),
        alpha=adapter["lora_alpha"],
        revision=f" at revision {revision}" if revision else "",
        revision_argument=f", revision={json.dumps(revision)}" if revision else "",
        revision_option=f" --revision {shlex.quote(revision)}" if revision else "",
        version=manifest.package_version,
        step=step,
        steps=config.steps,
        run_id=manifest.run_id,
        config_hash=manifest.config_hash,
        prompt_digest=manifest.prompt_digest or "unknown",
        images=", ".join(map(_public, [source] if isinstance(source, str) else source)),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def _is_local(place: str) -> bool:
    """Whether it names files of this machine rather than something on a hub."""
    path = Path(place).expanduser()
    return path.is_absolute() or any(mark in place for mark in "*?[") or path.exists()


def _public(source: str) -> str:
    """Of a place on this machine the last part."""
    return Path(source).expanduser().absolute().name if _is_local(source) else source
