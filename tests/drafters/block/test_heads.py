"""Every causal head against a plain restatement of its formula, alone and behind the nodes of a tree."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.drafters.block.expander import BlockExpander, teacher_logits
from spec_jax.drafters.block.heads.head import Head
from spec_jax.drafters.block.heads.local import log_unigram
from spec_jax.drafters.block.heads.markov import Markov
from spec_jax.drafters.block.text import make_block, text_blocks
from tests.drafters.block import kit

TOKENS = np.random.default_rng(5).integers(0, kit.V - 1, (2, 4))


def array(x):
    return np.asarray(x, np.float64)


def lin(linear, x):
    y = x @ array(linear.kernel)
    return y if linear.bias is None else y + array(linear.bias)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def rms(x, weight, eps=1e-6, bias=0.0):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * array(weight) + bias


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def log_softmax(x):
    return np.log(softmax(x))


@functools.cache
def case(name, slots="fill_in"):
    """A head, its parameters, a block, and the head's logits along TOKENS (the anchor first)."""
    c = kit.config(slots=slots, block_size=5 if slots == "fill_in" else 4)
    head = kit.HEADS[name]
    params = kit.params(c, head)
    if name == "bigram":
        params = dataclasses.replace(params, head=head.counted([1, 2, 3, 1, 2, 4, 1, 5, 3, 1, 2], c))
    rng = np.random.default_rng(7)
    hidden = jnp.asarray(rng.normal(0, 1, (2, c.block_size, kit.H)), jnp.float32)
    feature = jnp.asarray(rng.normal(0, 1, (2, 2 + head.final_tap, kit.H)), jnp.float32)
    anchor = jnp.asarray(TOKENS[:, 0])
    make = kit.jit(lambda h: make_block(c, params, head, anchor, jnp.array([3, 8]), feature, h))
    block = make(hidden)
    tokens = TOKENS if name != "lattice" else _in_lattice(block)
    got = kit.jit(lambda b: teacher_logits(head, params, b, jnp.asarray(tokens)))(block)
    return head, params, block, tokens, np.asarray(got)


def _in_lattice(block):
    """Drafted tokens that are candidates, but for the last."""
    ids = np.asarray(block.prepared[0])
    return np.concatenate([TOKENS[:, :1], ids[:, 0, 1:2], ids[:, 1, :1], [[kit.V - 1]] * 2], axis=1)


def rows(block, b, d):
    return array(block.normed)[b, d + block.config.first_slot]


def plain(params, block, b, tokens):
    return array(block.logits)[b]


def markov(params, block, b, tokens):
    own, out, r = params.head, [], 6
    state = np.zeros(r)
    for d, t in enumerate(tokens):
        h, e = rows(block, b, d), array(own.previous)[t]
        kind = {None: "vanilla", r: "gated", 3 * r: "rnn"}[own.mixer and own.mixer.kernel.shape[1]]
        if kind == "gated":
            e = sigmoid(lin(own.mixer, np.concatenate([h, e]))) * e
        elif kind == "rnn":
            g, n, o = np.split(lin(own.mixer, np.concatenate([state, e, h])), 3)
            state = sigmoid(g) * state + (1 - sigmoid(g)) * np.tanh(n)
            e = np.tanh(o)
        out.append(array(block.logits)[b, d] + lin(own.bias, e))
    return np.stack(out)


def gru(unit, state, x):
    size = len(state)
    w, u = array(unit.into.kernel).T, array(unit.across.kernel).T
    part = lambda m, i: m[i * size : (i + 1) * size]  # noqa: E731
    r = sigmoid(part(w, 0) @ x + part(u, 0) @ state)
    z = sigmoid(part(w, 1) @ x + part(u, 1) @ state)
    n = np.tanh(part(w, 2) @ x + r * (part(u, 2) @ state))
    return (1 - z) * n + z * state


def embedding(params, t):
    return array(params.ends.embedding)[:, t]


def domino(params, block, b, tokens):
    own, out, state = params.head, [], np.zeros(7)
    for d, t in enumerate(tokens):
        state = gru(own.gru, state, embedding(params, t))
        bias = lin(own.out, silu(lin(own.low, np.concatenate([rows(block, b, d), state]))))
        out.append(array(block.logits)[b, d] + (bias if d >= 1 else 0))
    return np.stack(out)


def selector(params, block, b, tokens, m=4):
    own, out = params.head, []
    for d, t in enumerate(tokens):
        u = array(block.logits)[b, d]
        score = u + array(own.successor) @ (array(own.predecessor)[t] * lin(own.projection, rows(block, b, d)))
        keep = np.argsort(-u)[:m]
        out.append(np.where(np.isin(np.arange(kit.V), keep), score, -np.inf))
    return np.stack(out)


