"""Tiny checkpoints of the families that the plugin knows, written by transformers with random weights."""

import json
import shutil
from pathlib import Path
from typing import Any

VOCABULARY = 320
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # vLLM's attention on the CPU takes heads of 32 at the least; 4 query heads, so that 4 ranks have one each
    "llama": ("LlamaConfig", dict(head_dim=32, hidden_size=160, mlp_bias=True)),
    "qwen2": ("Qwen2Config", dict(hidden_size=128)),
    "qwen3": ("Qwen3Config", dict(head_dim=32, hidden_size=144)),
    "mixtral": ("MixtralConfig", dict(head_dim=32, hidden_size=160, num_local_experts=4, num_experts_per_tok=2)),
}
ARCHITECTURES = tuple(name.replace("Config", "ForCausalLM") for name, _ in FAMILIES.values())


def write(family: str, directory: Path, **changes: Any) -> Path:
    """The checkpoint's directory, below `directory`."""
    import torch
    import transformers

    name, own = FAMILIES[family]
    common = dict(
        num_hidden_layers=2, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    config = getattr(transformers, name)(**common | own | changes)
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.uniform_(0.5, 1.5)
            elif key == "lm_head.weight":
                parameter.normal_(0, 0.05)  # logits of about 1, as a trained model's: float32 is as exact as it can be
            else:
                parameter.normal_(0, 0.15)  # large enough that every part matters
    model.save_pretrained(directory / family)
    return directory / family


def write_int8(source: Path, directory: Path) -> Path:
    """The checkpoint with 8-bit weights, a scale for each row, and 8-bit activations, a scale for each token: the
    "compressed-tensors" format."""
    from safetensors.torch import load_file, save_file

    target = directory / f"{source.name}-int8"
    shutil.copytree(source, target)
    tensors: dict[str, Any] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scale = tensor.abs().amax(dim=1, keepdim=True) / 127
            tensors[name], tensors[f"{name}_scale"] = (tensor / scale).round().char(), scale
        else:
            tensors[name] = tensor
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    eight_bits = {"num_bits": 8, "type": "int", "symmetric": True}
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": eight_bits | {"strategy": "channel", "dynamic": False},
                "input_activations": eight_bits | {"strategy": "token", "dynamic": True},
            }
        },
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(config))
    return target


def with_even_heads(source: Path, target: Path) -> Path:
    """The same model with one more group of heads, all zeros, where its key/value heads are an odd number: vLLM deals
    out whole groups. The demo model has 3 groups of 3 heads; with 4 groups 2 ranks can share them."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((source / "config.json").read_text())
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    target.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, target)
    tensors: dict[str, Any] = {}
    for file in source.glob("*.safetensors"):
        tensors |= load_file(file)
    for name, tensor in tensors.items():
        zeros = heads // groups * size if "q_proj" in name or "o_proj" in name else size
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensors[name] = torch.cat([tensor, tensor.new_zeros(zeros, tensor.shape[1])])
        elif name.endswith("o_proj.weight"):
            tensors[name] = torch.cat([tensor, tensor.new_zeros(tensor.shape[0], zeros)], dim=1)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config |= {"num_attention_heads": heads + heads // groups, "num_key_value_heads": groups + 1, "head_dim": size}
    (target / "config.json").write_text(json.dumps(config))
    return target
