"""The tokenizer in a GGUF file's metadata as one of the `tokenizers` package."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # tokenizer.ggml.token_type


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """How a text is cut into words before byte-pair merges; `split` goes before the mapping of bytes."""

    split: Callable[[], pre_tokenizers.PreTokenizer] | None = None
    gpt2_words: bool = False  # cut with GPT-2's pattern
    nfc: bool = False
    ignore_merges: bool = False  # a word that is a token is that token
    add_bos: bool = False  # unless the file says


def _pattern(digits: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return lambda: pre_tokenizers.Split(Regex(pattern), behavior="isolated")


_GPT2 = PreTokenizer(gpt2_words=True)
_DIGIT_BY_DIGIT = PreTokenizer(split=lambda: pre_tokenizers.Digits(individual_digits=True), gpt2_words=True)
_LLAMA3 = PreTokenizer(split=_pattern(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer(split=_pattern(r"\p{N}"), nfc=True)

# tokenizer.ggml.pre
PRE_TOKENIZERS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _DIGIT_BY_DIGIT,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def build_tokenizer(metadata: Mapping[str, Any]) -> tuple[Tokenizer | None, dict[str, Any]]:
    """The tokenizer and the fields of its tokenizer_config.json; (None, {}) for a file without one.

    Raises ValueError that names an unsupported or malformed part.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model in (None, "none"):
        return None, {}
    if model not in _BUILDERS:
        raise ValueError(f"tokenizer.ggml.model {model!r} is not supported; supported: {', '.join(_BUILDERS)}")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ValueError("tokenizer.ggml.tokens is missing")
    kinds = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens")
    named = _named_tokens(metadata, tokens)
    try:
        tokenizer, add_bos = _BUILDERS[model](metadata, tokens, kinds)
    except ValueError:
        raise
    except Exception as error:  # the package raises bare Exception, e.g. for a merge of tokens that are not there
        first, *_ = str(error).split("\n")
        raise ValueError(f"the file's tokenizer is malformed: {first}") from None
    for special in (True, False):
        wanted = (_UNKNOWN, _CONTROL) if special else (_USER_DEFINED,)
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in wanted
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    _surround(tokenizer, metadata, tokens, add_bos)
    config = {**named, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    template = metadata.get("tokenizer.chat_template")
    return tokenizer, config if template is None else config | {"chat_template": template}


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise ValueError(f"tokenizer.ggml.pre {name!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}")
    pre = PRE_TOKENIZERS[name]
    # Unused entries pad the vocabulary to a round number: no text gives them, and they decode to nothing.
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _UNUSED}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.gpt2_words)
    tokenizer.pre_tokenizer = byte_level if pre.split is None else pre_tokenizers.Sequence([pre.split(), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> tuple[Tokenizer, bool]:
    """Llama 2's kind: merges follow the scores of what they make, and unknown characters become bytes."""
    scores = metadata.get("tokenizer.ggml.scores", [])
    if len(scores) != len(tokens):
        raise ValueError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _UNUSED}
    plain = {token for token, i in vocab.items() if kinds[i] in (_NORMAL, _USER_DEFINED)}
    ranked = [
        (-scores[vocab[token]], -cut, (token[:cut], token[cut:]))
        for token in plain
        for cut in range(1, len(token))
        if token[:cut] in plain and token[cut:] in plain
    ]
    merges = [pair for _, _, pair in sorted(ranked)]
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    space = [normalizers.Replace(" ", "▁")]
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *space] if prefix else space)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer, True


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _surround(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str], add_bos: bool) -> None:
    """Have `encode` put the beginning and end tokens around a text, where the file asks for it."""
    template, used = ["$A"], []
    for key, default, position in (("bos", add_bos, 0), ("eos", False, 2)):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if metadata.get(f"tokenizer.ggml.add_{key}_token", default) and token_id is not None:
            template.insert(position, tokens[token_id])
            used.append((tokens[token_id], token_id))
    if used:
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=used)


def _named_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    """bos_token, eos_token, ... as text."""
    named = {}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise ValueError(f"tokenizer.ggml.{theirs}_token_id {token_id} is not one of {len(tokens)} tokens")
        named[f"{ours}_token"] = tokens[token_id]
    return named
