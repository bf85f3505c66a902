"""The dynamic rope through the engine: prompts in chunks, in lanes and beside others, as transformers turns them."""

from pathlib import Path

import torch
from tiny import Tiny, build

from tokenweave import LLM, SamplingParams

ROPE = dict(rope_type="dynamic", rope_theta=10000.0, factor=8.0)
DYNAMIC = Tiny("dynamic", "LlamaConfig", dict(max_position_embeddings=16, rope_parameters=ROPE), seed=1)
PROMPTS = [[3 + (7 * i) % 500 for i in range(25)], [3 + (7 * i) % 500 for i in range(37)], [11] * 5]
NEW = 12


@torch.no_grad()
def test_answers_are_transformers(tmp_path: Path) -> None:
    """The second prompt begins with the first, whose keys it must not reuse: another length, other angles."""
    from transformers import DynamicCache

    model = build(DYNAMIC)
    model.save_pretrained(tmp_path)
    expected = []
    for prompt in PROMPTS:
        cache, new, found = DynamicCache(config=model.config), prompt, []
        model.model.rotary_emb.max_seq_len_cached = 0  # it grows with the longest it has seen
        for _ in range(NEW):
            found.append(int(model(torch.tensor([new]), cache=cache).logits[0, -1].argmax()))
            new = found[-1:]
        expected.append(found)
    params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    for mode in ("fused", "weave"):
        with LLM(
            tmp_path, tensor_parallel_size=2, mode=mode, dtype="float32", max_tokens_per_step=9, block_size=4
        ) as llm:
            alone = [llm.generate([prompt], params, progress=False)[0].token_ids for prompt in PROMPTS]
            together = [answer.token_ids for answer in llm.generate(PROMPTS, params, progress=False)]
        assert alone == expected and together == expected
