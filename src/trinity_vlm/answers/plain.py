"""LaTeX and Unicode notation rewritten as one plain spelling that keeps case: ``\\dfrac{3}{4}`` becomes ``3/4``.

Grouping braces disappear only where parentheses keep the meaning, so ``x^{2y}`` is ``x^(2y)`` and never ``x^2y``,
and ``\\frac{1}{2x}`` is ``1/(2x)`` and never ``1/2x``. Braces that remain are set braces.
"""

from __future__ import annotations

import re


def word_set(text: str) -> frozenset[str]:
    """The blank-separated words of ``text``."""
    return frozenset(text.split())


LOWER_GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "ζ": "zeta", "η": "eta", "θ": "theta",
    "ι": "iota", "κ": "kappa", "λ": "lambda", "μ": "mu", "ν": "nu", "ξ": "xi", "ο": "omicron", "π": "pi", "ρ": "rho",
    "σ": "sigma", "ς": "sigma", "τ": "tau", "υ": "upsilon", "φ": "phi", "χ": "chi", "ψ": "psi", "ω": "omega",
}  # fmt: skip
UPPER_GREEK = {"Gamma": "Γ", "Delta": "Δ", "Theta": "Θ", "Lambda": "Λ", "Xi": "Ξ", "Pi": "Π", "Sigma": "Σ"} | {
    "Upsilon": "Υ",
    "Phi": "Φ",
    "Psi": "Ψ",
    "Omega": "Ω",
}
GREEK_COMMANDS = {name: name for name in LOWER_GREEK.values()} | {f"var{name}": name for name in LOWER_GREEK.values()}
FUNCTIONS = word_set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp det gcd lcm min max")
WRAPPERS = word_set(
    "text textbf textit textrm textsf texttt mathrm mathbf mathit mathsf mathtt mathbb mathcal mathnormal mbox hbox "
    "operatorname boldsymbol bm emph ce boxed fbox"
)
DROPPED = word_set(
    "left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr displaystyle textstyle limits nolimits rm bf it"
)
FRACTIONS = frozenset({"frac", "dfrac", "tfrac", "cfrac"})
SYMBOL_COMMANDS = {
    "cdot": "*", "times": "*", "ast": "*", "div": "/", "pm": "±", "mp": "∓", "le": "≤", "leq": "≤", "leqslant": "≤",
    "ge": "≥", "geq": "≥", "geqslant": "≥", "ne": "≠", "neq": "≠", "lt": "<", "gt": ">", "approx": "≈", "sim": "≈",
    "simeq": "≈", "infty": "∞", "to": "→", "rightarrow": "→", "longrightarrow": "→", "Rightarrow": "→", "circ": "°",
    "degree": "°", "cup": "∪", "cap": "∩", "in": "∈", "emptyset": "∅", "varnothing": "∅", "angle": "∠",
    "triangle": "△", "perp": "⊥", "parallel": "∥", "ldots": "...", "cdots": "...", "dots": "...", "prime": "'",
    "mid": "|", "lvert": "|", "rvert": "|", "vert": "|", "quad": " ", "qquad": " ", "lbrace": "{", "rbrace": "}",
    "lbrack": "[", "rbrack": "]", "colon": ":", "euro": "€", "pounds": "£", "AA": "Å", "ohm": "Ω",
}  # fmt: skip
THIN_SPACE = "\u2009"
ESCAPES = {
    ",": THIN_SPACE, ";": " ", ":": " ", "!": "", " ": " ", "%": "%", "$": "$", "&": "&", "#": "#", "_": "_",
    "{": "{", "}": "}", "\\": ";", "|": "|", "(": "", ")": "", "[": "", "]": "", "/": "", "-": "",
}  # fmt: skip
MAX_DEPTH = 40

_COMMAND = re.compile(r"\\([A-Za-z]+)\*?")
_SCRIPT_NUMBER = re.compile(r"[+-]?[0-9]+(?:\.[0-9]+)?")
_SIMPLE_SCRIPT = re.compile(r"[+-]?[0-9]+(?:\.[0-9]+)?[+-]?|[+\-*'∞]+|[A-Za-z]|" + "|".join(LOWER_GREEK.values()))
_ATOM = re.compile(r"[0-9]+(?:\.[0-9]+)?|\(*[A-Za-z]\)*|[A-Za-z]+|[A-Za-z]_?[0-9A-Za-z]")
_NEEDS_PARENTHESES = re.compile(r"[+\-=<>/,±∓*]")


