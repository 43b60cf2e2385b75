"""Prompt sets: a system and a user template for each of the six calls (Appendix F).

A system template is constant over a run; whatever varies stands in the user template, behind the image. So every call
of one kind shares the rubric, and all calls about one image share rubric and image: what a prefix cache needs.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Literal

import jinja2
from jinja2 import meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trinity_vlm.errors import ConfigError
from trinity_vlm.roles.text import strip_special_tokens
from trinity_vlm.types import CallType, ImageRecord, Message, Prompt

SHIPPED_SETS = ("paper", "short")
BASE_SET = "paper"

Turn = Literal["system", "user"]

USER_VARIABLES: Mapping[CallType, tuple[str, ...]] = {
    CallType.PROPOSE: (),
    CallType.SOLVE: ("question",),
    CallType.SCREEN: ("question", "answer"),
    CallType.REASON: ("question", "reasoning"),
    CallType.EQUIVALENCE: ("question", "reference", "prediction"),
    CallType.DISPUTE: ("question", "reference", "majority", "reasoning"),
}


def template_name(call: CallType, turn: Turn) -> str:
    """File name of a template, for example ``solve.user.jinja``."""
    return f"{call}.{turn}.jinja"


TEMPLATE_VARIABLES: Mapping[str, tuple[str, ...]] = {
    template_name(call, turn): USER_VARIABLES[call] if turn == "user" else ()
    for call in USER_VARIABLES
    for turn in ("system", "user")
}


class PromptSet:
    """Twelve checked templates. Build one with ``PromptSet.load``."""

    def __init__(
        self, name: str, texts: Mapping[str, str], origins: Mapping[str, str], own: Sequence[str] = ()
    ) -> None:
        """``texts`` and ``origins`` (where each text was read, for messages) are keyed by template file name.

        own: names of the templates that a user's folder gave
        Raises ConfigError for a template that does not compile, uses a variable its call does not have, or
        leaves one of its variables out.
        """
        self.name = name
        self.own = tuple(own)
        self._texts = dict(texts)
        environment = ImmutableSandboxedEnvironment(
            loader=jinja2.DictLoader(self._texts),
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates = {key: _checked_template(environment, key, origins[key]) for key in TEMPLATE_VARIABLES}

    @classmethod
    def load(cls, name_or_folder: str) -> PromptSet:
        """A shipped set ("paper", "short") or a folder of ``<call>.<system|user>.jinja`` files.

        A folder may hold only some of the twelve; the others come from "paper". Every template is rendered once
        here, so a faulty one raises ConfigError (naming file and variable) before a run starts and not within it.
        """
        paper = _read_shipped(BASE_SET)
        if name_or_folder in SHIPPED_SETS:
            label = f"prompt set {name_or_folder!r}: "
            return cls(name_or_folder, _read_shipped(name_or_folder), {key: f"{label}{key}" for key in paper})
        own = _read_folder(Path(name_or_folder))
        return cls(name_or_folder, paper | own, {key: f"{name_or_folder}/{key}" for key in paper}, sorted(own))

    def describe(self) -> str:
        """Which prompts these are; of a folder, which templates it gave and where the others come from."""
        if not self.own:
            return f"the shipped set {self.name!r}"
        rest = len(self._texts) - len(self.own)
        return f"yours: {', '.join(self.own)}" + (f"; the other {rest} from the set {BASE_SET!r}" if rest else "")

    @property
    def digest(self) -> str:
        """SHA-256 over the names and texts of all templates, in hex: equal digests mean equal prompts."""
        digest = hashlib.sha256()
        for key in sorted(self._texts):
            digest.update(f"{key}\0{self._texts[key]}\0".encode())
        return digest.hexdigest()

    def text(self, call: CallType, turn: Turn, **values: str) -> str:
        """One rendered turn; values are stripped of special tokens first, so no caller can forget to."""
        clean = {key: strip_special_tokens(value) for key, value in values.items()}
        return self._templates[template_name(call, turn)].render(clean).strip()

    def render(self, call: CallType, image: ImageRecord | None, assistant_prefix: str = "", **values: str) -> Prompt:
        """The prompt of one call: system rubric, then image, then the varying text."""
        return Prompt(
            (
                Message("system", self.text(call, "system")),
                Message("user", self.text(call, "user", **values), image),
            ),
            assistant_prefix,
        )


def _checked_template(environment: jinja2.Environment, key: str, origin: str) -> jinja2.Template:
    """Compile and dry-render one template, or raise ConfigError."""
    variables = TEMPLATE_VARIABLES[key]
    allowed = ", ".join(variables) or "no variables"
    probe = {variable: f"probe-{variable}-probe" for variable in variables}
    try:
        template = environment.get_template(key)
        source = environment.loader.get_source(environment, key)[0] if environment.loader else ""
        unknown = meta.find_undeclared_variables(environment.parse(source)) - set(variables) - set(environment.globals)
        if unknown:
            raise ConfigError(f"{origin}: unknown variable {', '.join(sorted(unknown))}; this template knows {allowed}")
        rendered = template.render(probe)
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{origin}: can't be rendered: {error}; this template knows {allowed}") from error
    missing = [variable for variable, value in probe.items() if value not in rendered]
    if missing or not rendered.strip():
        lack = f"never shows {', '.join('{{ ' + v + ' }}' for v in missing)}" if missing else "renders to an empty text"
        raise ConfigError(f"{origin}: {lack}; the model could not do this call")
    return template


def _read_shipped(name: str) -> dict[str, str]:
    folder = resources.files("trinity_vlm.roles").joinpath("prompts", name)
    return {key: folder.joinpath(key).read_text(encoding="utf-8") for key in TEMPLATE_VARIABLES}


def _with_suggestion(name: str) -> str:
    close = difflib.get_close_matches(name, TEMPLATE_VARIABLES, n=1)
    return f"{name} (did you mean {close[0]}?)" if close else name


def _read_folder(folder: Path) -> dict[str, str]:
    """The templates of a user's folder; ConfigError when it is missing, unreadable, empty, or holds a stray name."""
    if not folder.is_dir():
        raise ConfigError(
            f"roles.prompts={str(folder)!r}: neither a shipped set ({', '.join(SHIPPED_SETS)}) nor a folder; "
            "give the path of a folder with files such as solve.system.jinja"
        )
    try:
        texts = {
            file.name: file.read_text(encoding="utf-8") if file.name in TEMPLATE_VARIABLES else ""
            for file in sorted(folder.iterdir())
            if not file.name.startswith(".")
        }
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"roles.prompts={str(folder)!r}: can't read a template: {error}") from error
    strays = [name for name in texts if name not in TEMPLATE_VARIABLES]
    if strays or not texts:
        found = f"unknown template {', '.join(map(_with_suggestion, strays[:5]))}" if strays else "no template"
        raise ConfigError(
            f"roles.prompts={str(folder)!r}: {found}; it may hold {', '.join(TEMPLATE_VARIABLES)} and nothing else"
        )
    return texts
