"""bench.py drafters: intervals by hand, drafts of equal size, and a toy target with toy weights from end to end."""

import argparse
import dataclasses
import importlib
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from scripts.benches import drafters_published, drafters_rules, intervals
from scripts.benches import drafters_systems as systems
from spec_jax.control.budget import Always
from spec_jax.control.throughput import Throughput
from spec_jax.drafters import medusa_files, mtp, mtp_files
from spec_jax.drafters.block import native
from spec_jax.drafters.block.config import FULL
from spec_jax.drafters.block.heads.gru import Domino
from spec_jax.drafters.block.heads.head import Plain
from spec_jax.drafters.combined import Combined
from spec_jax.drafters.eagle import weights as eagle_weights
from spec_jax.engine.engine import Engine
from spec_jax.models.load import LoadedTarget
from tests.drafters.block import kit
from tests.drafters.eagle import kit as heads
from tests.drafters.hybrid import hybrid

VERIFIER = {"name_or_path": "toy", "architectures": ["LlamaForCausalLM"]}
SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_a_ratio_and_its_interval_by_hand():
    """3 over 2 passes and 6 over 2: 2.25, apart by -1.5 and +1.5; t(0.975, 1) = 12.7062."""
    error = (2 * (1.5**2 + 1.5**2)) ** 0.5 / 4
    assert intervals.ratio([3, 6], [2, 2]) == (2.25, pytest.approx(error))
    reach = 12.7062 * error
    assert intervals.interval([3, 6], [2, 2]) == pytest.approx((2.25 - reach, 2.25 + reach), rel=1e-5)
    assert intervals.interval([3], [2]) is None


def test_a_gain_by_hand():
    """Twice as long on every prompt is sure to be twice as long; else it is as sure as the prompts agree."""
    gain, (low, high) = intervals.gain(([6, 2], [2, 2]), ([3, 1], [2, 2]))
    assert (gain, low, high) == pytest.approx((1.0, 1.0, 1.0))
    gain, (low, high) = intervals.gain(([4, 2], [1, 1]), ([2, 2], [1, 1]))
    reach = np.exp(12.7062 * (2 * 2 * (1 / 6) ** 2) ** 0.5)
    assert (gain, low, high) == pytest.approx((0.5, 1.5 / reach - 1, 1.5 * reach - 1), rel=1e-4)
    assert intervals.gain(([4], [1]), ([2], [1])) == (1.0, None)


def test_an_interval_holds_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(0)
    rates = rng.normal(3, 0.5, (400, 8))
    found = [intervals.interval(r * 16, np.full(8, 16)) for r in rates]
    assert np.mean([low < 3 < high for low, high in found]) == pytest.approx(0.95, abs=0.04)


@pytest.mark.parametrize("wrong", [([], []), ([1], [1, 2]), ([[1]], [[1]])])
def test_counts_that_do_not_pair_are_refused(wrong):
    with pytest.raises(ValueError, match="above, below: got shapes"):
        intervals.ratio(*wrong)
    with pytest.raises(ValueError, match="got 2 and 1 prompts"):
        intervals.gain(([1, 2], [1, 1]), ([1], [1]))


def test_published_gains_are_of_rows_that_there_are():
    for delta in drafters_published.PUBLISHED:
        assert {delta.row, delta.base} <= set(systems.SYSTEMS) and 0 < delta.gain[0] <= delta.gain[1]
        assert "arXiv" in delta.source
    assert set(systems.JOINED) <= set(systems.SYSTEMS)


