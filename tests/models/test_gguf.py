"""GGUF files as Hugging Face directories: every tensor under its name, in its order, with its values."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from models.gguf_files import write
from safetensors.torch import load_file
from tiny import FAMILIES, Tiny, build

from tokenweave.config.foreign import read_config
from tokenweave.models import gguf as converter
from tokenweave.models.gguf import GGUFFile, convert
from tokenweave.models.resolve import demo_file

F = gguf.GGMLQuantizationType
NAMES = ("llama", "llama-odd", "llama-bias", "qwen2", "qwen3", "seed-oss", "seed-oss-bias")
PLAIN = [tiny for tiny in FAMILIES if tiny.name.removesuffix("-tied") in NAMES]


def converted(path: Path, dtype: str) -> Path:
    directory = path.with_suffix(f".{dtype}")
    directory.mkdir()
    convert(path, directory, dtype)
    return directory


@pytest.mark.parametrize("tiny", PLAIN, ids=lambda tiny: tiny.name)
def test_transformers_loads_the_same_model(tiny: Tiny, tmp_path: Path) -> None:
    import transformers

    model = build(tiny)
    directory = converted(write(tmp_path / "tiny.gguf", model), "float32")
    read = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    expected = model.state_dict()
    assert read.state_dict().keys() == expected.keys()
    for name, tensor in read.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    ids = torch.tensor([[3, 141, 59, 26, 5, 358]])
    with torch.no_grad():
        assert torch.allclose(read(ids).logits, model(ids).logits, atol=1e-6)


def dequantised(values: np.ndarray, kind: F) -> np.ndarray:
    """Q8_0 and Q4_1 by their definition: blocks of 32 with a scale, and a minimum, in float16."""
    raw = gguf.quantize(values, kind).reshape(-1)
    blocks = []
    if kind == F.Q8_0:
        for block in raw.reshape(-1, 34):
            blocks.append(np.float64(block[:2].view(np.float16)[0]) * block[2:].view(np.int8).astype(np.float64))
    else:
        for block in raw.reshape(-1, 20):
            scale, least = block[:4].view(np.float16).astype(np.float64)
            digits = np.concatenate((block[4:] & 15, block[4:] >> 4)).astype(np.float64)
            blocks.append(scale * digits + least)
    return np.concatenate(blocks).reshape(values.shape)


@pytest.mark.parametrize("kind", [F.Q8_0, F.Q4_1])
@pytest.mark.parametrize("config_class", ["LlamaConfig", "Qwen2Config"])
def test_by_definition(kind: F, config_class: str, tmp_path: Path) -> None:
    model = build(Tiny("tiny", config_class, dict(intermediate_size=160)))
    path = write(tmp_path / "tiny.gguf", model, kind)
    tensors = load_file(converted(path, "float32") / "model.safetensors")
    for name, tensor in model.state_dict().items():
        expected = dequantised(tensor.numpy(), kind) if tensor.ndim == 2 else tensor.numpy()
        np.testing.assert_allclose(tensors[name].numpy(), expected, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("kind", [F.F16, F.BF16, F.Q4_0, F.Q4_1, F.Q5_0, F.Q5_1, F.Q8_0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_equals_the_package(kind: F, dtype: str, tmp_path: Path) -> None:
    model = build(Tiny("tiny", "Qwen2Config"))
    tensors = load_file(converted(write(tmp_path / "tiny.gguf", model, kind), dtype) / "model.safetensors")
    for name in ("model.embed_tokens.weight", "model.layers.2.self_attn.k_proj.weight", "lm_head.weight"):
        values = model.state_dict()[name].numpy()
        expected = torch.from_numpy(gguf.dequantize(gguf.quantize(values, kind), kind)).to(getattr(torch, dtype))
        assert torch.equal(tensors[name], expected), name


@pytest.mark.parametrize("kind", [F.Q4_K, F.Q5_K, F.Q6_K, F.Q3_K, F.Q2_K, F.IQ4_XS])
def test_types_the_package_only_reads(kind: F, tmp_path: Path) -> None:
    """Blocks of random bytes; the scales are made small floats."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (33, 2 * size), dtype=np.uint8)
    for start in range(0, 2 * size, size):
        for offset in (*range(0, 4, 2), *range(size - 4, size, 2)):
            raw[:, start + offset : start + offset + 2] = np.array([0.01], dtype=np.float16).view(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "k.gguf")
    assert file.shapes["token_embd.weight"] == (33, 2 * block)
    found = torch.cat(list(file.parts("token_embd.weight"))).numpy()
    np.testing.assert_array_equal(found, gguf.dequantize(raw, kind))