def head_logits(params, x):
    return x @ array(params.ends.head.kernel)


def swiglu(params, block, b, tokens):
    own, out = params.head, []
    for d, t in enumerate(tokens):
        h = array(block.hidden)[b, d + block.config.first_slot]
        both = np.concatenate([rms(embedding(params, t), own.norm), rms(h, own.norm)])
        u, g = np.split(lin(own.up_gate, both), 2)
        out.append(head_logits(params, rms(h + lin(own.down, silu(g) * u), params.network.norm)))
    return np.stack(out)


def jacobi(params, block, b, tokens):
    own, first, s = params.head, block.config.first_slot, block.config.block_size
    h = array(block.normed)[b]
    before = ([int(block.previous[b])] if first else []) + list(tokens)
    mean = lin(own.mean, h.mean(0))
    x = np.stack(
        [lin(own.joined, np.concatenate([lin(own.row, h[k]), mean, array(own.tokens)[before[k]]])) for k in range(s)]
    )
    mixed = x.copy()
    for k in range(s):
        for j in range(k + 1):
            mixed[k] += array(own.mixer)[:, k, j] * x[j]
    mixed += lin(own.down, silu(lin(own.gate, mixed)) * lin(own.up, mixed))
    return array(block.logits)[b] + lin(own.readout, mixed)[first:]


def local(params, block, b, tokens):
    own, out, state = params.head, [], np.zeros(6)
    alpha, beta = (0.4, 0.2) if own.gru is not None else (None, 0.3)
    for d, t in enumerate(tokens):
        z = array(block.logits)[b, d]
        if d > 0:
            if own.gru is not None:
                state = gru(own.gru, state, embedding(params, t))
                code = silu(lin(own.low, state))
            else:
                code, alpha = array(own.codes)[t], (9.0, 0.1, 0.2, 0.3)[d]
            z = z + alpha * lin(own.out, code) - beta * array(own.log_unigram)
        out.append(z)
    return np.stack(out)


def mixture(params, block, b, tokens):
    """By the definition: q(path, v) / q(path), products summed over z."""
    own, d_all = params.head, block.logits.shape[1]
    weights = softmax(lin(own.weigh, array(block.normed)[b].mean(0)))
    law = np.stack(
        [
            softmax(array(block.logits)[b, d] + lin(own.out, array(own.scale) * lin(own.low, rows(block, b, d))))
            for d in range(d_all)
        ]
    )
    out = []
    for d in range(d_all):
        path = np.prod([law[i, :, tokens[i + 1]] for i in range(d)], axis=0) * weights
        out.append(np.log((path[:, None] * law[d]).sum(0) / path.sum()))
    return np.stack(out)


def turn(x, position):
    half = x.shape[-1] // 2
    angle = position * 1e4 ** -(np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)