def matching_braces(text: str) -> dict[int, int]:
    """Index of each balanced, unescaped ``{`` to the index of its ``}``."""
    pairs: dict[int, int] = {}
    stack: list[int] = []
    escaped = False
    for i, char in enumerate(text):
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif char == "{":
            stack.append(i)
        elif char == "}" and stack:
            pairs[stack.pop()] = i
    return pairs


def closing_bracket(text: str, start: int = 0) -> int:
    """Index of the bracket that closes the one at ``start``, of whichever kind, as in ``[0, 1)``; -1 for none."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth <= 0:
            return i
    return -1


def to_plain(text: str) -> str:
    """The plain spelling of ``text`` (NFKC applied, superscripts already written as ``^{..}``)."""
    return _Translator(text).run(0, len(text), 0)


class _Translator:
    """One pass over the text; every handler appends to ``out`` and returns the next index."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.close = matching_braces(text)

    def run(self, i: int, stop: int, depth: int) -> str:
        if depth > MAX_DEPTH:
            return self.text[i:stop]
        out: list[str] = []
        while i < stop:
            i = self._step(i, stop, out, depth)
        return "".join(out)

    def _step(self, i: int, stop: int, out: list[str], depth: int) -> int:
        char = self.text[i]
        if char == "\\":
            return self._command(i, stop, out, depth)
        if char in "^_":
            return self._script(i, stop, out, depth)
        if char == "{":
            return self._brace(i, stop, out, depth)
        if char in "√∛":
            return self._root(i + 1, stop, out, depth, index="3" if char == "∛" else "")
        if char in LOWER_GREEK:
            self._word(LOWER_GREEK[char], i + 1, stop, out)
        elif char == "~":
            out.append(" " if out else "≈")
        else:
            out.append(char)
        return i + 1

    def _word(self, word: str, after: int, stop: int, out: list[str]) -> None:
        """Append a name, kept apart from letters before and letters or digits after it."""
        if out and out[-1] and out[-1][-1].isalpha():
            out.append(" ")
        out.append(word)
        if after < stop and (self.text[after].isalnum() or self.text[after] == "\\"):
            out.append(" ")

    def _command(self, i: int, stop: int, out: list[str], depth: int) -> int:
        match = _COMMAND.match(self.text, i, stop)
        if match is None:
            following = self.text[i + 1] if i + 1 < stop else ""
            out.append(ESCAPES.get(following, following))
            return min(i + 2, stop)
        name, end = match[1], match.end()
        if name in DROPPED:
            return end + 1 if self.text[end : end + 1] == "." else end
        if name in WRAPPERS:
            content, end = self._argument(end, stop, depth)
            self._glue(content, out)
            return end
        if name in FRACTIONS:
            return self._fraction(end, stop, out, depth)
        if name == "sqrt":
            return self._root(end, stop, out, depth)
        if name in SYMBOL_COMMANDS:
            out.append(SYMBOL_COMMANDS[name])
        elif name in GREEK_COMMANDS or name in FUNCTIONS:
            self._word(GREEK_COMMANDS.get(name, name), self._skip_spaces(end, stop), stop, out)
            return self._skip_spaces(end, stop)
        elif name in UPPER_GREEK:
            out.append(UPPER_GREEK[name])
        elif self.text[end : end + 1] == "{" and end in self.close:
            content, end = self._argument(end, stop, depth)
            out.append(f"\\{name}({content})")
        else:
            out.append(f"\\{name} " if self.text[end : end + 1].isalnum() else f"\\{name}")
        return end

    @staticmethod
    def _glue(content: str, out: list[str]) -> None:
        """Append unwrapped text; a command name that ends in a letter is kept apart from it."""
        if out and content[:1].isalpha() and len(out[-1]) > 1 and out[-1][-1].isalpha():
            out.append(" ")
        out.append(content)

    def _skip_spaces(self, i: int, stop: int) -> int:
        while i < stop and self.text[i] == " ":
            i += 1
        return i

    def _argument(self, i: int, stop: int, depth: int, digits: bool = False) -> tuple[str, int]:
        """A braced group, one command with its arguments, or one character (a digit run when ``digits``)."""
        i = self._skip_spaces(i, stop)
        if i >= stop:
            return "", stop
        end = self.close.get(i)
        if end is not None and end < stop:
            return self.run(i + 1, end, depth + 1).strip(), end + 1
        if self.text[i] == "\\" and depth < MAX_DEPTH:
            out: list[str] = []
            end = self._command(i, stop, out, depth + 1)
            return "".join(out).strip(), end
        number = re.compile(r"[0-9]+(?:\.[0-9]+)?").match(self.text, i, stop) if digits else None
        end = number.end() if number else i + 1
        char = self.text[i:end]
        return LOWER_GREEK.get(char, char), end

    def _fraction(self, i: int, stop: int, out: list[str], depth: int) -> int:
        top, i = self._argument(i, stop, depth)
        bottom, i = self._argument(i, stop, depth)
        before = "".join(out[-3:]).rstrip()[-1:]
        after = self.text[self._skip_spaces(i, stop) : stop][:1]
        if before.isdigit() and re.fullmatch(r"[0-9]+", top) and re.fullmatch(r"[0-9]+", bottom):
            out.append(f" {top}/{bottom}")
            return i
        top = f"({top})" if _NEEDS_PARENTHESES.search(top) else top
        bottom = bottom if _ATOM.fullmatch(bottom) else f"({bottom})"
        glued = before.isalnum() or before in (")", "^", "_", "/") or after.isalnum() or (after and after in "^(\\{/!√")
        out.append(f"({top}/{bottom})" if glued else f"{top}/{bottom}")
        return i

    def _root(self, i: int, stop: int, out: list[str], depth: int, index: str = "") -> int:
        i = self._skip_spaces(i, stop)
        bracket = self.text.find("]", i, stop) if self.text[i : i + 1] == "[" else -1
        if bracket > 0 and not index:
            index, i = self.run(i + 1, bracket, depth + 1).strip(), bracket + 1
        if self.text[i : i + 1] == "(":
            content, end = "", i
        else:
            content, end = self._argument(i, stop, depth, digits=True)
            content = f"({content})"
        if index and index != "2":
            if not content:
                out.append(f"\\root({index})")
            else:
                out.append(f"{content}^(1/{index})")
        else:
            self._glue(f"sqrt{content}", out)
        return end

    def _script(self, i: int, stop: int, out: list[str], depth: int) -> int:
        mark = self.text[i]
        start = self._skip_spaces(i + 1, stop)
        number = _SCRIPT_NUMBER.match(self.text, start, stop)
        braced = start in self.close and self.close[start] < stop
        if number:
            content, end = number[0], number.end()
        elif braced or self.text[start : start + 1] == "\\" or self.text[start : start + 1] in LOWER_GREEK:
            content, end = self._argument(start, stop, depth)
        else:
            out.append(mark)
            return max(start, i + 1)
        following = self.text[end] if end < stop else ""
        if mark == "^":
            out.append(_superscript(content, following, out))
        elif re.fullmatch(r"\w+", content):
            out.append(f"_{content}" + (" " if braced and following.isalnum() else ""))
        else:
            out.append(f"_({content})")
        return end

    def _brace(self, i: int, stop: int, out: list[str], depth: int) -> int:
        end = self.close.get(i)
        if end is None or end >= stop:
            out.append("{")
            return i + 1
        inside = self.text[i + 1 : end]
        if inside == ",":
            out.append(",")
        else:
            content = self.run(i + 1, end, depth + 1)
            out.append(f"{{{content}}}" if _has_top_level_comma(inside) else content)
        return end + 1


def _superscript(content: str, following: str, out: list[str]) -> str:
    if content.startswith("°"):
        return content
    if content and not content.strip("'"):
        return content
    if content == "o" and out and out[-1][-1:].isdigit():
        return "°"
    if content in ("st", "nd", "rd", "th"):
        return content
    if _SIMPLE_SCRIPT.fullmatch(content) and not (content[-1].isdigit() and following.isdigit()):
        return f"^{content}"
    return f"^({content})"


def _has_top_level_comma(text: str) -> bool:
    """A comma that separates elements, not one that groups thousands as in ``{1,234}``."""
    if re.fullmatch(r"\s*[0-9]{1,3}(?:,[0-9]{3})+\s*", text):
        return False
    return "," in text.replace("{,}", "")
