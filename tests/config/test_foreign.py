"""config.json to ModelConfig, against transformers' own config classes."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import BASE, FAMILIES, Tiny

from tokenweave.config.foreign import FAMILIES as SUPPORTED
from tokenweave.config.foreign import model_config, read_config

LLAMA: dict[str, Any] = {**BASE, "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5}


def same(path: Path) -> None:
    """Every field that transformers computes with."""
    import transformers

    theirs = transformers.AutoConfig.from_pretrained(path)
    ours = read_config(path)
    for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "bos_token_id",
    ):  # fmt: skip
        assert getattr(ours, name) == getattr(theirs, name), name
    model = transformers.AutoModelForCausalLM.from_config(theirs)
    tensors = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert tensors["model.layers.0.self_attn.k_proj.weight"][0] == ours.num_key_value_heads * ours.head_dim
    for name, flag in (
        ("self_attn.q_proj.bias", ours.qkv_bias), ("self_attn.o_proj.bias", ours.output_bias),
        ("mlp.down_proj.bias", ours.mlp_bias), ("self_attn.q_norm.weight", ours.qk_norm),
    ):  # fmt: skip
        assert (f"model.layers.0.{name}" in tensors) == flag, name
    rope = theirs.rope_parameters
    assert (ours.rope.kind, ours.rope.theta) == (rope["rope_type"], rope["rope_theta"])
    if ours.rope.kind == "llama3":
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            assert getattr(ours.rope, name) == rope[name], name


@pytest.mark.parametrize("tiny", FAMILIES, ids=lambda tiny: tiny.name)
def test_saved_by_transformers(tiny: Tiny, tmp_path: Path) -> None:
    import transformers

    config = getattr(transformers, tiny.config_class)(**{**BASE, **tiny.changes})
    config.architectures = [tiny.config_class.replace("Config", "ForCausalLM")]
    config.save_pretrained(tmp_path)
    same(tmp_path)


OLDER = {
    "plain": {},
    "no kv heads": {"num_key_value_heads": None},
    "theta outside": {"rope_theta": 500000.0, "torch_dtype": "bfloat16"},
    "llama3": {
        "rope_theta": 500000.0,
        "rope_scaling": {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 128, "rope_type": "llama3"},
    },
    "llama3 by type": {
        "rope_scaling": {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
                         "original_max_position_embeddings": 128, "type": "llama3"},
    },
    "llama3 of its whole context": {
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"},
    },
    "null scaling": {"rope_scaling": None, "pretraining_tp": 1, "sliding_window": None},
    "head_dim": {"head_dim": 24},
    "biases": {"attention_bias": True, "mlp_bias": True},
}  # fmt: skip


@pytest.mark.parametrize("changes", OLDER.values(), ids=OLDER)
def test_older_style(changes: dict[str, Any], tmp_path: Path) -> None:
    config = {key: value for key, value in {**LLAMA, "model_type": "llama", **changes}.items()}
    if changes.get("num_key_value_heads", 0) is None:
        del config["num_key_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    same(tmp_path)


def test_head_dim_left_out_is_the_familys_own() -> None:
    assert model_config(LLAMA).head_dim == 16
    assert model_config({**LLAMA, "architectures": ["Qwen3ForCausalLM"]}).head_dim == 128


def test_dtype_names() -> None:
    assert model_config(LLAMA).dtype == "float32"
    assert model_config({**LLAMA, "torch_dtype": "float16"}).dtype == "float16"
    assert model_config({**LLAMA, "dtype": "torch.bfloat16"}).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("config_ids", "generation", "expected"),
    [
        (2, {}, (2,)), ([2, 7], {}, (2, 7)), (2, {"eos_token_id": [5, 6]}, (5, 6)), (2, {"eos_token_id": None}, (2,)),
        (None, {"eos_token_id": 9}, (9,)), (None, {}, ()), ([], {}, ()),
    ],
)  # fmt: skip
def test_end_of_text_ids(config_ids: Any, generation: dict, expected: tuple, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": config_ids}))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_config(tmp_path).eos_token_ids == expected


WINDOWS = [
    ("MistralForCausalLM", {}, False),  # left out, it is 4096
    ("MistralForCausalLM", {"sliding_window": None}, True),
    ("MistralForCausalLM", {"sliding_window": 512}, True),  # as long as the context
    ("MistralForCausalLM", {"sliding_window": 511}, False),
    ("Qwen2ForCausalLM", {"sliding_window": 16, "use_sliding_window": False}, True),
    ("Qwen3ForCausalLM", {"sliding_window": 16, "use_sliding_window": True}, False),
    ("Qwen2ForCausalLM", {"layer_types": ["full_attention"] * 3}, True),
    ("Qwen2ForCausalLM", {"layer_types": ["full_attention", "sliding_attention"]}, False),
]


@pytest.mark.parametrize(("architecture", "changes", "fine"), WINDOWS)
def test_windows(architecture: str, changes: dict[str, Any], fine: bool) -> None:
    config = {**LLAMA, "architectures": [architecture], **changes}
    if architecture == "MistralForCausalLM" and not changes:
        config["max_position_embeddings"] = 8192
    if fine:
        model_config(config)
    else:
        with pytest.raises(ValueError, match=r"(sliding_window|layer_types) .*not supported; supported: "):
            model_config(config)


REFUSED = [
    ({"architectures": ["GPT2LMHeadModel"]}, "architectures .*GPT2LMHeadModel.*supported: Llama.*Qwen3ForCausalLM"),
    ({"architectures": None}, "architectures None.*supported: "),
    ({"architectures": []}, "architectures .*supported: "),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config .*awq.*supported: leaving it out"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'.*supported: silu"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn'.*supported: default, llama3"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear'.*supported"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "llama3.* takes .*low_freq_factor"),
    ({"rope_parameters": {"rope_type": "default", "mrope_section": [1]}}, "takes no parameters; got mrope_section"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope parameters .*one set for all layers"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5.*supported: 1"),
    ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor 0.25.*supported: 1"),
    ({"attention_multiplier": 0.01}, "attention_multiplier"),
    ({"residual_multiplier": 0.2}, "residual_multiplier"),
    ({"logits_scaling": 8.0}, "logits_scaling"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ({"use_qk_norm": True}, "use_qk_norm true.*supported: false"),
    ({"num_local_experts": 8}, "num_local_experts 8.*supported: 0"),
    ({"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}, "auto_map"),
    ({"is_causal": False}, "is_causal"),
    ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'.*supported: float32, bfloat16, float16"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"hidden_size": "64"}, "hidden_size must be an integer, got '64'"),
    ({"num_attention_heads": True}, "num_attention_heads must be an integer"),
    ({"num_attention_heads": 0}, "num_attention_heads must be at least 1"),
    ({"num_attention_heads": 5}, r"num_attention_heads \(5\) must be a multiple of num_key_value_heads \(2\)"),
    ({"head_dim": 13}, "head_dim must be even"),
    ({"rms_norm_eps": "tiny"}, "rms_norm_eps must be a number"),
    ({"attention_bias": "yes"}, "attention_bias must be true or false"),
    ({"eos_token_id": ["</s>"]}, "eos_token_id must be an integer"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    with pytest.raises(ValueError, match=message) as caught:
        read_config(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no config.json"):
        read_config(tmp_path)
    for text in ("", "{", "[]", '"x"', "\x00"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match="config.json"):
            read_config(tmp_path)


def test_every_family_has_a_tiny_model_or_a_row_here() -> None:
    tested = {tiny.config_class.replace("Config", "ForCausalLM") for tiny in FAMILIES} | {row[0] for row in WINDOWS}
    assert set(SUPPORTED) <= tested
