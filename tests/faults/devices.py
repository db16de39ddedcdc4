"""What the tests of many devices run in processes of their own, whose devices are forced host devices. Prints JSON.

python -m tests.faults.devices CASE ..., under XLA_FLAGS; `two PORT INDEX [rolled]` is one of two processes.
"""

import dataclasses
import functools
import itertools
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from spec_jax.audit.replay import replay
from spec_jax.control.throughput import Throughput
from spec_jax.drafters import mtp
from spec_jax.drafters.ngram import NGram
from spec_jax.drafters.scripted import Script, Scripted
from spec_jax.drafters.siblings import Siblings
from spec_jax.engine import devices, loop, rows
from spec_jax.engine.decoder import Decoder
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.engine.requests import request, stack
from spec_jax.engine.round import context_of, verify_rows
from spec_jax.models import experts, llama, on_mesh, partition, placement, qwen
from spec_jax.models.checkpoint import required_tensors
from spec_jax.models.config import LlamaConfig
from spec_jax.models.experts import Experts, Mlp, Part
from spec_jax.models.linear import Dense, LoRA
from spec_jax.models.placement import TENSOR, make_mesh
from spec_jax.models.qwen import Qwen
from spec_jax.models.target import Output
from spec_jax.models.toy import AuditTarget, audit_table
from spec_jax.models.views import int8
from spec_jax.rollout.engine import RolloutEngine
from spec_jax.rollout.toggle import Toggle
from spec_jax.sampling.constraint import free
from spec_jax.sampling.settings import Sampling
from spec_jax.tree import Tree
from tests.drafters.hybrid import config, hybrid

V, ROWS, MAX_LEN, BUDGET = 48, 200, 26, 16
ROOM = {"max_len": MAX_LEN, "prefill_chunk": 8, "max_eos": 1, "max_stops": 1, "max_stop_length": 2, "max_bias": 1}
MESH = {"data": 2, "expert": 2, "tensor": 2}
SAMPLINGS = (Sampling(), Sampling(temperature=0.8, top_p=0.9), Sampling(), Sampling(temperature=1.2, min_p=0.02))


