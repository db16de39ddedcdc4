"""D18: after any accept counts the recurrent state is that of a fresh run on the committed text, and so is the window.

An integer recurrence, exactly, on chains and trees; and a gated delta layer of one head (d = 4) against a numpy loop.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta import fold
from spec_jax.engine.requests import request
from spec_jax.models.delta_mixer import DeltaState
from spec_jax.models.qwen import Qwen, QwenState
from spec_jax.models.qwen_config import DELTA
from spec_jax.models.qwen_text import init_params
from spec_jax.models.toy import audit_table
from tests.drafters.hybrid import config
from tests.faults import kit
from tests.faults.drafters import Follow
from tests.faults.oracle import generate
from tests.faults.recurrence import FAULTS, AuditRecurrence, digest, fresh, logits_of
from tests.faults.test_d15_audit import PROMPTS
from tests.faults.test_d16_tree import DEPTH, GOALS, PATHS, PLAIN, Goals, Paths

K, ROUNDS, BUDGET = 3, 5, 24
EVERY = np.array(list(itertools.product(range(K + 1), repeat=ROUNDS)))
COUNTS = EVERY[np.random.default_rng(18).choice(len(EVERY), 300, replace=False)]
LUT = audit_table(kit.WORDS, seed=18)
TEXTS = [p + generate(logits_of(LUT), p, BUDGET).tokens for p in PROMPTS]
TRUE = AuditRecurrence(kit.WORDS)


def chains(target, params, texts, max_rounds=kit.ALL):
    e = dataclasses.replace(kit.engine(Follow(K, kit.WORDS), log_probs=False), target=target)
    given = [texts[r % len(texts)] for r in range(len(COUNTS))]
    requests = [request(e, PROMPTS[r % len(texts)], BUDGET) for r in range(len(COUNTS))]
    plan = kit.plan(given, COUNTS, K, len(COUNTS))
    return kit.run(e, kit.engine_params(e, params, plan), kit.batch(requests, len(COUNTS)), max_rounds)


def trees(target, max_rounds):
    e = dataclasses.replace(kit.engine(Paths(), log_probs=False), target=target)
    text = np.zeros((len(GOALS), kit.MAX_LEN), np.int32)
    for row, out in enumerate(text):
        out[: len(TEXTS[row % 4])] = TEXTS[row % 4]
    requests = [request(e, PROMPTS[r % 4], BUDGET) for r in range(len(GOALS))]
    params = kit.engine_params(e, LUT, Goals(jnp.asarray(text), jnp.asarray(GOALS)))
    return kit.run(e, params, kit.batch(requests, len(GOALS)), max_rounds)


def right(state, target=TRUE):
    """Per row: the text, the state behind it (its last token, the anchor, is not in the state yet), and the window."""
    now, found = kit.settled(target, state.target), []
    for row, length in enumerate(state.rows.length.tolist()):
        text = state.rows.tokens[row, :length].tolist()
        same = (int(now.s[row]), now.window[row].tolist()) == fresh(text[:-1])
        found.append(same and text == TEXTS[row % len(TEXTS)][:length] and int(now.length[row]) == length - 1)
    return np.array(found)


@pytest.mark.parametrize("rounds", [*range(1, ROUNDS + 1), kit.ALL])
def test_chains_of_every_accept_count(rounds):
    state = chains(TRUE, LUT, TEXTS, rounds)
    assert right(state).all()
    if rounds != kit.ALL:
        assert (state.rows.length - state.rows.prompt_length == (COUNTS[:, :rounds] + 1).sum(1)).all()
    start = state.rows.prompt_length - 1
    for row in range(0, len(COUNTS), 7):
        length, text = int(state.rows.length[row]), state.rows.tokens[row].tolist()
        want = [digest(*fresh(text[: i + 1])) for i in range(start[row], length - 1)]
        assert state.drafter.hashes[row, start[row] : length - 1].tolist() == want


@pytest.mark.parametrize("rounds", [1, 2, GOALS.shape[1]])
def test_trees_with_every_node_as_the_last_accepted(rounds):
    state = trees(TRUE, rounds)
    assert right(state).all()
    for row, goals in enumerate(GOALS):
        assert state.rows.counters.accepted[row] == sum(DEPTH[g] for g in goals[:rounds] if g != PLAIN)
        if goals[0] == PLAIN:
            continue
        tokens, hashes = state.drafter.tokens[row, 0].tolist(), state.drafter.hashes[row, 0].tolist()
        before = PROMPTS[row % 4][:-1]
        assert hashes == [digest(*fresh([*before, *(tokens[v] for v in path)])) for path in PATHS]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught(fault):
    """After two rounds: what is done wrong with what is pending shows in the second."""
    target = AuditRecurrence(kit.WORDS, fault)
    state, wrong = trees(target, 2), (GOALS[:, 0] > 0) & (GOALS[:, 0] < 5) & (GOALS[:, 1] > 0)
    assert not right(state, target)[wrong].any()


# A gated delta layer of one head.

SIZES = {
    "linear_num_value_heads": 1, "linear_key_head_dim": 4, "linear_value_head_dim": 4, "hidden_size": 8,
    "intermediate_size": 12, "num_heads": 1, "head_dim": 4, "vocab_size": kit.WORDS, "mtp": False,
}  # fmt: skip


@functools.cache
def model():
    target, params = hybrid_of_one_layer()
    (layer,) = jax.device_get(params.layers)
    return target, params, layer


def hybrid_of_one_layer():
    c = config((DELTA,), sparse=False, **SIZES)
    params = init_params(c, jax.random.key(5), scale=0.8)
    (layer,) = params.layers
    slow = dataclasses.replace(layer.mixer, a_log=jnp.full_like(layer.mixer.a_log, np.log(0.1)))  # it remembers
    params = dataclasses.replace(params, layers=(dataclasses.replace(layer, mixer=slow),))
    return Qwen(c, taps=(), pending_rows=K + 1), dataclasses.replace(params, norm=3 * params.norm)


def numpy_state(text):
    """The layer's recurrent state and last convolution inputs behind a text, in float64, token by token."""
    target, params, layer = model()
    mixer, f = layer.mixer, lambda x: np.asarray(x, np.float64)  # noqa: E731
    embedding, qkv = f(params.embedding), f(mixer.qkv.kernel)
    state, inputs = np.zeros((4, 4)), [np.zeros(12)] * 3
    for token in text:
        x = embedding[:, token]
        h = x / np.sqrt((x**2).mean() + target.config.rms_norm_eps) * f(layer.mixer_norm)
        inputs.append(h @ qkv)
        z = (np.stack(inputs[-4:]) * f(mixer.conv)).sum(0)
        k, v = (z / (1 + np.exp(-z)))[4:].reshape(2, 4)
        k = k / np.sqrt((k**2).sum() + 1e-6)
        beta = 1 / (1 + np.exp(-(h @ f(mixer.b))))
        decay = np.exp(-np.exp(f(mixer.a_log)) * np.log1p(np.exp(h @ f(mixer.a) + f(mixer.dt_bias))))
        state = decay * state
        state = state + beta * np.outer(k, v - k @ state)
    return state, np.stack(inputs[-3:])


