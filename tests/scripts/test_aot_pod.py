"""aot_pod.py: what is counted in a compiled program's text, what is kept, and the whole script through libtpu."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from pallas_kernels import aot
from scripts.benches import schema
from scripts.pods_aot import cost, hlo, loops, shapes, table, traffic
from scripts.pods_aot.chips import CHIPS, Chip, chip
from tests.processes import environment

ROOT = Path(__file__).parents[2]
SLOW = Chip(operations=1.0, bandwidth=1.0, links=1.0, memory_gib=1)

WHILE = """
HloModule written_by_hand

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%inner (p: f32[4,8], i: s32[]) -> f32[8] {
  %p = f32[4,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  %s = f32[1,8]{1,0} dynamic-slice(%p, %i, %z), dynamic_slice_sizes={1,8}
  ROOT %r = f32[8]{0} bitcast(%s)
}

%body (t: (s32[], f32[8], f32[4,8])) -> (s32[], f32[8], f32[4,8]) {
  %t = (s32[], f32[8]{0}, f32[4,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[8]{0} get-tuple-element(%t), index=1
  %w = f32[4,8]{1,0} get-tuple-element(%t), index=2
  %f = f32[8]{0:S(1)} fusion(%w, %i), kind=kLoop, calls=%inner
  %g = f32[8]{0:S(1)} all-reduce(%f), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%sum
  %one = s32[] constant(STEP)
  %next = s32[] add(%i, %one)
  ROOT %out = (s32[], f32[8]{0}, f32[4,8]{1,0}) tuple(%next, %x, %w)
}

%less (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %d = pred[] compare(%a, %b), direction=LT
}

%condition (t: (s32[], f32[8], f32[4,8])) -> pred[] {
  %t = (s32[], f32[8]{0}, f32[4,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %n = s32[] constant(LIMIT)
  ROOT %d = CONDITION
}

ENTRY %main (x: f32[8], w: f32[4,8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %w = f32[4,8]{1,0} parameter(1)
  %zero = s32[] constant(FIRST)
  %first = s32[] copy(%zero)
  %t = (s32[], f32[8]{0}, f32[4,8]{1,0}) tuple(%first, %x, /*index=2*/%w)
  %loop = (s32[], f32[8]{0}, f32[4,8]{1,0}) while(%t), condition=%condition, body=%body, metadata={op_name="f/while"}
  ROOT %y = f32[8]{0} get-tuple-element(%loop), index=1
}
"""
COMPARE = "pred[] compare(%i, %n), direction=LT"
FUSED = "pred[] fusion(%i, %n), kind=kLoop, calls=%less"


def written(first=0, limit=4, step=1, condition=COMPARE):
    text = WHILE
    for name, value in (("FIRST", first), ("LIMIT", limit), ("STEP", step), ("CONDITION", condition)):
        text = text.replace(name, str(value))
    return text


@pytest.mark.parametrize(
    ("options", "turns"),
    [
        ({}, 4),
        ({"first": 1}, 3),
        ({"limit": 9, "step": 2}, 5),
        ({"condition": FUSED}, 4),
        ({"condition": "pred[] compare(%n, %i), direction=GE"}, 5),
        ({"limit": 0}, 0),
        ({"first": "{...}"}, None),
    ],
)
def test_a_loop_turns_as_often_as_its_counter_says(options, turns):
    module = hlo.parse(written(**options))
    scope = loops.Scope(module.computations[module.entry])
    assert loops.trips(module, scope.computation.instructions["loop"], scope) == turns


def test_what_the_compiler_notes_goes_first():
    noted = written().replace("body=%body,", 'body=%body, backend_config={"known_trip_count":{"n":"7"}},')
    assert cost.cost(noted, SLOW, 8).collectives == 7


def test_loops_multiply_and_slices_count_alone():
    """Per turn: a row of 8 floats read, its sum in VMEM, 4 chips to a group; the counter's three integers twice."""
    found = cost.cost(written(), SLOW, 8)
    assert found.collective_bytes == {"all-reduce": 4 * 32} and found.collectives == 4
    assert found.sent_bytes == 4 * 32 * 2 * 3 / 4
    counter = 3 * 4 + 9  # i, one and next; i, n and the answer, a byte
    assert found.main_bytes == 4 * (32 + 4 + counter) + 2 * 4
    assert found.seconds == found.main_bytes + found.sent_bytes
    assert found.unknown == ()


def test_a_loop_that_data_end_counts_once_and_is_named():
    found = cost.cost(written(first="{...}"), SLOW, 8)
    assert found.collectives == 1 and found.unknown == ("f/while",)


@pytest.mark.parametrize(
    ("line", "kind", "size", "sent"),
    [
        ("f32[16]{0} all-gather(%x), replica_groups={{0,1},{2,3}}, dimensions={0}", "all-gather", 64, 32),
        ("f32[4]{0} reduce-scatter(%x), replica_groups={{0,1,2,3}}, dimensions={0}", "reduce-scatter", 64, 48),
        ("bf16[16]{0} all-to-all(%x), replica_groups=[1,8]<=[8]", "all-to-all", 32, 28),
        ("f32[16]{0} collective-permute(%x), source_target_pairs={{0,1}}", "collective-permute", 64, 64),
        ("(f32[16]{0}, f32[2]{0}) all-reduce(%x, %y), replica_groups={}", "all-reduce", 72, 126),
        ("f32[16]{0} all-reduce-start(%x), replica_groups=mesh['a'=2,'b'=4] {'b'}", "all-reduce", 64, 96),
        ("(f32[4]{0}, f32[16]{0}) all-gather-start(%x), replica_groups=[2,4]<=[8]", "all-gather", 64, 48),
    ],
)
def test_collectives_in_every_notation(line, kind, size, sent):
    text = f"ENTRY %e (x: f32[4]) -> f32[4] {{\n  ROOT %r = {line}\n}}"
    module = hlo.parse(text)
    [found] = traffic.collectives(module, module.computations["e"].root, devices=8)
    assert (found.kind, found.size, found.sent) == (kind, size, sent)


def test_the_end_of_a_collective_counts_nothing():
    text = "ENTRY %e (x: f32[4]) -> f32[4] {\n  ROOT %r = f32[4]{0} all-reduce-done(%x)\n}"
    module = hlo.parse(text)
    assert traffic.collectives(module, module.computations["e"].root, devices=8) == []


STEPS = """
%start (p: f32[8]) -> (f32[16], u32[]) {
  %p = f32[8]{0} parameter(0)
  %a = f32[16]{0} all-gather(%p), channel_id=1, replica_groups={{0,1}}, dimensions={0}
  ROOT %s = (f32[16]{0}, u32[]) custom-call(%a), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.1 (p: f32[8]) -> f32[16] {
  %p = f32[8]{0} parameter(0)
  ROOT %a = f32[16]{0} all-gather(%p), channel_id=1, replica_groups={{0,1}}, dimensions={0}
}

%done (p: f32[8]) -> f32[16] {
  %p = f32[8]{0} parameter(0)
  %a = f32[16]{0} all-gather(%p), channel_id=1, replica_groups={{0,1}}, dimensions={0}
  ROOT %d = f32[16]{0} custom-call(%a), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.1 (p: f32[16]) -> f32[8] {
  %p = f32[16]{0} parameter(0)
  %z = s32[] constant(0)
  %r = f32[16]{0} all-reduce(%p), channel_id=1, replica_groups={{0,1}}, to_apply=%sum
  ROOT %s = f32[8]{0} dynamic-slice(%r, %z), dynamic_slice_sizes={8}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %first = (f32[16]{0}, u32[]) fusion(%x), kind=kCustom, calls=%start
  %next = f32[16]{0} fusion(%x), kind=kOutput, calls=%async_collective_fusion.1
  %last = f32[16]{0} fusion(%x), kind=kCustom, calls=%done
  ROOT %y = f32[8]{0} fusion(%last), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def test_steps_of_one_collective_count_once_and_a_scattered_reduction_is_one():
    found = cost.cost(STEPS, SLOW, 2)
    assert found.collective_bytes == {"all-gather": 64, "reduce-scatter": 64}
    assert found.collectives == 2 and found.sent_bytes == 64


BRANCHES = """
%none (p: f32[8]) -> f32[8] {
  ROOT %p = f32[8]{0} parameter(0)
}

%some (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%p)
}

ENTRY %main (i: s32[], x: f32[8]) -> f32[8] {
  %i = s32[] parameter(0)
  %x = f32[8]{0} parameter(1)
  ROOT %y = f32[8]{0} conditional(%i, %x, %x), branch_computations={%none, %some}
}
"""


def test_a_switch_counts_the_branch_named_or_the_longest():
    assert cost.cost(BRANCHES, SLOW, 1).main_bytes == 64
    assert cost.cost(BRANCHES, SLOW, 1, {2: 0}).main_bytes == 0


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="text: got 5 characters without an ENTRY"):
        hlo.parse("hello")


PROGRAM = """
import jax, jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

def layer(x, w):
    part = jnp.tanh(x @ w)
    return lax.psum(part, "tensor"), ()

def run(x, w):
    x, _ = lax.scan(layer, x, w)
    whole = lax.all_gather(x, "data", tiled=True)
    part = lax.psum_scatter(whole, "tensor", tiled=True)
    return lax.ppermute(part, "tensor", [(i, (i + 1) % 4) for i in range(4)])

mapped = jax.shard_map(run, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("tensor"), check_vma=False)
x, w = jax.ShapeDtypeStruct((16, 32), jnp.float32), jax.ShapeDtypeStruct((5, 32, 32), jnp.float32)
print(jax.jit(mapped).lower(x, w).compile().as_text())
"""


def test_a_compiled_program_of_eight_devices():
    """Five sums of 8 x 32 floats, one row's gather of 16 x 32, one scatter of that, one step of a ring of 4 x 32."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment(8), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = cost.cost(done.stdout, SLOW, 8)
    assert found.collective_bytes == {
        "all-reduce": 5 * 8 * 32 * 4,
        "all-gather": 16 * 32 * 4,
        "reduce-scatter": 16 * 32 * 4,
        "collective-permute": 4 * 32 * 4,
    }
    assert found.collectives == 8 and found.unknown == ()


ROUND = {
    "hbm_gib": 1.5,
    "seconds": 0.25,
    "optimal_seconds": 0.5,
    "operations": 1.0,
    "hbm_bytes": 2.0,
    "collective_bytes": {"all-reduce": 3.0},
    "collectives": 4.0,
    "loops_counted_once": [],
}


def test_a_table_is_taken_up_where_it_ended(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(table, "libtpu", lambda: "1.0")
    path, case, asked = tmp_path / "pods.json", shapes.CASES[0], []

    def measure(case, n):
        if n == 4:
            raise KeyboardInterrupt
        asked.append(n)
        return ROUND

    with pytest.raises(KeyboardInterrupt):
        table.fill(path, [case], (1, 2, 4), measure)
    found = table.fill(path, [case], (2, 8, 1), measure)
    assert asked == [1, 2, 8]
    assert list(found[case.key]["rounds"]) == ["1", "2", "8"] == list(table.read(path)[case.key]["rounds"])
    schema.validate(table.summary(found), schema.load("pods", Path(table.__file__).parent))
    assert "Qwen3-8B v5e:2x2, 16 rows, N=8: HBM 1.50 GiB a chip, 250.000 ms" in capsys.readouterr().err

    def refused(case, n):
        if n == 2:
            raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure\nmore")
        return measure(case, n)

    table.fill(path, [dataclasses.replace(case, batch=2)], (1, 2), refused)
    assert "N=2: left out, libtpu does not compile it: INTERNAL: RET_CHECK failure\n" in capsys.readouterr().err
    assert asked == [1, 2, 8, 1] and list(table.read(path)[case.key]["rounds"]) == ["1"]
    monkeypatch.setattr(table, "libtpu", lambda: "2.0")
    table.fill(path, [dataclasses.replace(case, batch=2)], (1,), measure)
    assert asked == [1, 2, 8, 1, 1]


def test_a_file_that_is_no_table_is_refused(tmp_path):
    path = tmp_path / "pods.json"
    path.write_text("[]")
    with pytest.raises(ValueError, match="--table: .* is no table"):
        table.read(path)


def test_the_projects_table_holds_cases_of_the_script_and_all_of_them_fit():
    there, known = table.read(table.PROJECT), {case.key: case for case in shapes.CASES}
    assert there.keys() <= known.keys()
    for key, entry in there.items():
        settings = {k: v for k, v in entry.items() if k not in ("rounds", "implementation", "libtpu")}
        assert settings == dataclasses.asdict(known[key])
        assert {"1", "16", "64"} <= entry["rounds"].keys() <= {str(n) for n in shapes.NODES}
        for x in entry["rounds"].values():
            assert x["hbm_gib"] <= chip(entry["topology"]).memory_gib
    schema.validate(table.summary(there), schema.load("pods", Path(table.__file__).parent))
    page = (ROOT / "docs" / "pods_cost.md").read_text(encoding="utf-8")
    assert table.markdown(there) in page


@pytest.mark.parametrize(
    ("name", "billions"), [("Qwen3-8B", 8.2), ("Qwen3-235B-A22B", 235), ("Qwen3.5-397B-A17B", 397)]
)
def test_a_published_model_has_the_parameters_that_it_is_named_for(name, billions):
    from math import prod

    from spec_jax.models.qwen_shapes import required_tensors

    config = next(case for case in shapes.CASES if case.name == name).config
    count = sum(prod(shape) for shape in required_tensors(config).values())
    assert count == pytest.approx(billions * 1e9, rel=0.01)


def test_an_unknown_chip_is_refused():
    with pytest.raises(ValueError, match="topology: got 'v4:2x2', takes one of v5e:XxY, v6e:XxY"):
        chip("v4:2x2")
    assert chip("v6e:8x8") is CHIPS["v6e"]


@pytest.mark.slow
def test_the_script_compiles_a_tiny_model(tmp_path):
    """Products and memory traffic are those of libtpu's own cost analysis, but for what a loop's turns add."""
    if lacks := aot.missing("v5e"):
        pytest.skip(lacks)
    command = [sys.executable, "scripts/aot_pod.py", "--quick", "--table", str(tmp_path / "table.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    schema.validate(result, schema.load("pods", Path(table.__file__).parent))
    [shape] = result["shapes"].values()
    assert shape["topology"] == "v5e:2x2" and list(shape["seconds"]) == ["1", "4"]
    [entry] = table.read(tmp_path / "table.json").values()
    assert all(x["collective_bytes"]["all-reduce"] > 0 for x in entry["rounds"].values())
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert json.loads(again.stdout.splitlines()[-1]) == result
