"""How this program is called from where the user is: every command that it tells them to run works as typed."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

NAME = "trinity-vlm"


def invocation() -> str:
    """What to type for this program: its name where the shell finds it, else the path of what is running.

    For example ``trinity-vlm``, ``.venv/bin/trinity-vlm`` or ``.venv/bin/python -m trinity_vlm``. The name also where
    it was started as neither, as a library.
    """
    started_as = Path(sys.argv[0])
    if started_as.name == "__main__.py" and started_as.parent.name == "trinity_vlm":
        return f"{_typed(sys.executable, 'python')} -m trinity_vlm"
    return _typed(sys.argv[0], NAME) if started_as.stem == NAME else NAME


def as_typed(text: str) -> str:
    """``text`` with the commands in it as they are typed here.

    The package's texts know nothing of the shell and write such a command in backquotes: ```trinity-vlm keys```.
    """
    return text.replace(f"`{NAME} ", f"`{invocation()} ")


def _typed(path: str, name: str) -> str:
    """``name`` if the shell finds ``path`` under it, else the shortest path there, quoted. Links are not followed: a
    virtual environment's Python is a link to another one."""
    absolute = os.path.abspath(path)
    if (found := shutil.which(name)) is not None and os.path.abspath(found) == absolute:
        return name
    relative = os.path.relpath(absolute)
    relative = relative if os.sep in relative else os.path.join(os.curdir, relative)
    return shlex.quote(min(relative, absolute, key=len))