@functools.cache
def texts():
    target, params, _ = model()
    e = dataclasses.replace(kit.engine(log_probs=False), target=target)
    out = kit.run(e, kit.engine_params(e, params), kit.batch([request(e, p, BUDGET) for p in PROMPTS], 4))
    return [out.rows.tokens[r, : int(out.rows.length[r])].tolist() for r in range(4)]


def errors(target, rounds):
    """Per row, the largest error of the state and of the window behind the text."""
    state = chains(target, model()[1], texts(), rounds)
    (now,) = kit.settled(target, state.target).layers
    found = np.zeros(len(COUNTS))
    for row in range(len(COUNTS)):
        text = state.rows.tokens[row, : int(state.rows.length[row])].tolist()
        assert text == texts()[row % 4][: len(text)] or target is not model()[0]
        want, inputs = numpy_state(text[:-1])
        found[row] = max(np.abs(now.recurrent[row, 0] - want).max(), np.abs(now.conv[row] - inputs).max())
    return found


@pytest.mark.parametrize("rounds", [1, 2, ROUNDS])
def test_a_gated_delta_layer(rounds):
    assert errors(model()[0], rounds).max() < 1e-5


@dataclasses.dataclass(frozen=True)
class Faulty(Qwen):
    """The model with a fault in its commit."""

    fault: str = "none"

    def commit(self, state: QwenState, staged, path, length) -> QwenState:
        if self.fault == "a token too few in state and window":
            new = super().commit(state, staged, path, jnp.maximum(length - 1, 1))
            return dataclasses.replace(new, length=state.length + length)
        new = super().commit(state, staged, path, length)
        (own,) = new.layers
        assert isinstance(own, DeltaState) and own.pending is not None
        if self.fault == "pending dropped":
            own = dataclasses.replace(own, pending=jax.tree.map(jnp.zeros_like, own.pending))
        if self.fault == "pending folded twice":
            own = dataclasses.replace(own, recurrent=fold(own.recurrent, own.pending))
        if self.fault == "weights of another path":
            weight = jnp.roll(own.pending.weight, 1, axis=-1)
            own = dataclasses.replace(own, pending=dataclasses.replace(own.pending, weight=weight))
        if self.fault == "window off by one":
            own = dataclasses.replace(own, conv=jnp.roll(own.conv, 1, axis=1))
        return dataclasses.replace(new, layers=(own,))


@pytest.mark.parametrize(
    "fault",
    [
        "pending dropped",
        "pending folded twice",
        "weights of another path",
        "window off by one",
        "a token too few in state and window",
    ],
)
def test_a_fault_in_the_gated_delta_commit_is_caught(fault):
    """At once, in every row it can touch: the last fault needs an accepted token."""
    target, params, _ = model()
    bad = Faulty(target.config, target.taps, target.pending_rows, fault)
    touched = COUNTS[:, 0] > 0 if "too few" in fault else np.ones(len(COUNTS), bool)
    assert (errors(bad, 1)[touched] > 1e-3).all()
