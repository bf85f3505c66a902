"""Fields of a foreign config: read by type, and counted, so that one that nobody reads cannot pass unseen."""

import json
from collections.abc import Mapping
from typing import Any

# Fields of derived checkpoints and of related models, with the values besides null at which they change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1,),
    "rotary_pct": (1,),
    "residual_multiplier": (1,),
    "embedding_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "position_embedding_type": ("rope", "rotary"),
    "pos_embd_type": ("rope", "rotary"),
    "is_causal": (True,),
    "is_decoder": (True, False),
    "is_llama_config": (True, False),
}
# What any other field has to be to be taken for switched off.
OFF: tuple[Any, ...] = (None, False, 0, "", [], {})

# Without effect on logits: about the file, training, or how transformers runs and samples.
HARMLESS = frozenset(
    """
    architectures model_type name_or_path transformers_version tokenizer_class task_specific_params prefix
    finetuning_task id2label label2id problem_type transformers.js_config pad_token_id sep_token_id
    decoder_start_token_id bos_token_id eos_token_id vocab_size_padded
    use_cache torchscript return_dict output_attentions output_hidden_states output_router_logits use_bfloat16
    tf_legacy_loss chunk_size_feed_forward attn_implementation use_flash_attn use_flash_attention
    use_flash_attention_2 flash_attention max_sequence_length max_seq_len seq_length model_max_length pretraining_tp
    initializer_range initializer_factor gradient_checkpointing neftune_noise_alpha z_loss
    router_aux_loss_coef router_z_loss_coef router_jitter_noise attention_dropout hidden_dropout activation_dropout
    classifier_dropout dropout resid_pdrop embd_pdrop attn_pdrop attn_dropout hidden_dropout_prob
    attention_probs_dropout_prob residual_dropout
    do_sample temperature top_k top_p typical_p min_length max_length max_new_tokens num_beams num_beam_groups
    diversity_penalty repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    num_return_sequences bad_words_ids early_stopping output_scores return_dict_in_generate forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    """.split()
)
HARMLESS_PREFIXES = ("_", "unsloth")
HARMLESS_SUFFIXES = ("_version",)


class Fields:
    """The fields of one config.json, over a family's defaults for those that are left out."""

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self._values = {**(defaults or {}), **given}
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """The value, or `default` where it is absent or null."""
        self._read.add(name)
        value = self._values.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._needed(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{name} must be an integer, got {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._needed(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} must be a number, got {value!r}")
        return float(value)

    def switch(self, by: bool | str) -> bool:
        """`by` itself, or the boolean field of that name; off where it is left out."""
        if isinstance(by, bool):
            return by
        value = self.get(by, False)
        if not isinstance(value, bool):
            raise ValueError(f"{by} must be true or false, got {value!r}")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers, or a single one."""
        value = self.get(name, [])
        items = value if isinstance(value, list) else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in items):
            raise ValueError(f"{name} must be an integer or a list of them, got {short(value)}")
        return tuple(items)

    def _needed(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is None:
            raise ValueError(f"{name} is missing")
        return value

    def refuse_unread(self) -> None:
        """Raise ValueError naming the first field that was not read and could change results."""
        for name, value in self._values.items():
            if name in self._read or name in HARMLESS or name.startswith(HARMLESS_PREFIXES):
                continue
            if name.endswith(HARMLESS_SUFFIXES) or value is None or value in NEUTRAL.get(name, OFF):
                continue
            neutral = ", ".join(json.dumps(v) for v in NEUTRAL.get(name, ())) or "leaving it out"
            raise ValueError(f"{name} {short(value)} is not supported; supported: {neutral}")


def short(value: object) -> str:
    """A value on one line, cut at 80 letters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
