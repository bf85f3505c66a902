"""From text files to what the ranks read: a tokenizer, a model's description and token ids."""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tokenweave.config.foreign import read_config, read_json
from tokenweave.train.run import MODEL, TOKENS, write_whole
from tokenweave.train.start import Start

END = "<|endoftext|>"
_ALONG = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
          "generation_config.json")  # fmt: skip


def read_texts(paths: Sequence[Path]) -> tuple[list[str], str]:
    """The files' texts, and a hash of them. Raises ValueError naming a file that is not there or not UTF-8, or if there
    is no text in any."""
    texts, digest = [], hashlib.sha256()
    for path in paths:
        try:
            data = path.read_bytes()
            texts.append(data.decode("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not a readable text file: {error}") from None
        digest.update(hashlib.sha256(data).digest())
    if not any(texts):
        raise ValueError(f"there is no text to train on: {', '.join(map(str, paths))} is empty")
    return texts, digest.hexdigest()


def prepare_new(out: Path, start: Start, texts: Sequence[str], dtype: str) -> None:
    """OUT/model of a model that starts from nothing: its config.json, and a tokenizer made for the texts.

    The vocab_size of what it starts from is the most tokens that the tokenizer may have.
    """
    tokenizer = make_tokenizer(texts, start.config.vocab_size)
    end = tokenizer.token_to_id(END)
    fields = start.fields | {"vocab_size": tokenizer.get_vocab_size(), "dtype": dtype}
    fields |= {"bos_token_id": end, "eos_token_id": end}
    directory = out / MODEL
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": END}
    write_whole(directory / "tokenizer_config.json", json.dumps(settings, indent=1) + "\n")
    write_whole(directory / "config.json", json.dumps(fields, indent=1) + "\n")


def prepare_from(out: Path, start: Start, model: Path, dtype: str) -> None:
    """OUT/model of a model that is trained further: its own config.json and tokenizer."""
    directory = out / MODEL
    directory.mkdir(parents=True, exist_ok=True)
    for name in _ALONG:
        if (model / name).is_file():
            shutil.copyfile(model / name, directory / name)
    fields = start.fields | {"dtype": dtype}
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
    """Byte-level BPE, as GPT-2's: any text can be written with it. vocab_size: LEAST_VOCABULARY or more."""
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
