import json
from dataclasses import replace

import pytest
from known_models import LLAMA_70B, SMOLLM

from tokenweave.plan.hardware import hardware
from tokenweave.plan.report import Question, report
from tokenweave.plan.step import MODES
from tokenweave.plan.text import text


def question(config=LLAMA_70B, size=8, tokens=(1, 33, 577, 4096), name="h100", **changes):
    return Question(
        config=config, hardware=hardware(name), tensor_parallel_size=size, tokens=tokens, **changes
    )  # fmt: skip


@pytest.fixture(scope="module")
def found():
    return report(question(), compare_pipeline=True)


def test_it_is_json(found):
    assert json.loads(json.dumps(found)) == found


def test_the_parts_of_a_serial_step_are_its_prediction(found):
    for step in found["steps"]:
        assert sum(step["serial_ms"].values()) == pytest.approx(step["predicted_ms"]["serial"])
        assert sum(step["serial_share"].values()) == pytest.approx(1)


def test_what_is_chosen_is_predicted_no_slower_than_serial_and_fused(found):
    for step in found["steps"]:
        predicted = step["predicted_ms"]
        assert set(predicted) <= set(MODES) and predicted[step["mode"]] <= min(predicted["serial"], predicted["fused"])
        assert (step["mode"] == "weave") == (step["cut"] > 0)


def test_the_norm_is_done_once_instead_of_n_times(found):
    rows = {step["tokens"]: step["norm_rows_per_rank"] for step in found["steps"]}
    assert rows[577] == {"serial": 577, "fused": 73} and rows[1] == {"serial": 1, "fused": 1}
    assert found["steps"][0]["norm_memory_passes"] == {"serial": 5, "fused": 2}


def test_waves_are_shown_whole_and_in_lanes(found):
    step = found["steps"][-1]
    for row in step["waves"]:
        rows, columns = map(int, row["whole"]["tile"].split("x"))
        wide = {"qkv": 1280, "output": 8192, "gate_up": 7168, "down": 8192}[row["matmul"]]
        assert row["whole"]["tiles"] == -(-4096 // rows) * -(-wide // columns)
        assert row["whole"]["waves"] == -(-row["whole"]["tiles"] // 132) and len(row["lanes"]) == 2
    assert all(row["lanes"] == [] for row in found["steps"][0]["waves"])


def test_the_deal_adds_up(found):
    for name, count in (("query_heads", 64), ("kv_heads", 8), ("mlp_columns", 28672), ("vocabulary_rows", 128256)):
        assert sum(row[name] for row in found["balance"]) == count


def test_decode_wants_tensor_parallelism(found):
    for row in found["pipeline"]:
        assert row["per_token_ms"]["tensor"] < row["per_token_ms"]["pipeline"] / 4
        assert 0 <= row["bubble"] < 1


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (question(replace(LLAMA_70B, num_key_value_heads=1)), "a single KV head"),
        (question(SMOLLM, 2), "6 of 9 query heads"),
        (question(SMOLLM, 3, name="l40s"), "splitting does not pay"),
        (question(size=1), "take more ranks"),
    ],
)
def test_it_says_where_splitting_does_not_pay_or_fit(asked, words):
    assert any(words in note for note in report(asked)["notes"])


def test_there_is_no_note_without_a_reason(found):
    assert found["notes"] == []


def test_text_holds_every_step_and_the_reasons(found):
    shown = text(found)
    for step in found["steps"]:
        assert f"  {step['tokens']}: {step['reason']}" in shown
    for words in ("5 -> 2", "577 -> 73", "micro-batches", "cuda context", "16 bytes a parameter", "0, 1, 2, 3"):
        assert words in shown
    assert all(len(line) < 200 for line in shown.splitlines() if " hides " not in line and "lanes of" not in line)
    assert "pipeline" not in text(report(question(SMOLLM, 3)))


@pytest.mark.parametrize(
    "wrong",
    [{"tokens": ()}, {"tokens": (0,)}, {"tokens": (4, -1)}, {"context": -1}, {"kv_tokens": -1}, {"dtype": "int8"},
     {"size": 65}],
)  # fmt: skip
def test_bad_questions_are_refused(wrong):
    with pytest.raises(ValueError):
        report(question(**wrong))
