"""Phi 3 and Phi 4 with plain rope: fused tensors, and one window for all layers where there is one."""

from tokenweave.config.family import Family, windows_everywhere

FAMILY = Family(
    architecture="Phi3ForCausalLM",
    windows=windows_everywhere,
    fused=True,
    defaults={"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 32000},
)
