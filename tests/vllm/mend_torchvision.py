"""Make torchvision importable beside a CPU torch where only its CUDA build could be had. For `make test-vllm` alone.

    python tests/vllm/mend_torchvision.py

Without its extension torchvision stops at the first line that describes the operators nms and qnms. They are declared
at the top of the installed package; its transforms, all that the image processors use, then work.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

_DECLARATION = """import torch as _torch
_operators = _torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    _operators.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def importable() -> bool:
    """Whether a fresh interpreter can import torchvision."""
    return (
        subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, check=False).returncode == 0
    )


def main() -> None:
    """Mend it unless it works; exits with 1 when mending did not help."""
    if importable():
        return
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        sys.exit("torchvision is not installed here")
    package = Path(spec.origin)
    package.write_text(_DECLARATION + package.read_text())
    if not importable():
        sys.exit("torchvision still can't be imported")


if __name__ == "__main__":
    main()
