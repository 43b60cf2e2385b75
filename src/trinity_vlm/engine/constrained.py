"""JSON schemas enforced token by token (Verifier calls only; it would change a policy)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from trinity_vlm.errors import EngineError

# The layout of json.dumps, and no other: free white space would let a weak model fill its budget with it.
_LAYOUT: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Compiled schemas of one tokenizer, whose end-of-turn token ends them. ``vocabulary``: the number of logits."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self._guide: LLTokenizer | None = None
        self._compiled: dict[str, LLMatcher] = {}

    def matcher(self, schema: Mapping[str, Any]) -> LLMatcher:
        """A fresh matcher of the schema; raises EngineError when the schema can't be enforced."""
        text = json.dumps(schema)
        if text not in self._compiled:
            if self._guide is None:
                self._guide = from_tokenizer(self.tokenizer, n_vocab=self.vocabulary)
            matcher = LLMatcher(self._guide, grammar(schema))
            if matcher.is_error():
                raise EngineError(f"json_schema can't be enforced: {matcher.get_error()}; schema: {text[:200]}")
            self._compiled[text] = matcher
        return self._compiled[text].deep_copy()


def grammar(schema: Mapping[str, Any]) -> str:
    """A closed object of required keys is spelled out, in order; any other schema is left to llguidance.

    Spelled out for the sake of enumerated numbers: llguidance knows 0.0 only as ``0``, so that a model about to write
    ``0.0`` would be led from ``0.`` to ``0.25``. Here ``0``, ``0.0`` and ``0.25`` are all words.
    """
    properties = schema.get("properties", {})
    if schema.get("type") != "object" or not properties or set(schema.get("required", ())) != set(properties):
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_LAYOUT)  # type: ignore[arg-type]
    pairs = ' ", " '.join(f"{json.dumps(json.dumps(key) + ': ')} value_{i}" for i, key in enumerate(properties))
    values = "\n".join(f"value_{i}: {_value(value)}" for i, value in enumerate(properties.values()))
    return LLMatcher.grammar_from_lark(f'start: "{{" {pairs} "}}"\n{values}\n')


def _value(schema: Mapping[str, Any]) -> str:
    if "enum" not in schema:
        return f"%json {json.dumps({**schema, 'x-guidance': _LAYOUT})}"
    words = {word: None for value in schema["enum"] for word in _spellings(value)}
    return "/" + "|".join(re.escape(word).replace("/", "\\/") for word in words) + "/"


def _spellings(value: object) -> list[str]:
    whole = isinstance(value, float) and value.is_integer()
    return [json.dumps(value), str(int(value))] if whole else [json.dumps(value)]  # type: ignore[call-overload]


class Constraint:
    """One completion under a schema, from its first token or from the first place where ``after`` was produced."""

    def __init__(self, grammars: Grammars, schema: Mapping[str, Any], after: str | None) -> None:
        self._grammars = grammars
        self._schema = schema
        self._after = after
        self._matcher = grammars.matcher(schema) if after is None else None
        self._tail: list[int] = []

    def bitmask(self) -> npt.NDArray[np.int32] | None:
        """Which ids may come next, one bit each from the lowest on [ceil(V / 32)]; None: all.

        Raises EngineError when the grammar engine gave up.
        """
        if self._matcher is None:
            return None
        mask = allocate_token_bitmask(1, self._grammars.vocabulary)
        fill_next_token_bitmask(self._matcher, mask)
        if self._matcher.is_error():
            raise EngineError(f"the schema's grammar failed: {self._matcher.get_error()}")
        return mask[0]

    def advance(self, token_id: int) -> None:
        """Take note of the token that was drawn."""
        if self._matcher is not None:
            self._matcher.consume_token(token_id)
        elif self._after is not None:
            self._tail = [*self._tail, token_id][-len(self._after) - 1 :]
            text = self._grammars.tokenizer.decode(self._tail, skip_special_tokens=False)
            if self._after in text:
                self._matcher = self._begun(text.split(self._after, 1)[1].lstrip())

    def _begun(self, overshoot: str) -> LLMatcher:
        """A matcher behind what the last token already wrote past the marker, or a fresh one if that doesn't fit."""
        matcher = self._grammars.matcher(self._schema)
        if overshoot:
            ids = self._grammars.tokenizer(overshoot, add_special_tokens=False)["input_ids"]
            if matcher.try_consume_tokens(ids) < len(ids):
                return self._grammars.matcher(self._schema)
        return matcher