def ancestor(params, block, b, tokens, m=5):
    """The path as one causal sequence: the target's state, the rows, and then the tokens at positions 1, 2, .."""
    own, c, heads, size = params.head, block.config, 2, 8
    norm = lambda n, x: rms(x, n.weight, bias=array(n.bias))  # noqa: E731
    last = rms(array(block.feature)[b, -1], params.ends.norm)
    prefix = np.stack([last, *array(block.normed)[b, c.first_slot :]])
    x = lin(own.row_in, norm(own.row_norm, prefix))
    x = np.concatenate([x, lin(own.token_in, norm(own.token_norm, np.stack([embedding(params, t) for t in tokens])))])
    positions = [*range(len(prefix)), *range(1, len(tokens) + 1)]
    for leaves in own.layers:
        q, k, v = (
            y.reshape(len(x), heads, -1) for y in np.split(lin(leaves.qkv, norm(leaves.attention_norm, x)), 3, -1)
        )
        q, k = (np.stack([turn(y[i], p) for i, p in enumerate(positions)]) for y in (q, k))
        out = np.zeros_like(q)
        for i in range(len(x)):
            for h in range(heads):
                out[i, h] = softmax(k[: i + 1, h] @ q[i, h] / np.sqrt(size // heads)) @ v[: i + 1, h]
        x = x + lin(leaves.out, out.reshape(len(x), -1))
        gate, up = np.split(lin(leaves.gate_up, norm(leaves.mlp_norm, x)), 2, -1)
        x = x + lin(leaves.down, silu(gate) * up)
    query = lin(own.query, norm(own.out_norm, x[len(prefix) :]))
    u = array(block.logits)[b]
    keep = np.argsort(-u, axis=-1)[:, :m]
    mask = np.stack([np.isin(np.arange(kit.V), row) for row in keep])
    return np.where(mask, u + head_logits(params, query), -np.inf)


def lattice(params, block, b, tokens, m=3, scale=8.0):
    own, heads = params.head, 2
    u = array(block.logits)[b]
    d_all = len(u)
    ids = np.argsort(-u, axis=-1)[:, :m]
    log = np.take_along_axis(log_softmax(u), ids, axis=1)
    nodes, slot = [], []
    for d in range(d_all):
        for r in range(m):
            seen = np.array([log[d, r], np.exp(log[d, r]), log[d, r] - log[d, 0], r / (m - 1), float(r == 0)])
            seen = (seen - seen.mean()) / np.sqrt(seen.var() + 1e-5)
            x = lin(own.token, embedding(params, ids[d, r])) + lin(own.row, rows(block, b, d))
            x = x + lin(own.features_out, silu(lin(own.features_in, seen)))
            nodes.append(x + array(own.slot)[d] + array(own.rank)[r])
            slot.append(d)
    x, slot = np.stack(nodes), np.array(slot)
    apart = slot[:, None] - slot
    for leaves in own.layers:
        q, k, v = (
            y.reshape(len(x), heads, -1) for y in np.split(lin(leaves.qkv, rms(x, leaves.attention_norm)), 3, -1)
        )
        out = np.zeros_like(q)
        for h in range(heads):
            bias = array(leaves.apart)[h][apart + d_all - 1] + array(leaves.same)[h] * (apart == 0)
            out[:, h] = softmax(q[:, h] @ k[:, h].T / np.sqrt(q.shape[-1]) + bias) @ v[:, h]
        x = x + lin(leaves.out, out.reshape(len(x), -1))
        inner = lin(leaves.up, rms(x, leaves.mlp_norm))
        x = x + lin(leaves.down, 0.5 * inner * (1 + np.tanh(np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3))))
    x = rms(x, own.norm)
    joined = array(block.feature)[b].reshape(-1)
    context = rms(lin(params.network.fc, joined), params.network.feature_norm)
    a = rms(lin(own.context, context), own.context_norm)
    f = silu(lin(own.factors, np.stack([np.concatenate([row, a, row * a]) for row in x])))
    unit = lambda y: y / np.linalg.norm(y, axis=-1, keepdims=True)  # noqa: E731
    enter, leave = (unit(lin(w, f)).reshape(d_all, m, -1) for w in (own.enter, own.leave))
    before, out = unit(lin(own.anchor, a)), []
    for d, t in enumerate(tokens):
        if d > 0:
            place = np.flatnonzero(ids[d - 1] == t)
            before = leave[d - 1, place[0]] if len(place) else None
        score = u[d, ids[d]] if before is None else scale * enter[d] @ before
        out.append(np.full(kit.V, -np.inf))
        out[-1][ids[d]] = score
    return np.stack(out)


def bigram(params, block, b, tokens):
    text, out = [1, 2, 3, 1, 2, 4, 1, 5, 3, 1, 2], []
    pairs = list(zip(text, text[1:], strict=False))
    for d, t in enumerate(tokens):
        out.append(array(block.logits)[b, d] + 0.5 * np.log1p([pairs.count((t, v)) for v in range(kit.V)]))
    return np.stack(out)


WANTED = {
    "plain": plain,
    "vanilla": markov,
    "gated": markov,
    "rnn": markov,
    "domino": domino,
    "selector": selector,
    "selector of all": functools.partial(selector, m=kit.V),
    "swiglu": swiglu,
    "jacobi": jacobi,
    "local": local,
    "local markov": local,
    "mixture": mixture,
    "ancestor": ancestor,
    "ancestor of all": functools.partial(ancestor, m=kit.V),
    "lattice": lattice,
    "bigram": bigram,
}


@pytest.mark.parametrize("name", kit.HEADS)
def test_logits_are_those_of_the_formula(name):
    head, params, block, tokens, got = case(name)
    assert isinstance(head, Head)
    for b in range(2):
        want = WANTED[name](params, block, b, tokens[b])
        np.testing.assert_allclose(got[b], want, rtol=1e-4, atol=1e-4)
    assert name == "plain" or np.abs(np.where(np.isinf(got), 0, got - np.asarray(block.logits))).max() > 1e-2


@pytest.mark.parametrize("name", ("domino", "rnn", "jacobi", "ancestor"))
def test_shifted_slots_read_the_row_before(name):
    _, params, block, tokens, got = case(name, "shifted")
    for b in range(2):
        np.testing.assert_allclose(got[b], WANTED[name](params, block, b, tokens[b]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", kit.HEADS)
def test_a_node_of_a_tree_has_the_logits_of_its_path(name):
    head, params, block, tokens, along = case(name)
    expander = BlockExpander(head)
    other = (tokens[:, 1] + 1) % kit.V
    level = jnp.stack([jnp.asarray(other), jnp.asarray(tokens[:, 1])], axis=1)
    below = jnp.stack([jnp.asarray(tokens[:, 2]), jnp.asarray(other)], axis=1)

    @kit.jit
    def grown(block):
        pool, root = expander.root(params, block, 7)
        pool, first = expander.expand(params, pool, jnp.zeros((2, 2), jnp.int32), level)
        _, second = expander.expand(params, pool, jnp.broadcast_to(jnp.array([2, 1]), (2, 2)), below)
        return root, first[:, 1], second[:, 0]

    for d, got in enumerate(grown(block)):
        np.testing.assert_allclose(got, along[:, d], rtol=1e-4, atol=1e-4)


def test_jacobi_passes_end_in_the_sequential_choice():
    head, params, block, _, _ = case("jacobi")
    greedy = lambda logits: jnp.argmax(logits, axis=-1)  # noqa: E731
    settled = kit.jit(lambda b: dataclasses.replace(head, passes=4).marginals(params, b, greedy))(block)
    tokens = np.concatenate([TOKENS[:, :1], np.argmax(settled, axis=-1)[:, :3]], axis=1)
    for b in range(2):
        np.testing.assert_allclose(settled[b], jacobi(params, block, b, tokens[b]), rtol=1e-4, atol=1e-4)


def test_confidence_reads_the_token_before_and_is_calibrated():
    head, params, block, tokens, _ = case("vanilla")
    own, got = params.head, head.confidence_logits(params, block, jnp.asarray(tokens))
    for b in range(2):
        for d, t in enumerate(tokens[b]):
            z = lin(own.confidence, np.concatenate([rows(block, b, d), array(own.previous)[t]]))
            np.testing.assert_allclose(got[b, d], z[0] / array(own.temperature)[d], rtol=1e-4, atol=1e-4)
    none = Markov(rank=6, confidence=None)
    bare = dataclasses.replace(params, head=none.init(block.config, jax.random.key(0)))
    assert none.confidence_logits(bare, block, jnp.asarray(tokens)) is None


@pytest.mark.parametrize("name", kit.HEADS)
def test_new_heads_keep_the_networks_order_of_tokens(name):
    """What is drawn at the start corrects nothing, or very little: not the lattice, which stands alone.

    As training asks it, a head scores every token; the lattice alone can't.
    """
    head, params, block, _, _ = case(name)
    fresh = dataclasses.replace(params, head=head.init(block.config, jax.random.key(3)))

    def along(head):
        @kit.jit
        def run(block):
            again = dataclasses.replace(block, prepared=head.prepare(fresh, block))
            return teacher_logits(head, fresh, again, jnp.asarray(TOKENS))

        return np.asarray(run(block))

    got = along(head)
    whole = got if head.uncut == head else along(head.uncut)
    assert (whole > -np.inf).all() == (name != "lattice")
    np.testing.assert_allclose(whole[got > -np.inf], got[got > -np.inf], atol=1e-5)
    offset = np.where(np.isinf(got), 0, jax.nn.log_softmax(got) - jax.nn.log_softmax(block.logits))
    kept = got > -np.inf
    if name not in ("lattice", "selector", "ancestor"):
        assert kept.all() and np.abs(offset).max() < 0.2
    assert kept.sum(-1).min() >= 3


def test_frequencies_are_smoothed():
    np.testing.assert_allclose(np.exp(log_unigram([0, 1, 5])), [1 / 9, 2 / 9, 6 / 9], rtol=1e-6)


TRAINED = ("plain", "vanilla", "domino", "selector of all", "swiglu", "jacobi", "ancestor of all", "mixture")


@pytest.mark.parametrize("name", TRAINED)
def test_training_reaches_every_parameter_and_knows_its_labels(name):
    c, head = kit.config(), kit.HEADS[name]
    params, t = kit.params(c, head), 9
    features = kit.features(n=t, taps=2 + head.final_tap)
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, kit.V, (2, t)))
    anchors = jnp.array([[0, 3, 7], [2, 4, 8]])

    def loss(trainable):
        own = dataclasses.replace(params, network=trainable[0], head=trainable[1])
        out = text_blocks(c, own, features, tokens, anchors, head)
        cross = -jnp.take_along_axis(jax.nn.log_softmax(out.logits), out.labels[..., None], axis=-1)[..., 0]
        return (cross * out.known).sum(), out

    (_, out), gradient = kit.jit(jax.value_and_grad(loss, has_aux=True))((params.network, params.head))
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert np.isfinite(leaf).all(), path
        unused = "confidence" in str(path) or "temperature" in str(path)
        assert unused or np.abs(leaf).max() > 0, path
    for b in range(2):
        for i, at in enumerate(np.asarray(anchors[b])):
            for d in range(4):
                assert bool(out.known[b, i, d]) == (at + 1 + d < t)
                assert at + 1 + d >= t or out.labels[b, i, d] == tokens[b, at + 1 + d]
