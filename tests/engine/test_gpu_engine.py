"""LLM on a GPU: a tiny model against transformers, with graphs, under a mixture of requests."""

from pathlib import Path

import pytest
import torch
from tiny import FAMILIES, build, save

from tokenweave import LLM, SamplingParams

pytestmark = pytest.mark.gpu
PROMPTS = [[5, 17, 3, 99, 250, 7, 41], [8, 1, 444], list(range(30, 70))]


@pytest.mark.parametrize("mode", ["auto", "weave"])
def test_scores_and_answers(mode: str, tmp_path: Path) -> None:
    """Steps are run as they are, captured and replayed; answers do not change on the way."""
    tiny = FAMILIES[0]
    path, model = save(tiny, tmp_path), build(tiny)
    with LLM(path, device="cuda", dtype="bfloat16", mode=mode, kv_cache_memory=1 << 26) as llm:
        for _ in range(3):
            for prompt in PROMPTS:
                with torch.no_grad():
                    logits = model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
                expected = logits[:-1].gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).squeeze(1)
                found = torch.from_numpy(llm.score(prompt)).double()
                assert (found - expected).abs().mean() < 0.1
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        llm.generate(PROMPTS, params, progress=False)
        answers = [[a.token_ids for a in llm.generate(PROMPTS, params, progress=False)] for _ in range(2)]
        assert answers[0] == answers[1]
        assert all(stats.compute > 0 for stats in llm.stats())
        if mode == "auto":  # two lanes of so small a model fit what the pool begins with
            assert llm.stats()[0].graph_memory < llm.stats()[-1].graph_memory
