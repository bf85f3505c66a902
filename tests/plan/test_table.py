import json
import os
from dataclasses import replace

import pytest
from known_models import LLAMA_70B

from tokenweave.config import ExpertsConfig
from tokenweave.plan.costs import MeasuredCosts
from tokenweave.plan.curves import Curve
from tokenweave.plan.shape import StepShape
from tokenweave.plan.simulate import simulate
from tokenweave.plan.step import StepPlan
from tokenweave.plan.table import Check, TunedTable, TuneKey, cache_directory, check_writable, find, model_dimensions

KEY = TuneKey(
    device="NVIDIA H200", processors=132, threads=0, hosts=1, model=model_dimensions(LLAMA_70B), tensor_parallel_size=8,
    dtype="bfloat16", collective="symmetric", version="0.1.0", link_latency=1e-5, link_bandwidth=3e11,
)  # fmt: skip
STAGE = Curve.of({1: 1e-4, 512: 3e-4, 2048: 1e-3})
COSTS = MeasuredCosts(
    layers=80, stages={"embed": STAGE, "attention": STAGE, "mlp": STAGE}, norm_curve=STAGE, all_reduce_curve=STAGE,
    reordered_curve=STAGE, fused_curves={None: STAGE, 8: Curve.of({1: 2e-5, 2048: 8e-4})}, head_curve=STAGE,
    pair_seconds=1e-9, key_seconds=1e-10, contention=0.04, grain=128,
)  # fmt: skip
SHAPE = StepShape.prefill(512)


def check(tokens, plan, factor):
    shape = StepShape.prefill(tokens)
    return Check((tokens,), (tokens,), plan, factor * simulate(COSTS, shape, plan).seconds)


TABLE = TunedTable(
    KEY,
    COSTS,
    (
        check(2048, StepPlan("weave", 1024, 8), 1.3),
        check(512, StepPlan("weave", 256, 8), 1.1),
        check(512, StepPlan("weave", 384, 8), 3.0),  # slower: does not count
        check(512, StepPlan("fused", budget=8), 0.9),
    ),
)


def test_what_is_saved_is_found(tmp_path):
    path = TABLE.save(tmp_path / "new")
    table, source = find(KEY, tmp_path / "new")
    assert table == TABLE and str(path) in source
    assert os.listdir(tmp_path / "new") == [path.name]
    again = TunedTable.from_json(json.loads(json.dumps(TABLE.to_json())))
    assert simulate(again.costs, SHAPE, StepPlan("weave", 256, 8)) == simulate(COSTS, SHAPE, StepPlan("weave", 256, 8))


def test_what_costs_depend_on_is_told_apart():
    """Models of the same sizes: a table of one is none of the other."""
    layers = LLAMA_70B.num_hidden_layers
    experts = ExpertsConfig(count=8, per_token=2, intermediate_size=28672, normalised=True, layers=(True,) * layers)
    changes = (
        {}, {"experts": experts}, {"experts": replace(experts, per_token=1)}, {"windows": (4096,) * layers},
        {"windows": (4096, None) * (layers // 2)}, {"gated_mlp": False}, {"qk_norm": True},
    )  # fmt: skip
    keys = {replace(KEY, model=model_dimensions(replace(LLAMA_70B, **change))) for change in changes}
    assert len({key.filename() for key in keys}) == len(changes)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "NVIDIA H100"), ("processors", 114), ("threads", 1), ("hosts", 2), ("model", (1, 2)),
        ("tensor_parallel_size", 4), ("dtype", "float16"), ("collective", "distributed"), ("version", "0.2.0"),
    ],
)  # fmt: skip
def test_a_table_for_another_machine_or_model_is_not_taken(tmp_path, field, value):
    TABLE.save(tmp_path)
    other = replace(KEY, **{field: value})
    assert find(other, tmp_path) == (None, "not tuned here yet")
    TABLE.save(tmp_path).rename(tmp_path / other.filename())  # a file that came from elsewhere
    table, source = find(other, tmp_path)
    assert table is None and field in source


@pytest.mark.parametrize(("factor", "holds"), [(1, True), (1.9, True), (0.55, True), (2.1, False), (0.45, False)])
def test_a_changed_link_is_noticed(tmp_path, factor, holds):
    TABLE.save(tmp_path)
    for field in ("link_latency", "link_bandwidth"):
        table, source = find(replace(KEY, **{field: factor * getattr(KEY, field)}), tmp_path)
        assert (table is not None) == holds and (holds or field in source)


def test_tuning_again_replaces_the_table(tmp_path):
    TABLE.save(tmp_path)
    slower = TunedTable(replace(KEY, link_bandwidth=1e9), COSTS)
    slower.save(tmp_path)
    assert len(os.listdir(tmp_path)) == 1 and find(slower.key, tmp_path)[0] == slower


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"format": 99}', json.dumps(TABLE.to_json())[:-40],
     json.dumps(TABLE.to_json() | {"key": {}}), json.dumps(TABLE.to_json() | {"checks": [1]}), "null"],
)  # fmt: skip
def test_an_unusable_file_is_passed_over(tmp_path, text):
    (tmp_path / KEY.filename()).write_text(text)
    table, source = find(KEY, tmp_path)
    assert table is None and "not usable" in source


def test_a_failed_write_leaves_the_old_table_and_no_litter(tmp_path, monkeypatch):
    TABLE.save(tmp_path)

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        TunedTable(KEY, replace(COSTS, contention=0.4)).save(tmp_path)
    assert os.listdir(tmp_path) == [KEY.filename()] and find(KEY, tmp_path)[0] == TABLE


def test_corrections_meet_the_measurements_and_do_not_jump():
    at_512 = {"weave": 1.1, "fused": 0.9, "serial": 1.0, "reordered": 1.0, "nocomm": 1.0}
    assert TABLE.corrections(512) == pytest.approx(at_512)
    for tokens, ratio in ((1, 1.1), (512, 1.1), (1280, 1.2), (2048, 1.3), (9999, 1.3)):
        assert TABLE.corrections(tokens)["weave"] == pytest.approx(ratio)
    assert set(TunedTable(KEY, COSTS).corrections(512).values()) == {1.0}


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "tokenweave" / "plans"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "tokenweave" / "plans"


def test_a_place_that_cannot_be_written_is_refused_before_measuring(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        check_writable(tmp_path / "file" / "plans")
    check_writable(tmp_path / "new" / "plans")
    assert os.listdir(tmp_path / "new" / "plans") == []