@pytest.fixture(scope="module")
def model():
    return LoadedTarget(*kit.llama(), None, (), 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Toy weights of every published kind, as a training run leaves them."""
    made = tmp_path_factory.mktemp("trained")
    config = kit.config(block_size=4)
    native.save_native(made / "dflash", config, Plain(), kit.params(config))
    shifted, head = kit.config(block_size=3, slots="shifted"), Domino(state=7, low=5)
    native.save_native(made / "domino", shifted, head, kit.params(shifted, head))
    for name in ("dspark", "treeflash", "weaver"):
        own = kit.HEADS[{"dspark": "vanilla", "treeflash": "swiglu", "weaver": "ancestor"}[name]]
        native.save_native(made / name, config, own, kit.params(config, own))
    causal = dataclasses.replace(config, causal=(True, True))
    native.save_native(made / "jetspec", causal, Plain(), kit.params(causal))
    eagle_weights.save(made / "eagle3", heads.CONFIGS["eagle3"], heads.params(heads.CONFIGS["eagle3"]), VERIFIER)
    medusa_files.save(made / "medusa", heads.CONFIGS["medusa"], heads.params(heads.CONFIGS["medusa"]), "toy")
    return made


def test_every_system_drafts_as_many_nodes(model, folder):
    rows, left = systems.collect(model, folder, 6, 40)
    assert left == dict.fromkeys(("mtp", "mtp_trained"), "the target has no such head")
    assert set(rows) == {*systems.SYSTEMS, *systems.COMBINED} - set(left)
    sizes = {name: (row.engine.drafter.nodes - 1, row.engine.drafter.depth) for name, row in rows.items()}
    chains = {"ngram": 6, "eagle3": 6, "dflash": 3, "domino": 3, "dspark": 3}
    assert {name: sizes[name] for name in chains} == {name: (n, n) for name, n in chains.items()}
    assert {n for name, (n, _) in sizes.items() if name not in chains} == {6}
    assert max(depth for name, (_, depth) in sizes.items() if rows[name].weights not in (None, "eagle3")) == 3 + 3
    for name, row in rows.items():
        assert isinstance(row.engine.controller, Throughput) and row.engine.widths[0] == 1
        shaped = not isinstance(row.engine.drafter, Combined) and hasattr(row.engine.drafter, "learner")
        assert not shaped or systems.shape_of(row.engine.drafter).ranking == "coupled", name
    assert rows["pctree"].weights == rows["dartree"].weights == "dspark" and rows["ddtree"].weights == "dflash"
    assert rows["combined"].joined == "domino_tree" and rows["combined"].weights == "domino"
    assert rows["combined"].engine.drafter.enough is None and rows["fallback"].engine.drafter.enough > 0


def test_what_is_not_there_is_named(model, folder, tmp_path):
    rows, left = systems.collect(model, tmp_path, 4, 40, ["suffix", "ddtree", "pctree", "combined"])
    assert list(rows) == ["suffix"] and list(left) == ["ddtree", "pctree", "combined"]
    assert left["pctree"] == f"no trained weights in {tmp_path / 'pctree'} or {tmp_path / 'dspark'}"
    rows, left = systems.collect(model, folder, 4, 40, ["combined"], joined="medusa")
    assert rows["combined"].joined == "medusa" and not left
    assert "of mtp" in systems.collect(model, folder, 4, 40, ["combined"], joined="mtp")[1]["combined"]


def test_an_mtp_head_that_was_trained_further_is_a_row_of_its_own(tmp_path):
    target, params = hybrid()
    better = dataclasses.replace(params, mtp=jax.tree.map(lambda x: 2 * x, params.mtp))
    mtp_files.save(tmp_path / "mtp", target.config, better, "toy", steps=4)
    rows, left = systems.collect(LoadedTarget(target, params, None, (), 64), tmp_path, 5, 40, ["mtp", "mtp_trained"])
    assert not left and rows["mtp_trained"].weights == "mtp" and rows["mtp"].weights is None
    assert rows["mtp_trained"].engine == rows["mtp"].engine and rows["mtp"].engine.drafter.depth == 5
    jax.tree.map(np.testing.assert_array_equal, rows["mtp_trained"].params, mtp.params(better))
    jax.tree.map(np.testing.assert_array_equal, rows["mtp"].params, mtp.params(params))


@pytest.mark.parametrize(("nodes", "widths"), [(6, (2, 1, 1)), (8, (2, 1, 1)), (2, (2,))])
def test_other_rules_have_as_many_nodes(model, folder, nodes, widths):
    rows, _ = systems.collect(model, folder, nodes, 40, ["ddtree", "dflash", "medusa", "eagle3_tree", "suffix"])
    assert all(drafters_rules.ruled(rows[name].engine, nodes) == {} for name in ("dflash", "suffix"))
    for name in ("ddtree", "eagle3_tree", *(["medusa"] if nodes > 2 else [])):
        found = drafters_rules.ruled(rows[name].engine, nodes)
        assert {rule: e.rule for rule, e in found.items()} == {r: how[0] for r, how in drafters_rules.RULES.items()}
        assert all(isinstance(e.controller, Always) and e.widths == (e.drafter.nodes,) for e in found.values())
        assert all(e.drafter.nodes - 1 <= nodes for e in found.values())
        assert found["point"].drafter.nodes == rows[name].engine.drafter.nodes
        shape = systems.shape_of(found["recursive_rejection"].drafter)
        assert not shape.replacement and (name != "ddtree" or shape.widths == widths)
        assert systems.shape_of(found["k_seq"].drafter) == dataclasses.replace(shape, replacement=True)


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield importlib.import_module("benches.drafters")


@pytest.fixture(scope="module")
def unoptimised():
    """Programs that run a few times only are compiled without optimisation."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A target of one layer, and a drafter for it."""
    model = LoadedTarget(*kit.llama(1), None, (), 64)
    config = kit.config(block_size=4, taps=(0, 1), layer_types=(FULL,), causal=(False,))
    folder = tmp_path_factory.mktemp("small")
    native.save_native(folder / "dflash", config, Plain(), kit.params(config))
    return model, folder


@pytest.fixture(scope="module")
def measured(bench, small, unoptimised):
    """Two classes of prompts, two rows, and one of the other rules."""
    model, folder = small
    case, measuring = (importlib.import_module(f"benches.{m}") for m in ("runs", "drafters_measure"))
    cases = [case.Case(f"{cls}/{i}", cls, (1, 2, 3, 4 + i)) for cls in ("a", "b") for i in range(2)]
    args = argparse.Namespace(nodes=2, rules=True, quick=False, tokens=8, repeats=1, seed=0)
    rows, left = systems.collect(model, folder, args.nodes, 20, ["ddtree", "mtp", "combined"], "ddtree")
    one = "speculative_sampling"
    ruled = lambda *given: {k: e for k, e in drafters_rules.ruled(*given).items() if k == one}  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "ruled", ruled)
        patch.setattr(measuring, "_TOGETHER", 1)  # in two goes
        made = measuring.measure(model, Engine(model.target, 20), rows, cases, args)
    return made | {"left_out": left, "prompts": len(cases), "nodes": args.nodes}


