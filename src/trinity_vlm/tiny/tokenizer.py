"""The embedded VLM's own byte-level BPE tokenizer: 2,048 entries, Qwen's special tokens and chat layout.

Digits stand alone (so numbers are read digit by digit), grid cells such as ``b3`` are one token, and every text
round-trips: whatever has no merge falls back to bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import resources

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY_SIZE = 2048
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PLAIN_TOKENS = ("<think>", "</think>", "<answer>", "</answer>")
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}"
    "{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' or 'image' in part or 'image_url' in part %}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif 'text' in part %}{{- part.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
_SPLIT = r" ?[a-d][1-4]\b| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD_REPEATS = 40


def train_tokenizer(texts: Iterable[str], size: int = VOCABULARY_SIZE) -> PreTrainedTokenizerFast:
    """Learn exactly ``size`` entries, special tokens included, from ``texts`` and the packaged word list.

    Raises ValueError when the texts are too poor to fill the vocabulary.
    """
    raw = Tokenizer(models.BPE(unk_token=None))
    raw.normalizer = normalizers.NFC()
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(SPECIAL_TOKENS) - len(PLAIN_TOKENS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
    )
    raw.train_from_iterator(_with_vocabulary(texts), trainer)
    raw.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    raw.add_tokens([AddedToken(t, special=False, normalized=False) for t in PLAIN_TOKENS])
    if raw.get_vocab_size() != size:
        raise ValueError(f"the texts gave {raw.get_vocab_size()} entries instead of {size}; sample more text")
    return _wrap(raw)


def packaged_words() -> list[str]:
    """The words of vocabulary.txt, in order."""
    text = resources.files("trinity_vlm.tiny").joinpath("vocabulary.txt").read_text(encoding="utf-8")
    return [word for line in text.splitlines() if not line.startswith("#") for word in line.split()]


def _wrap(raw: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        bos_token=None,
        unk_token=None,
        extra_special_tokens=[t for t in SPECIAL_TOKENS if t not in ("<|im_end|>", "<|endoftext|>")],
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def _with_vocabulary(texts: Iterable[str]) -> Iterator[str]:
    yield from texts
    for word in packaged_words():
        yield from [f" {word}", word] * _WORD_REPEATS
    for column in "abcd":
        for row in "1234":
            yield from [f" {column}{row}", f"{column}{row}"] * _WORD_REPEATS * 10