def tied(params):
    """Every token of the vocabulary's second half has almost the logit of one of the first, two of three exactly."""
    kernel = np.array(params.head.kernel)
    near = np.random.default_rng(7).normal(0, 1e-6, kernel[:, V // 2 :].shape) * (np.arange(V // 2) % 3 == 0)
    kernel[:, V // 2 :] = kernel[:, : V // 2] * (1 + near)
    return dataclasses.replace(params, head=Dense(jnp.asarray(kernel, jnp.float32)))


@functools.cache
def attention(ties=True):
    c, rng = LlamaConfig(V, 32, 48, 1, 4, 2, 8), np.random.default_rng(0)
    tensors = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in required_tensors(c).items()}
    params = llama.from_tensors(c, tensors)
    return llama.Llama(c), tied(params) if ties else params


@functools.cache
def recurrent(ties=True, **changes):
    sizes = {"num_heads": 4, "num_kv_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    target, params = hybrid(vocab_size=V, **{**sizes, **changes})
    return target, tied(params) if ties else params


def prompts(seed, count=ROWS):
    rng = np.random.default_rng(seed)
    return [(rng.integers(0, V, rng.integers(1, 9)).tolist() * 2)[:8] for _ in range(count)]


def sampling_of(row):
    return SAMPLINGS[row % len(SAMPLINGS)]


def batch_of(engine, seed):
    return stack([request(engine, p, BUDGET, i, sampling_of(i)) for i, p in enumerate(prompts(seed))])


def run(model, mesh, seed):
    """The engine's rows after a batch of requests, as one program, and whether all devices hold the same."""
    target, params = model
    engine = Engine(dataclasses.replace(target, mesh=mesh), drafter=NGram(3), **ROOM)
    shared = devices.place(engine, EngineParams(params, None, free(V), jnp.ones(1)))
    text = jax.jit(lambda p, r: loop.decode(engine, p, rows.init(engine, p, r)).rows)
    after = text(shared, jax.device_get(batch_of(engine, seed)))
    return jax.device_get(after), replicas_equal(after)


def replicas_equal(tree):
    copies = lambda x: [np.asarray(s.data) for s in x.addressable_shards]  # noqa: E731
    same = lambda x: all(c.shape == x.shape and np.array_equal(c, copies(x)[0], True) for c in copies(x))  # noqa: E731
    return all(same(x) for x in jax.tree.leaves(tree))


def texts(model, seed):
    """One device against eight: rows that are equal, nearly tied or different; accepted counts; devices that agree."""
    (one, _), (many, agree) = run(model, None, seed), run(model, make_mesh(MESH), seed)
    near = different = 0
    same = (one.tokens == many.tokens).all(1)
    for i in np.flatnonzero(~same):
        text = many.tokens[i, : many.length[i]].tolist()
        begin = int(many.prompt_length[i])
        found = replay(*model, text[:begin], text[begin:], int(i), sampling_of(i), max_len=MAX_LEN)
        near, different = near + (found.different == 0), different + (found.different > 0)
    counted = lambda r: np.stack([r.counters.accepted, r.counters.drafted, r.counters.emitted], 1)[same]  # noqa: E731
    return {
        "same": int(same.sum()),
        "near": int(near),
        "different": int(different),
        "counts_equal": bool((counted(one) == counted(many)).all()),
        "accepted": int(one.counters.accepted.sum()),
        "agree": agree,
    }


def verdicts():
    """Verdicts on logits that nearly tie: of one device, of eight, and with faults planted in how eight decide."""
    engine = Engine(AuditTarget(V), drafter=Scripted(3, V), **ROOM)
    script = Script(jnp.zeros((ROWS, MAX_LEN), jnp.int32), jnp.full((ROWS, MAX_LEN), 3))
    params = EngineParams(audit_table(V), script, free(V), jnp.ones(1))
    state = jax.jit(functools.partial(rows.init, engine))(params, batch_of(engine, 0))
    context = context_of(state.rows, params.constraint)
    draft, _ = engine.drafter.propose(params.drafter, state.drafter, context)
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 2, (ROWS, 4, V)).astype(np.float32)
    logits[..., V // 2 :] = logits[..., : V // 2] * (1 + rng.choice([0, 1e-7], (ROWS, 4, V // 2)))
    best = jnp.asarray(logits.argmax(-1), jnp.int32)  # greedy rows accept it, so that walks are long
    tree = dataclasses.replace(draft.tree, tokens=draft.tree.tokens.at[:, 1:].set(best[:, :3]))
    draft, mesh, sound = dataclasses.replace(draft, tree=tree), make_mesh(MESH), devices.decided
    split = jax.device_put(logits, placement.shardings(mesh, P(("data",), None, TENSOR)))

    def own_logits(mesh, f, batch, shared):
        """Each device decides on its part of the vocabulary."""

        def cut(batch):
            mine = jnp.arange(V) // (V // 2) == lax.axis_index(TENSOR)
            return (*batch[:2], jnp.where(mine, batch[2], -1e9), *batch[3:])

        alone = lambda batch, shared: f(cut(batch), shared)  # noqa: E731
        return jax.shard_map(alone, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(batch, shared)

    def own_key(mesh, f, batch, shared):
        """Each device draws with a key of its own, as an unseeded sampler would."""
        place = lambda: 1 + lax.axis_index(placement.AXES).astype(jnp.uint32)  # noqa: E731
        alone = lambda batch, shared: f((batch[0] ^ place(), *batch[1:]), shared)  # noqa: E731
        return jax.shard_map(alone, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(batch, shared)

    def found(logits, on, decided):
        devices.mesh_of, devices.decided = (lambda _: on), decided
        return jax.jit(lambda z: verify_rows(engine, context, draft, Output(z)))(logits)

    real, (want, out) = devices.mesh_of, (jax.device_get(found(logits, None, sound)), {})
    for name, decided in (("sound", sound), ("own logits", own_logits), ("own key", own_key)):
        got = found(split, mesh, decided)
        equal = jax.tree.leaves(jax.tree.map(np.array_equal, want, jax.device_get(got)))
        out[name] = {"equal": all(equal), "agree": replicas_equal(got)}
    devices.mesh_of, devices.decided = real, sound
    return out | {"accepted": int(want.accepted.sum())}


def lora(leaf, seed):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(0, 0.2, shape), jnp.float32)  # noqa: E731
    return LoRA(leaf, draw(leaf.kernel.shape[0], 2), draw(2, leaf.kernel.shape[1]), jnp.float32(0.5))


def forms():
    """Models by the name of their form."""
    (small, plain), (mixed, params) = attention(), recurrent()
    maps = lambda layer, names: dataclasses.replace(  # noqa: E731
        layer, **{n: lora(getattr(layer, n), i) for i, n in enumerate(names)}
    )
    adapted = dataclasses.replace(plain, layers=tuple(maps(x, ("q", "k", "o", "up", "down")) for x in plain.layers))
    few = recurrent(num_kv_heads=1, linear_num_key_heads=1, linear_num_value_heads=2)
    return {
        "lora": (small, adapted),
        "int8": (small, int8(plain)),
        "tied": (small, dataclasses.replace(plain, head=None)),
        "stacked": (mixed, qwen.stack_layers(mixed.config, params)),
        "one key head, one KV head": few,
    }


def scored(model, mesh):
    """Logits of a tree before and after a commit, and the state behind it."""
    target, params = dataclasses.replace(model[0], mesh=mesh), model[1]
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, V, (4, 8)), jnp.int32)
    parent = jnp.broadcast_to(jnp.asarray([-1, 0, 0, 1, 2]), (4, 5))
    tree, path = Tree(tokens[:, :5], parent, jnp.ones((4, 5), bool)), jnp.broadcast_to(jnp.asarray([0, 2, 4]), (4, 3))

    @jax.jit
    def both(params):
        state = target.prefill(params, target.init_state(params, 4, 24), tokens, jnp.asarray([7, 3, 8, 1]))[1]
        first, staged, state = target.score(params, state, tree)
        state = target.commit(state, staged, path, jnp.asarray([3, 1, 2, 0]))
        return first.logits, target.score(params, state, tree)[0].logits

    return jax.device_get(both(params if mesh is None else partition.place(target, params)))


def on_meshes():
    """The largest difference of logits to one device's, by form and mesh; and a plain sum left out, as a fault."""
    meshes = ({"tensor": 4, "data": 2}, {"data": 2, "expert": 4})
    out = {}
    for name, model in forms().items():
        want = scored(model, None)
        for sizes in meshes[: 2 if name == "stacked" else 1]:
            got = scored(model, make_mesh(sizes))
            out[f"{name} {sizes}"] = float(max(abs(a - b).max() for a, b in zip(want, got, strict=True)))
    whole, on_mesh.Summed = on_mesh.Summed, lambda leaf, axis: leaf
    got = scored(attention(), make_mesh({"tensor": 2}))
    on_mesh.Summed = whole
    return out | {"not summed": float(abs(got[0] - scored(attention(), None)[0]).max())}


def mixes():
    """The largest difference of experts split over devices to whole ones, by form, rows whole or split, and routing."""
    rng, count, k = np.random.default_rng(4), 8, 3
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    shared = Mlp(Dense(draw(8, 6)), Dense(draw(8, 6)), Dense(draw(6, 8)))
    leaves = Experts(draw(8, count), draw(count, 8, 6), draw(count, 8, 6), draw(count, 6, 8), shared, draw(8, 1))
    one_sided = dataclasses.replace(leaves, router=leaves.router.at[:, :k].add(50 * jnp.eye(8)[0][:, None]))
    x, sizes = draw(16, 8).at[:, 0].set(1), {"num_experts": count, "moe_intermediate_size": 6}
    mesh, experts._BLOCK, out = make_mesh({"expert": 4, "tensor": 2}), 1, {}
    target = Qwen(config(**sizes, shared_expert_intermediate_size=6), mesh=mesh)
    specs = partition.param_specs(target, leaves)
    for form, spread in itertools.product(("dense", "loop", "ragged", "blocks"), (False, True)):

        def mix(leaves, x, part=None, form=form):
            routing = experts.route(leaves, x, k, True)
            return experts.mix(dataclasses.replace(leaves, part=part), x, routing, form)

        place, part = P("expert") if spread else P(), Part("expert", "tensor", spread)
        apart = jax.shard_map(
            functools.partial(mix, part=part), mesh=mesh, in_specs=(specs, place), out_specs=place, check_vma=False
        )
        apart = jax.jit(apart)
        for name, some in (("even", leaves), ("one side", one_sided)):
            out[f"{form} {spread} {name}"] = float(abs(apart(some, x) - mix(some, x)).max())
    return out


def heads():
    """An MTP head as the drafter: texts and counts of one device and of eight, through a Decoder."""
    target, params = recurrent(ties=False)
    engine = Engine(mtp.tapped(target), drafter=mtp.drafter(target, mtp.chain(2)), **ROOM)

    def ask(mesh):
        decoder = Decoder(engine, params, mtp.params(params), batch=4, mesh=mesh)
        out = [decoder.generate([p], BUDGET, key=i, sampling=sampling_of(i))[0] for i, p in enumerate(prompts(3, 8))]
        before = decoder.programs
        out += decoder.generate(prompts(4, 4), BUDGET)
        assert decoder.programs == before == 4, (before, decoder.programs)
        return [[list(r.tokens), r.counters["accepted"]] for r in out]

    return {"equal": ask(None) == ask(make_mesh(MESH))}


def served(mesh):
    """Requests through a Decoder, more than it has slots: tokens and counters."""
    target, params = attention(ties=False)
    decoder = Decoder(Engine(target, drafter=NGram(3), **ROOM), params, batch=4, mesh=mesh)
    ids = [decoder.submit(p, BUDGET, key=i, sampling=sampling_of(i))[0] for i, p in enumerate(prompts(0, 12))]
    done = {u.id: u.result for u in decoder.run(4) if u.result is not None}
    assert decoder.programs == 4, decoder.programs
    return [[list(done[i].tokens), done[i].counters] for i in ids]


def refused():
    """What a Decoder says to a batch that rows can't be split of, and to a target that can't be split."""
    said = []
    for target, params, batch in ((*attention(), 3), (AuditTarget(V), audit_table(V), 4)):
        try:
            Decoder(Engine(target, **ROOM), params, batch=batch, mesh=make_mesh(MESH))
        except ValueError as error:
            said.append(str(error))
    return said


def rolled(mesh, toggle=None):
    """Rollouts by a policy that changes once: tokens by call, what was chosen, costs, and what this process measured.

    With a toggle the clock runs as it likes, by another law in every process.
    """
    target, params = attention(ties=False)
    engine = Engine(target, drafter=Siblings(4, memory=64), controller=Throughput(), widths=(1, 4), **ROOM)
    if mesh is not None:
        engine = placement.with_mesh(engine, mesh)
        params = partition.place(engine.target, params)
    own, rng, now = [], np.random.default_rng(jax.process_index()), [0.0]

    def clock():
        now[0] += rng.exponential()
        return now[0]

    of_first = devices.of_first
    if toggle is not None:
        time.perf_counter = clock
        devices.of_first = lambda engine, value: own.append(np.ravel(value).tolist()) or of_first(engine, value)
    options = {"sizes": (2, 4), "prefill_rows": 2, "prompts": 3, "key": 7, "toggle": toggle}
    rollouts, texts, chosen = RolloutEngine(engine, params, **options), [], []
    for call in range(3):
        rollout = rollouts.generate(prompts(5, 2 + call), BUDGET, group=2)
        texts += [t[m].tolist() for t, m in zip(rollout.tokens, rollout.mask, strict=True)]
        chosen += [[s.size, s.drafting, s.rounds, s.tokens] for s in rollout.segments]
        rollouts.update_params(params)
    costs = [[size, c.plain, *c.speculative.seconds] for size, c in rollouts.carried.costs.items()]
    return {"texts": texts, "chosen": chosen, "costs": costs, "own": own}


def warmed(mesh):
    """How many programs rollouts on a mesh have behind their warm-up, and behind a call."""
    engine = placement.with_mesh(Engine(attention()[0], drafter=Siblings(4, memory=64), **ROOM), mesh)
    params = partition.place(engine.target, attention()[1])
    rollouts = RolloutEngine(engine, params, sizes=(2,), prefill_rows=2, prompts=3)
    rollouts.warm_up([1, 2], BUDGET)
    begun = rollouts.programs
    rollouts.generate(prompts(5, 2), BUDGET, group=2)
    return [begun, rollouts.programs]


def two(port, index, case="served"):
    """One process of two, on a mesh over both."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, int(index))
    mesh = make_mesh({"data": 2, "tensor": 2})
    return served(mesh) if case == "served" else rolled(mesh, Toggle(probe=2, every=4, loss=1.0))


CASES = {
    "attention": lambda: texts(attention(), 0),
    "recurrent": lambda: texts(recurrent(), 1),
    "verdicts": verdicts,
    "meshes": on_meshes,
    "heads": heads,
    "mixes": mixes,
    "refused": refused,
    "alone": lambda: served(None),
    "rolled": lambda: rolled(None),
    "warmed": lambda: warmed(make_mesh({"data": 2})),
}

if __name__ == "__main__":
    jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[2] / ".cache" / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    if sys.argv[1] == "two":
        print(json.dumps({"two": two(*sys.argv[2:])}))
    else:
        print(json.dumps({name: CASES[name]() for name in sys.argv[1:]}))
