"""Tokenizers out of GGUF metadata, against byte-pair merging written out plainly."""

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer

from tokenweave.models.gguf import GGUFFile
from tokenweave.models.gguf_tokenizer import PRE_TOKENIZERS, build_tokenizer
from tokenweave.models.resolve import demo_file

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TEXTS = [
    "", " ", "a", "Hello world", "  leading", "trailing  ", "tabs\t\tand\nnewlines\n\n\n  x", "\r\n\r\n",
    "12345 3.14159 1,000,000", "mixed123abc456", "½ ² Ⅷ ٣ x²", "don't I'll we've THEY'RE it'S",
    "def f(x):\n    return x**2\n",
    "héllo wörld ñ", "e\u0301 combining", "日本語のテキスト", "Привет, мир! 你好",
    "emoji 😀👩\u200d👩\u200d👧\u200d👦🏳️\u200d🌈",
    "\u00a0nbsp\u2003em", "\x00\x01\x7f", "<|im_start|>user\nhi<|im_end|>\n", "a<|endoftext|>b", " <|im_end|> x",
    "<|im_start", "https://example.org/a?b=c&d=1#e", "αβγ" * 20, "x" * 577, " " * 33, "\n" * 13,
]  # fmt: skip


@cache
def byte_letters() -> dict[int, str]:
    """GPT-2's letters for the bytes: printable ones stand for themselves, the rest follow from U+0100 on."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}


class Plain:
    """Byte-level byte-pair encoding as published: merge the pair that was learnt first, again and again."""

    def __init__(self, metadata: dict[str, Any], words: list[str]) -> None:
        tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.special = [token for token, kind in zip(tokens, kinds, strict=True) if kind in (3, 4)]
        merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
        self.ranks = {pair: rank for rank, pair in enumerate(merges)}
        self.words = words

    def encode(self, text: str) -> list[int]:
        marked = regex.split("(" + "|".join(map(regex.escape, self.special)) + ")", text)
        ids = []
        for part in marked:
            if part in self.special:
                ids.append(self.ids[part])
                continue
            parts = [part]
            for pattern in self.words:
                parts = [piece for p in parts for piece in self._cut(pattern, p)]
            for word in parts:
                ids += self._merge([byte_letters()[b] for b in word.encode()])
        return ids

    def _cut(self, pattern: str, text: str) -> list[str]:
        ends = [0, *itertools.chain(*(match.span() for match in regex.finditer(pattern, text))), len(text)]
        return [text[a:b] for a, b in itertools.pairwise(ends) if a < b]

    def _merge(self, symbols: list[str]) -> list[int]:
        while len(symbols) > 1:
            rank, place = min((self.ranks.get(pair, 1 << 30), i) for i, pair in enumerate(itertools.pairwise(symbols)))
            if rank == 1 << 30:
                break
            symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
        return [self.ids[symbol] for symbol in symbols]


@pytest.fixture(scope="module")
def demo() -> dict[str, Any]:
    return GGUFFile(demo_file()).metadata


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text)[:20])
def test_demo_model(text: str, demo: dict[str, Any], demo_tokenizer: Tokenizer) -> None:
    ids = demo_tokenizer.encode(text).ids
    assert ids == Plain(demo, [r"\p{N}", GPT2]).encode(text)
    assert demo_tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.fixture(scope="module")
def demo_tokenizer(demo: dict[str, Any]) -> Tokenizer:
    tokenizer, _ = build_tokenizer(demo)
    assert tokenizer is not None
    return tokenizer


def test_demo_by_hand(demo: dict[str, Any], demo_tokenizer: Tokenizer) -> None:
    """Every digit is a token of its own; ids of the specials; the names that chat templates use."""
    tokens = demo_tokenizer.encode("in 2024 <|im_end|>").tokens
    assert tokens == ["in", "Ġ", "2", "0", "2", "4", "Ġ", "<|im_end|>"]
    assert demo_tokenizer.encode("<|endoftext|><|im_start|><|im_end|>").ids == [0, 1, 2]
    assert demo_tokenizer.decode([1, 28120, 2]) == demo_tokenizer.decode([28120])
    _, config = build_tokenizer(demo)
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert "SmolLM" in config["chat_template"]


def small(**changes: Any) -> dict[str, Any]:
    """256 bytes, a few merges, two specials, one token of the user's and an unused one."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "12 3", "' S"]
    tokens = [*byte_letters().values(), *(merge.replace(" ", "") for merge in merges)]
    tokens += ["<s>", "</s>", "<tool>", "[PAD]"]
    kinds = [1] * (len(tokens) - 4) + [3, 3, 4, 5]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens) - 4,
        "tokenizer.ggml.eos_token_id": len(tokens) - 3,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


WORDS = {
    "default": [GPT2], "gpt-2": [GPT2], "smollm": [r"\p{N}", GPT2], "llama-bpe": [LLAMA3], "llama3": [LLAMA3],
    "llama-v3": [LLAMA3], "qwen2": [LLAMA3.replace("{1,3}", "")], "deepseek-r1-qwen": [LLAMA3.replace("{1,3}", "")],
}  # fmt: skip


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_pre_tokenizers(pre: str) -> None:
    import unicodedata

    metadata = small(pre=pre)
    tokenizer, _ = build_tokenizer(metadata)
    assert tokenizer is not None
    plain = Plain(metadata, WORDS[pre])
    for text in [*TEXTS, "hello hello123 1234567", "it'S hello<tool>hello</s>", "\n hello\n\nhello  hello"]:
        composed = unicodedata.normalize("NFC", text) if "qwen" in pre else text
        assert tokenizer.encode(text, add_special_tokens=False).ids == plain.encode(composed), text


