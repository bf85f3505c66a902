"""From text files to what the ranks read: a tokenizer, a model's description and token ids."""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tokenweave.config.foreign import model_config, read_config, read_json
from tokenweave.train.run import MODEL, TOKENS, write_whole

END = "<|endoftext|>"
_ALONG = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
          "generation_config.json")  # fmt: skip


def read_texts(paths: Sequence[Path]) -> tuple[list[str], str]:
    """The files' texts, and a hash of them. Raises ValueError naming a file that is not there or not UTF-8."""
    texts, digest = [], hashlib.sha256()
    for path in paths:
        try:
            data = path.read_bytes()
            texts.append(data.decode("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not a readable text file: {error}") from None
        digest.update(hashlib.sha256(data).digest())
    return texts, digest.hexdigest()


def prepare_new(out: Path, config_file: Path, texts: Sequence[str], dtype: str) -> None:
    """OUT/model of a model that starts from nothing: its config.json, and a tokenizer made for the texts.

    config_file: a config.json; its vocab_size is the most tokens that the tokenizer may have.
    """
    fields = read_json(config_file)
    try:
        wanted = model_config(fields).vocab_size
    except ValueError as error:
        raise ValueError(f"{config_file}: {error}") from None
    tokenizer = make_tokenizer(texts, wanted)
    end = tokenizer.token_to_id(END)
    fields |= {"vocab_size": tokenizer.get_vocab_size(), "dtype": dtype, "bos_token_id": end, "eos_token_id": end}
    directory = out / MODEL
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": END}
    write_whole(directory / "tokenizer_config.json", json.dumps(settings, indent=1) + "\n")
    write_whole(directory / "config.json", json.dumps(fields, indent=1) + "\n")


def prepare_from(out: Path, model: Path, dtype: str) -> None:
    """OUT/model of a model that is trained further: its own config.json and tokenizer."""
    read_config(model)
    directory = out / MODEL
    directory.mkdir(parents=True, exist_ok=True)
    if not (model / "tokenizer.json").is_file():
        raise ValueError(f"{model} has no tokenizer.json; training needs one to read the text")
    for name in _ALONG:
        if (model / name).is_file():
            shutil.copyfile(model / name, directory / name)
    fields: dict[str, Any] = read_json(model / "config.json") | {"dtype": dtype}
    fields.pop("torch_dtype", None)
    write_whole(directory / "config.json", json.dumps(fields, indent=1) + "\n")


def dropout(directory: Path) -> dict[str, float]:
    """The dropout that a config.json asks for, by field: training applies none."""
    return {
        name: value
        for name, value in read_json(directory / "config.json").items()
        if ("dropout" in name or name.endswith("pdrop")) and name != "classifier_dropout"
        and isinstance(value, int | float) and value > 0
    }  # fmt: skip


def make_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE, as GPT-2's: any text can be written with it. Raises ValueError below its 257 tokens."""
    if vocab_size < 257:
        raise ValueError(f"vocab_size must be at least 257, the bytes and the end of text, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokens(out: Path, texts: Sequence[str]) -> int:
    """OUT/tokens.npy: the ids of all texts, an end-of-text token behind each; returns their number."""
    directory = out / MODEL
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    config = read_config(directory)
    end = list(config.eos_token_ids[:1])
    ids: list[int] = []
    for text in texts:
        ids += tokenizer.encode(text, add_special_tokens=False).ids + end
    largest = max(ids, default=0)
    if largest >= config.vocab_size:
        raise ValueError(f"the tokenizer makes token {largest}, but the model has {config.vocab_size} tokens")
    beside = out / f".{TOKENS}"
    with open(beside, "wb") as file:
        np.save(file, np.array(ids, dtype=np.uint32))
    os.replace(beside, out / TOKENS)
    return len(ids)
