"""config.json to ModelConfig, against transformers' own config classes."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import BASE, FAMILIES, Tiny

from tokenweave.config import ExpertsConfig
from tokenweave.config.families import FAMILIES as SUPPORTED
from tokenweave.config.foreign import model_config, read_config

LLAMA: dict[str, Any] = {**BASE, "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5}


def same(path: Path) -> None:
    """Every field that transformers computes with."""
    import transformers

    theirs = transformers.AutoConfig.from_pretrained(path)
    ours = read_config(path)
    for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "bos_token_id",
    ):  # fmt: skip
        assert getattr(ours, name) == getattr(theirs, name), name
    model = transformers.AutoModelForCausalLM.from_config(theirs)
    tensors = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    own, fused = (tensors.get(f"model.layers.0.self_attn.{name}_proj.weight", (0,))[0] for name in ("k", "qkv"))
    assert own or fused == (ours.num_attention_heads + 2 * ours.num_key_value_heads) * ours.head_dim
    assert fused or own == ours.num_key_value_heads * ours.head_dim
    for name, flag in (
        ("self_attn.q_proj.bias", ours.qkv_bias), ("self_attn.o_proj.bias", ours.output_bias),
        ("mlp.down_proj.bias", ours.mlp_bias), ("self_attn.q_norm.weight", ours.qk_norm),
        ("mlp.experts.down_proj", ours.layer_experts(0) is not None),
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
    for name in ("Qwen3", "SeedOss"):
        assert model_config({**LLAMA, "architectures": [f"{name}ForCausalLM"]}).head_dim == 128


def test_rms_norm_eps_left_out_is_the_familys_own() -> None:
    for name, eps in (("Llama", 1e-6), ("Mixtral", 1e-5), ("Arcee", 1e-5), ("Phi3", 1e-5)):
        assert model_config({**BASE, "architectures": [f"{name}ForCausalLM"]}).rms_norm_eps == eps


def test_biases_left_out_are_the_familys_own() -> None:
    for name, qkv in (("Llama", False), ("SeedOss", True)):
        config = model_config({**LLAMA, "architectures": [f"{name}ForCausalLM"]})
        assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (qkv, False, False), name


def test_seed_oss_with_its_own_fields() -> None:
    config = model_config({
        "architectures": ["SeedOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.1,
        "attention_out_bias": False, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 27648,
        "max_position_embeddings": 524288, "mlp_bias": False, "model_type": "seed_oss", "num_attention_heads": 80,
        "num_hidden_layers": 64, "num_key_value_heads": 8, "residual_dropout": 0.1, "rms_norm_eps": 1e-06,
        "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.55.0", "use_cache": True, "vocab_size": 155136,
    })  # fmt: skip
    assert (config.bos_token_id, config.eos_token_ids, config.rope.theta) == (0, (2,), 1e7)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.windows) == (True, False, False, ())


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


# sliding_window of each of three layers
WINDOWS = [
    ("MistralForCausalLM", {}, (4096,) * 3),
    ("MistralForCausalLM", {"sliding_window": None}, ()),
    ("MistralForCausalLM", {"sliding_window": 7}, (7,) * 3),
    ("MixtralForCausalLM", {"sliding_window": 7}, (7,) * 3),
    ("MixtralForCausalLM", {}, ()),
    ("Qwen2ForCausalLM", {"sliding_window": 16, "use_sliding_window": False, "max_window_layers": 0}, ()),
    ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, ()),
    ("Qwen2ForCausalLM", {"sliding_window": 16, "use_sliding_window": True}, (None,) * 3),  # from layer 28 on
    ("Qwen3ForCausalLM", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}, (None, None, 16)),
    ("Qwen2ForCausalLM", {"layer_types": ["full_attention"] * 3}, ()),
    (
        "Qwen2ForCausalLM",
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "use_sliding_window": True,
            "sliding_window": 5,
        },
        (5, None, 5),
    ),
    ("Qwen3MoeForCausalLM", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}, (16,) * 3),
    ("Qwen3MoeForCausalLM", {"sliding_window": 16, "use_sliding_window": False, "max_window_layers": 2}, ()),
]


@pytest.mark.parametrize(("architecture", "changes", "windows"), WINDOWS)
def test_windows(architecture: str, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    config = model_config({**LLAMA, "architectures": [architecture], **changes})
    assert config.windows == windows
    assert config.window(2) == (windows[2] if windows else None)


EXPERTS = [
    ("MixtralForCausalLM", {}, (8, 2, 150, True, (True,) * 3)),
    ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 3}, (4, 3, 150, True, (True,) * 3)),
    ("Qwen3MoeForCausalLM", {"num_experts": 4, "moe_intermediate_size": 7}, (4, 8, 7, False, (True,) * 3)),
    ("Qwen3MoeForCausalLM", {"norm_topk_prob": True}, (128, 8, 768, True, (True,) * 3)),
    ("Qwen3MoeForCausalLM", {"num_local_experts": 16}, (16, 8, 768, False, (True,) * 3)),
    ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 2}, (128, 8, 768, False, (False, True, False))),
    ("Qwen3MoeForCausalLM", {"mlp_only_layers": [0, 2]}, (128, 8, 768, False, (False, True, False))),
    ("Qwen3MoeForCausalLM", {"num_experts": 0}, None),
    ("Qwen3MoeForCausalLM", {"mlp_only_layers": [0, 1, 2]}, None),
]


@pytest.mark.parametrize(("architecture", "changes", "expected"), EXPERTS)
def test_experts(architecture: str, changes: dict[str, Any], expected: tuple | None) -> None:
    config = {**LLAMA, "architectures": [architecture], **changes}
    if expected is not None and expected[0] < expected[1]:
        with pytest.raises(ValueError, match="experts per token must be from 1 to the 4 there are, got 8"):
            model_config(config)
        return
    found = model_config(config)
    assert found.experts == (expected and ExpertsConfig(**dict(zip(FIELDS, expected, strict=True))))
    assert [found.layer_experts(i) is not None for i in range(3)] == list(expected[4] if expected else (False,) * 3)


FIELDS = ("count", "per_token", "intermediate_size", "normalised", "layers")

ROPES = [  # parameters, kind, positions
    ({"rope_type": "linear", "factor": 2.0}, "linear", 1024),
    ({"type": "dynamic", "factor": 4}, "dynamic", 2048),
    ({"rope_type": "yarn", "factor": 4.0}, "yarn", 2048),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, "yarn", 512),
    ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128}, "yarn", 1024),
    ({"rope_type": "yarn", "original_max_position_embeddings": 128}, "yarn", 512),
]


@pytest.mark.parametrize(("rope", "kind", "positions"), ROPES)
def test_positions_reach_as_far_as_the_rope_is_stretched(rope: dict[str, Any], kind: str, positions: int) -> None:
    config = model_config({**LLAMA, "rope_scaling": rope})
    assert (config.rope.kind, config.max_position_embeddings) == (kind, positions)


ACTIVATIONS = {
    "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
    None: "silu",
}  # fmt: skip


@pytest.mark.parametrize(("given", "expected"), ACTIVATIONS.items())
def test_activations(given: str | None, expected: str) -> None:
    config = model_config({**LLAMA, "hidden_act": given})
    assert config.activation == expected and config.gated_mlp
    plain = model_config({**LLAMA, "architectures": ["ArceeForCausalLM"]} | ({"hidden_act": given} if given else {}))
    assert plain.activation == (expected if given else "relu2") and not plain.gated_mlp


REFUSED = [
    ({"architectures": ["GPT2LMHeadModel"]}, "architectures .*GPT2LMHeadModel.*supported: Llama.*Qwen3MoeForCausalLM"),
    ({"architectures": None}, "architectures None.*supported: "),
    ({"architectures": []}, "architectures .*supported: "),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config .*awq.*supported: leaving it out"),
    ({"hidden_act": "xielu"}, "hidden_act 'xielu'.*supported: silu, .*gelu"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope'.*supported: default, linear"),
    ({"rope_scaling": {"rope_type": "linear"}}, "'linear' takes factor; got none"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3}}, "'linear' takes factor; got beta_fast"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "'yarn' takes factor, .* and may have attention_factor, .*; got"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": "2"}}, "factor must be a number"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": 0.5}}, "truncate must be true or false"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": -1.0}}, "factor .* must be positive"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor .* must be positive"),
    ({"sliding_window": 128}, "sliding_window 128 .*supported: leaving it out"),  # a Llama has none
    ({"position_embedding_type": "absolute"}, 'position_embedding_type "absolute".*supported: "rope"'),
    ({"learned_positions": True}, "learned_positions true is not supported; supported: leaving it out"),
    ({"qk_norm_over": "all heads"}, "qk_norm_over .*not supported"),
    ({"n_shared_experts": 1}, "n_shared_experts"),
    ({"alibi": True}, "alibi true"),
    ({"quantization": {"bits": 4}}, "quantization .*bits"),
    ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": 1}, "use_sliding_window must be true or false"),
    ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention"] * 2}, "layer_types .*each of 3 layers"),
    ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["linear_attention"] * 3}, "layer_types .*supported"),
    ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "windows must be .*at least 1"),
    ({"architectures": ["MistralForCausalLM"], "attention_bias": True}, "attention_bias true"),
    ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": ["0"]}, "mlp_only_layers must be .*integer"),
    ({"architectures": ["SeedOssForCausalLM"], "attention_out_bias": 1}, "attention_out_bias must be true or false"),
    ({"architectures": ["SeedOssForCausalLM"], "sliding_window": 9}, "sliding_window 9 .*supported: leaving it out"),
    ({"attention_out_bias": True}, "attention_out_bias true is not supported"),  # a Llama has one field for all four
    (
        {"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "yarn", "short_factor": [1.0]}},
        "'yarn' takes .*short_factor",
    ),
    ({"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "su"}}, "rope type 'su' is not supported"),
    ({"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 0}, "experts per token must be from 1"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "llama3.* takes .*low_freq_factor"),
    ({"rope_parameters": {"rope_type": "default", "mrope_section": [1]}}, "takes no parameters; got mrope_section"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope parameters .*one set for all layers"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5.*supported: 1"),
    ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor 0.25.*supported: 1"),
    ({"attention_multiplier": 0.01}, "attention_multiplier"),
    ({"residual_multiplier": 0.2}, "residual_multiplier"),
    ({"logits_scaling": 8.0}, "logits_scaling"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ({"use_qk_norm": True}, "use_qk_norm true.*supported: leaving"),
    ({"num_local_experts": 8}, "num_local_experts 8.*supported: leaving"),
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


HARMLESS = {
    "attention_dropout": 0.1, "residual_dropout": 0.1, "initializer_range": 0.02, "_name_or_path": "x",
    "unsloth_fixed": True, "transformers_version": "4.50.0", "pretraining_tp": 2, "use_cache": False,
    "transformers.js_config": {"dtype": "q4"},
    "is_llama_config": True, "rope_interleaved": False, "partial_rotary_factor": 1.0, "rope_theta": None,
    "anything_new": None, "anything_off": False, "anything_empty": [], "position_embedding_type": "rope",
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless(name: str) -> None:
    assert model_config({**LLAMA, name: HARMLESS[name]}) == model_config(LLAMA)


def test_every_family_has_a_tiny_model() -> None:
    tested = {tiny.config_class.replace("Config", "ForCausalLM") for tiny in FAMILIES}
    assert set(SUPPORTED) <= tested