def test_the_measure_of_a_toy_target(measured):
    drafters = measured["drafters"]
    assert list(drafters) == ["ddtree", "combined"] and measured["recompiles"] == 0
    for row in drafters.values():
        for setting in ("greedy", "sampled"):
            figures = row[setting]
            low, high = figures["ci95"]
            assert low <= figures["acceptance_length"] <= high and set(figures["classes"]) == {"a", "b"}
            assert min(figures["classes"].values()) <= figures["acceptance_length"] <= max(figures["classes"].values())
            counted = figures["same_text"]
            assert counted["different"] == 0 and counted["equal"] + counted["near_tie"] == 2 * 4 * 8
        assert row["acceptance_length"] == row["greedy"]["acceptance_length"] <= row["depth"] + 1
        assert row["loss"]["part"] == pytest.approx(1 - row["sampled"]["acceptance_length"] / row["acceptance_length"])
        assert row["loss"]["ci95"][0] <= row["loss"]["part"] <= row["loss"]["ci95"][1]
    rules = drafters["ddtree"]["rules"]
    assert set(rules) == {"speculative_sampling"} and "rules" not in drafters["combined"]
    rule, coupled = rules["speculative_sampling"], drafters["ddtree"]["sampled"]["acceptance_length"]
    assert rule["coupled_over"]["part"] == pytest.approx(coupled / rule["acceptance_length"] - 1)
    assert drafters["combined"]["joined"] == "ddtree" and measured["deltas"] == {}


def test_gains_are_those_of_the_same_prompts(bench):
    measuring = importlib.import_module("benches.drafters_measure")
    counts = {"ddtree": measuring.Counts((6, 2), (2, 2)), "dflash": measuring.Counts((3, 1), (2, 2))}
    speeds = {name: {"greedy": {"speedup": s}} for name, s in (("ddtree", 1.5), ("dflash", 1.2))}
    found = measuring.deltas({"greedy": counts}, speeds)
    assert list(found) == ["ddtree over dflash"]
    gain = found["ddtree over dflash"]["greedy"]
    assert gain["acceptance_length"] == pytest.approx(1.0) and gain["ci95"] == pytest.approx((1.0, 1.0))
    assert gain["speedup"] == pytest.approx(0.25)
    assert found["ddtree over dflash"]["published"] == (0.125, 0.129)


def test_the_table_and_the_plot_show_it(bench, measured, tmp_path, capsys):
    gain = {"acceptance_length": 0.2, "ci95": (0.1, 0.3), "speedup": 0.05}
    delta = {"published": (0.125, 0.129), "measure": "acceptance length", "source": "arXiv 2607.08642"}
    measured = measured | {"deltas": {"ddtree over dflash": delta | {"greedy": gain, "sampled": gain | {"ci95": None}}}}
    text = bench.table("toy", measured)
    assert "mtp          left out: the target has no such head" in text
    assert "ddtree over dflash: published +12.5 to +12.9 % in acceptance length (arXiv 2607.08642" in text
    assert "here greedy +20.0 % [+10.0, +30.0] in length, +5.0 % in speed, sampled +20.0 % in length" in text
    assert "domino over dflash: published +14.7 to +19.8 %" in text
    assert text.count("here not measured") == len(drafters_published.PUBLISHED) - 1
    assert text.count("text equal") == 2 and " speculative_sampling " in text
    assert text.count("temperature 1 loses ") == 2 and "published block drafters lose 13 % at temperature 1" in text
    output = importlib.import_module("benches.output")
    schema = importlib.import_module("benches.schema").load("drafters")
    args = argparse.Namespace(json=None, plot=tmp_path / "plot.png")
    output.finish({"targets": {"toy": measured}}, schema, args, bench._plot)
    result = json.loads(capsys.readouterr().out)
    assert result["targets"]["toy"]["drafters"]["ddtree"]["ci95"] == list(measured["drafters"]["ddtree"]["ci95"])
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_a_quick_run_takes_a_row_of_each_kind(bench, model, folder):
    rows, _ = systems.collect(model, folder, 2, 40, ["ngram", "suffix", "dflash", "ddtree", "combined"])
    assert bench.fewest(rows) == ["ngram", "dflash", "combined"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": 0}, "--nodes: got 0"),
        ({"drafters_dir": Path("no/such/folder")}, "--drafters-dir: got no/such"),
        ({"target": ["small_hybrid"], "classes": ["gsm8k"]}, "--classes: got gsm8k for small_hybrid, takes smollm2"),
    ],
)
def test_mistakes_are_named(bench, changes, message):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    args = argparse.Namespace(**vars(parser.parse_args([])) | changes)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        bench.run(args)