@pytest.mark.parametrize("part", [1, 64, 577, 1 << 22])
def test_in_parts(part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few rows go at once, permuted ones too."""
    model = build(Tiny("tiny", "LlamaConfig"))
    monkeypatch.setattr(converter, "_PART", part)
    tensors = load_file(converted(write(tmp_path / "tiny.gguf", model), "float32") / "model.safetensors")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in model.state_dict().items())


def test_llama3_frequencies(tmp_path: Path) -> None:
    """The file holds what the frequencies are divided by; the directory says what transformers makes them of."""
    rope = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=8192)  # fmt: skip
    sizes = dict(hidden_size=128, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=131072)
    model = build(Tiny("tiny", "LlamaConfig", sizes | dict(rope_parameters=rope)))
    plain = 1.0 / 500000.0 ** (torch.arange(0, 64, 2) / 64)
    table = (plain / model.model.rotary_emb.inv_freq).numpy()
    directory = converted(write(tmp_path / "tiny.gguf", model, extra={"rope_freqs.weight": table}), "float32")
    found = read_config(directory).rope
    assert (found.kind, found.theta, found.original_max_position_embeddings) == ("llama3", 500000.0, 8192)
    assert found.factor == 8.0
    assert "rope_freqs.weight" not in load_file(directory / "model.safetensors")


def test_own_dtype(tmp_path: Path) -> None:
    model = build(Tiny("tiny", "LlamaConfig", dict(intermediate_size=160)))
    for kind, expected in ((F.F32, "float32"), (F.F16, "float16"), (F.BF16, "bfloat16"), (F.Q8_0, "bfloat16")):
        directory = converted(write(tmp_path / f"{kind.name}.gguf", model, kind), "auto")
        assert read_config(directory).dtype == expected


def test_without_tokenizer(tmp_path: Path) -> None:
    directory = converted(write(tmp_path / "tiny.gguf", build(Tiny("tiny", "LlamaConfig"))), "float32")
    assert sorted(path.name for path in directory.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors",
    ]  # fmt: skip


def test_truncated(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", build(Tiny("tiny", "LlamaConfig")), tokens={"tokenizer_model": "none"})
    content = path.read_bytes()
    for size in [0, 1, 3, 13, 33, 100, 333, 577, 999, 2000, len(content) // 2, len(content) - 64]:
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match="tiny.gguf is truncated or not a GGUF file") as caught:
            GGUFFile(path)
        assert "\n" not in str(caught.value)


def test_corrupt_header(tmp_path: Path) -> None:
    """One flipped byte anywhere in the header: a clear refusal or a file that still reads, never another error."""
    model = build(Tiny("tiny", "LlamaConfig", dict(num_hidden_layers=1)))
    path = write(tmp_path / "tiny.gguf", model)
    content = path.read_bytes()
    refused = 0
    for place in range(0, 900, 7):
        damaged = bytearray(content)
        damaged[place] ^= 0x5A
        path.write_bytes(damaged)
        try:
            file = GGUFFile(path)
            file.config("float32")
            file.weights()
        except ValueError as error:
            refused += 1
            assert str(path) in str(error) and "\n" not in str(error)
    assert refused > 50


def written(path: Path, tensors: dict[str, Any], **metadata: Any) -> Path:
    writer = gguf.GGUFWriter(path, metadata.pop("arch", "llama"))
    for key, value in metadata.items():
        getattr(writer, f"add_{key}")(value)
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


SMALL = dict(context_length=32, embedding_length=8, feed_forward_length=8, block_count=1, head_count=2,
             layer_norm_rms_eps=1e-5)  # fmt: skip
EMBEDDING = {"token_embd.weight": (np.zeros((5, 8), np.float32), None)}


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        (EMBEDDING, {"arch": "gemma3"}, "architecture 'gemma3' is not supported; supported: llama, qwen2, qwen3"),
        (EMBEDDING | {"blk.0.ssm_a": EMBEDDING["token_embd.weight"]}, SMALL, "tensor blk.0.ssm_a is not supported"),
        (EMBEDDING | {"blk.0.post_attention_norm.weight": (np.zeros(8, np.float32), None)}, SMALL, "post_attention"),
        ({"token_embd.weight": (np.zeros((5, 8), np.int32), None)}, SMALL, "token_embd.weight is of type I32"),
        (EMBEDDING | {"blk.0.attn_q.weight": (np.zeros((6, 8), np.float32), None)}, SMALL, "has 6 rows, which 2 heads"),
        (EMBEDDING, SMALL | {"tokenizer_model": "bert"}, "tokenizer.ggml.model 'bert' is not supported; supported"),
        (EMBEDDING, SMALL | {"tokenizer_model": "gpt2"}, "tokenizer.ggml.tokens is missing"),
    ],
)
def test_refused(tensors: dict[str, Any], metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = written(tmp_path / "odd.gguf", tensors, **metadata)
    with pytest.raises(ValueError, match=message) as caught:
        converted(path, "float32")
    assert str(path) in str(caught.value)


def test_one_of_several_parts(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="one of 3 parts"):
        GGUFFile(tmp_path / "a.gguf")


def test_unknown_dtype(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", build(Tiny("tiny", "LlamaConfig")))
    with pytest.raises(ValueError, match="dtype 'int8' is not supported; supported: auto, float32"):
        convert(path, tmp_path, "int8")


def test_demo_model(tmp_path: Path) -> None:
    """The file of the demo package: its sizes, and values of three tensors computed from its bytes."""
    directory = tmp_path / "demo"
    directory.mkdir()
    convert(demo_file(), directory, "float32")
    config = read_config(directory)
    assert (config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers) == (9, 3, 30)
    assert (config.vocab_size, config.rope.theta, config.tie_word_embeddings) == (49152, 100000.0, True)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    tensors = load_file(directory / "model.safetensors")
    assert len(tensors) == 272 and "lm_head.weight" not in tensors
    content, held = demo_file().read_bytes(), {tensor.name: tensor for tensor in gguf.GGUFReader(demo_file()).tensors}
    for name, theirs in (("mlp.down_proj", "ffn_down"), ("self_attn.v_proj", "attn_v"), ("self_attn.q_proj", "attn_q")):
        tensor = held[f"blk.29.{theirs}.weight"]
        columns, rows = tensor.shape.tolist()
        start = tensor.data_offset
        raw = np.frombuffer(content[start : start + rows * columns // 32 * 20], np.uint8).reshape(-1, 20)
        scale, least = raw[:, :2].copy().view(np.float16), raw[:, 2:4].copy().view(np.float16)
        digits = np.concatenate((raw[:, 4:] & 15, raw[:, 4:] >> 4), axis=1).astype(np.float32)
        expected = (digits * scale.astype(np.float32) + least.astype(np.float32)).reshape(rows, columns)
        if theirs == "attn_q":  # row 2i+h of a head is row 32h+i of the model's
            expected = expected.reshape(9, 32, 2, columns).transpose(0, 2, 1, 3).reshape(rows, columns)
        np.testing.assert_array_equal(tensors[f"model.layers.29.{name}.weight"].numpy(), expected)