def test_word_that_is_a_token() -> None:
    """Llama 3 takes a word that is in the vocabulary whole, even where merges do not make it."""
    metadata = small(pre="llama-bpe")
    metadata["tokenizer.ggml.tokens"][metadata["tokenizer.ggml.tokens"].index("he")] = "world"
    metadata["tokenizer.ggml.merges"] = ["l l"]
    tokenizer, _ = build_tokenizer(metadata)
    assert tokenizer is not None and tokenizer.encode("world", add_special_tokens=False).tokens == ["world"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "hello"), ({"add_bos_token": True}, "<s> hello"), ({"add_eos_token": True}, "hello </s>"),
        ({"add_bos_token": True, "add_eos_token": True}, "<s> hello </s>"),
        ({"pre": "llama-bpe"}, "<s> hello"), ({"pre": "llama-bpe", "add_bos_token": False}, "hello"),
        ({"add_bos_token": True, "bos_token_id": None}, "hello"),
    ],
)  # fmt: skip
def test_around_a_text(changes: dict[str, Any], expected: str) -> None:
    tokenizer, _ = build_tokenizer(small(**changes))
    assert tokenizer is not None
    assert " ".join(tokenizer.encode("hello").tokens) == expected
    assert tokenizer.encode("hello", add_special_tokens=False).tokens == ["hello"]


def test_kinds_of_tokens() -> None:
    tokenizer, _ = build_tokenizer(small())
    assert tokenizer is not None
    ids = tokenizer.encode("<tool>hello</s>[PAD]").ids
    assert tokenizer.decode(ids) == "<tool>hello[PAD]"  # a control token is hidden, the user's is not
    assert tokenizer.token_to_id("[PAD]") is None  # and no text is an unused one
    assert tokenizer.decode([len(small()["tokenizer.ggml.tokens"]) - 1]) == ""


class Scores:
    """Sentencepiece's byte-pair mode: of all neighbours that make a token, join those with the best score."""

    def __init__(self, tokens: list[str], scores: list[float]) -> None:
        self.ids, self.scores = {token: i for i, token in enumerate(tokens)}, dict(zip(tokens, scores, strict=True))

    def encode(self, text: str) -> list[int]:
        symbols = list(("▁" + text).replace(" ", "▁")) if text else []
        while True:
            joined = [(self.scores.get(a + b, -1e9), -i) for i, (a, b) in enumerate(itertools.pairwise(symbols))]
            if not joined or max(joined)[0] == -1e9:
                break
            place = -max(joined)[1]
            symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
        known = ([self.ids[s]] if s in self.ids else [self.ids[f"<0x{b:02X}>"] for b in s.encode()] for s in symbols)
        return list(itertools.chain(*known))


def sentencepiece() -> dict[str, Any]:
    joined = ["▁h", "el", "lo", "▁hel", "▁hello", "ll", "▁w", "or", "▁wor", "ld", "▁world", "▁▁", "hello", "hel"]
    letters = sorted(set("".join(joined)))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *joined, *letters, "<|user|>"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(joined) + len(letters)), 4]
    scores = [0.0] * 259 + [-float(i) for i in range(len(joined))] + [-100.0 - i for i in range(len(letters))] + [0.0]
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip


def test_sentencepiece() -> None:
    metadata = sentencepiece()
    tokenizer, _ = build_tokenizer(metadata)
    assert tokenizer is not None
    plain = Scores(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"])
    plain_texts = [text for text in TEXTS if "<|" not in text]
    for text in [*plain_texts, "hello world", "helloworld  hello", "hellhello lloworld"]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == plain.encode(text), text
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("hello").tokens == ["<s>", "▁hello"]
    assert tokenizer.encode("hello</s>", add_special_tokens=False).tokens == ["▁hello", "</s>"]
    assert tokenizer.encode("<|user|>", add_special_tokens=False).tokens == ["<|user|>"]


def test_sentencepiece_without_prefix() -> None:
    tokenizer, _ = build_tokenizer(sentencepiece() | {"tokenizer.ggml.add_space_prefix": False})
    assert tokenizer is not None
    assert tokenizer.encode("hello", add_special_tokens=False).tokens == ["hello"]
    assert tokenizer.decode(tokenizer.encode(" hello", add_special_tokens=False).ids) == " hello"


def test_none() -> None:
    assert build_tokenizer({}) == (None, {})
    assert build_tokenizer({"tokenizer.ggml.model": "none"}) == (None, {})


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model 'bert' is not supported; supported: gpt2, llama"),
        (small(pre="tekken"), "tokenizer.ggml.pre 'tekken' is not supported; supported: default, .*qwen2"),
        (small(tokens=[]), "tokens is missing"),
        (small(token_type=[1, 1]), "token_type has 2 entries for 268 tokens"),
        (small(merges=["zz zz"]), "tokenizer is malformed"),
        (small(merges=["zz"]), "tokenizer is malformed"),
        (small(bos_token_id=9999), "bos_token_id 9999 is not one of 268 tokens"),
        (sentencepiece() | {"tokenizer.ggml.scores": []}, "scores has 0 entries"),
        (sentencepiece() | {"tokenizer.ggml.unknown_token_id": 9999}, "unknown_token_id 9999 is not one"),
    ],
)
def test_refused(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        build_tokenizer(metadata)
    assert "\n" not in str(caught.value)


def test_saved_and_read_again(tmp_path: Path, demo_tokenizer: Tokenizer) -> None:
    demo_tokenizer.save(str(tmp_path / "tokenizer.json"))
    again = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert all(again.encode(text).ids == demo_tokenizer.encode(text).ids for text in TEXTS)
