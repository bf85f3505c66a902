"""A GGUF file as a Hugging Face directory: its weights dequantised and renamed, its metadata as config files.

Dequantisation is the `gguf` package's own.
"""

import json
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from tokenweave.config.foreign import model_config
from tokenweave.config.foreign_gguf import config_fields, eos_token_ids
from tokenweave.models.gguf_tokenizer import build_tokenizer
from tokenweave.models.safetensors_writer import write_safetensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Reading a damaged file runs past its end or meets values that cannot be; the package does not check for them itself.
_DAMAGE = (ValueError, KeyError, IndexError, TypeError, OverflowError, MemoryError, struct.error)

_PART = 1 << 22  # elements dequantised at once: 16 MB in float32, a few times that while at work

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# In files of other architectures it is a norm behind the attention.
_SEED_OSS_NAMES = {"post_attention_norm": "post_attention_layernorm"}
_ROPE_TABLE = "rope_freqs.weight"


class GGUFFile:
    """An open GGUF file. Raises ValueError that names the file if it is truncated or is not one."""

    def __init__(self, path: str | Path) -> None:
        import gguf

        self.path = Path(path)
        try:
            reader = gguf.GGUFReader(self.path)
            self.metadata: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
        except _DAMAGE as error:
            raise ValueError(
                f"{self.path} is truncated or not a GGUF file ({type(error).__name__}: {error}); fetch it again"
            ) from None
        if self.metadata.get("split.count", 0) > 1:
            raise ValueError(f"{self.path} is one of {self.metadata['split.count']} parts; join them with gguf-split")
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.shapes = {name: tuple(reversed(tensor.shape.tolist())) for name, tensor in self.tensors.items()}

    def config(self, dtype: str) -> dict[str, Any]:
        """The fields of config.json, checked."""
        table = self.tensors.get(_ROPE_TABLE)
        try:
            fields = config_fields(self.metadata, self.shapes, None if table is None else table.data.tolist())
            fields["dtype"] = dtype
            model_config(fields)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None
        return fields

    def own_dtype(self) -> str:
        """The type that loses nothing a plain file has: float32 and float16 stay, all else becomes bfloat16."""
        kinds = {tensor.tensor_type.name for tensor in self.tensors.values() if len(tensor.shape) > 1}
        return {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}.get(frozenset(kinds), "bfloat16")

    def weights(self) -> dict[str, str]:
        """GGUF name -> Hugging Face name of every tensor."""
        return {name: self._rename(name) for name in self.tensors if name != _ROPE_TABLE}

    def parts(self, name: str) -> Iterator[torch.Tensor]:
        """A tensor's values in float32, some rows at a time, in Hugging Face's order of rows."""
        import gguf

        tensor = self.tensors[name]
        order = self._row_order(name)
        rows = max(1, _PART // max(1, tensor.data[:1].size))
        for start in range(0, tensor.data.shape[0], rows):
            chosen = slice(start, start + rows) if order is None else order[start : start + rows]
            try:
                values = gguf.dequantize(np.array(tensor.data[chosen]), tensor.tensor_type)
            except NotImplementedError:
                kind = tensor.tensor_type.name
                raise ValueError(f"{self.path}: {name} is of type {kind}, which is not supported") from None
            yield torch.from_numpy(values)

    def _rename(self, name: str) -> str:
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)", name)
        names = _NAMES | (_SEED_OSS_NAMES if self.metadata.get("general.architecture") == "seed_oss" else {})
        if match is None or match[2] not in names:
            raise ValueError(f"{self.path}: tensor {name} is not supported; supported: {', '.join(names)}")
        layer, stem, kind = match.groups()
        return f"{names[stem]}.{kind}" if layer is None else f"model.layers.{layer}.{names[stem]}.{kind}"

    def _row_order(self, name: str) -> np.ndarray | None:
        """Llama's files hold each query and key head with the two halves of its rotation interleaved."""
        match = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", name)
        if match is None or self.metadata["general.architecture"] != "llama":
            return None
        heads = self.metadata["llama.attention.head_count"]
        if match[1] == "k":
            heads = self.metadata.get("llama.attention.head_count_kv", heads)
        rows = self.shapes[name][0]
        if rows % (2 * heads):
            raise ValueError(f"{self.path}: {name} has {rows} rows, which {heads} heads do not divide")
        return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).ravel()


def convert(path: str | Path, directory: Path, dtype: str) -> None:
    """Write the model in a GGUF file into `directory`, which exists, as transformers would have saved it.

    dtype: "float32", "bfloat16", "float16", or "auto" for the file's own, bfloat16 where that is a quantised one.
    Raises ValueError, naming the file, if it is damaged or holds what is not supported.
    """
    file = GGUFFile(path)
    dtype = file.own_dtype() if dtype == "auto" else dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; supported: auto, {', '.join(DTYPES)}")
    names = file.weights()
    config = file.config(dtype)
    _write_json(directory / "config.json", config)
    ids = {"bos_token_id": config["bos_token_id"], "eos_token_id": eos_token_ids(file.metadata)}
    _write_json(directory / "generation_config.json", ids)
    try:
        tokenizer, tokenizer_config = build_tokenizer(file.metadata)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if tokenizer is not None:
        tokenizer.save(str(directory / "tokenizer.json"))
        _write_json(directory / "tokenizer_config.json", tokenizer_config)
    shapes = {hf_name: file.shapes[name] for name, hf_name in names.items()}
    parts = (part for name in names for part in file.parts(name))
    total = sum(int(np.prod(shape)) for shape in shapes.values()) * DTYPES[dtype].itemsize
    hidden = not sys.stderr.isatty()
    with tqdm(total=total, desc=f"converting {file.path.name}", unit="B", unit_scale=True, disable=hidden) as bar:
        for size in write_safetensors(directory / "model.safetensors", shapes, DTYPES[dtype], parts):
            bar.update(size)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
