"""The lazy state of a hybrid: what it is after any accepted path, and what moves, saves and resumes it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import Decoder, Engine, Sampling
from spec_jax.audit.state import check_state
from spec_jax.drafters.model_tree import ModelTree
from spec_jax.drafters.ngram import NGram
from spec_jax.drafters.none import NoDrafter
from spec_jax.drafters.small_model import SmallModel
from spec_jax.drafters.suffix import Suffix
from spec_jax.models import qwen, views
from spec_jax.models.toy import audit_table
from spec_jax.models.toy_recurrence import RecurrenceTarget
from spec_jax.topology.growth import Growth
from tests.models import qwen_kit as kit
from tests.models.qwen_kit import VOCAB, commit, materialize, path_of, prefill, score, tree_of

PARENTS = (-1, 0, 0, 1, 1, 2, 4, 5)  # node 6's path is 0, 1, 4, 6 and node 7's 0, 2, 5, 7
LENGTHS = (13, 6, 2)


def prefilled(target, params, seed=5):
    tokens = jnp.asarray(np.random.default_rng(seed).integers(0, VOCAB, (3, 13)), jnp.int32)
    return tokens, prefill(target, params, target.init_state(params, 3, 48), tokens, jnp.asarray(LENGTHS))[1]


def same_state(target, params, state, texts, atol=1e-5):
    """Every leaf of the materialized state against a fresh prefill of the texts, up to their lengths."""
    padded = np.stack([np.pad(t, (0, 32 - len(t))) for t in texts]).astype(np.int32)
    count = jnp.asarray([len(t) for t in texts])
    fresh = prefill(target, params, target.init_state(params, len(texts), 48), jnp.asarray(padded), count)[1]
    got, want = (materialize(target, s) for s in (state, fresh))
    np.testing.assert_array_equal(got.length, want.length)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for own, other in zip(got.layers, want.layers, strict=True):
        if isinstance(own, qwen.KeyValues):
            inside = (jnp.arange(48) < count[:, None])[:, None, :, None]
            own, other = ([jnp.where(inside, x, 0) for x in (s.k, s.v)] for s in (own, other))
        for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(other), strict=True):
            assert np.isfinite(b).all()
            np.testing.assert_allclose(a, b, atol=atol)


@pytest.mark.parametrize("rows", [16, 2], ids=["pending", "folded at once"])
def test_every_accepted_path_leaves_the_state_of_a_fresh_run(rows):
    """Ragged rows, each accepting another node of the tree, over several rounds; -1 accepts nothing."""
    target, params = kit.small(pending_rows=rows)
    tokens, state = prefilled(target, params)
    texts = [list(np.asarray(t[:n])) for t, n in zip(tokens, LENGTHS, strict=True)]
    rng = np.random.default_rng(0)
    nodes = [(6, 7, 0), (3, -1, 5), (1, 4, 7), (-1, 6, 2)]
    for accepted in nodes:
        tree = tree_of(rng.integers(0, VOCAB, (3, 8)), PARENTS)
        _, staged, state = score(target, params, state, tree)
        paths = [path_of(PARENTS, a) if a >= 0 else [] for a in accepted]
        padded = jnp.asarray([p + [7] * (4 - len(p)) for p in paths])
        state = commit(target, state, target.widen(staged, 11), padded, jnp.asarray([len(p) for p in paths]))
        for row, path in enumerate(paths):
            texts[row] += [int(tree.tokens[row, i]) for i in path]
        same_state(target, params, state, [np.asarray(t) for t in texts])
    assert {len(p) for a in nodes for p in [path_of(PARENTS, x) for x in a if x >= 0]} == {1, 2, 3, 4}


def test_a_wrong_path_is_seen():
    target, params = kit.small()
    tokens, state = prefilled(target, params)
    tree = tree_of(np.full((3, 8), 3) + np.arange(8), PARENTS)
    _, staged, state = score(target, params, state, tree)
    state = commit(target, state, staged, jnp.asarray([[0, 1, 4, 6]] * 3), jnp.asarray([4, 4, 4]))
    texts = [np.append(t[:n], tree.tokens[0, jnp.asarray([0, 2, 4, 6])]) for t, n in zip(tokens, LENGTHS, strict=True)]
    with pytest.raises(AssertionError):
        same_state(target, params, state, texts)


def test_scoring_folds_but_keeps_the_value():
    target, params = kit.small()
    _, state = prefilled(target, params)
    tree = tree_of(np.random.default_rng(1).integers(0, VOCAB, (3, 8)), PARENTS)
    _, staged, state = score(target, params, state, tree)
    state = commit(target, state, staged, jnp.asarray([[0, 1]] * 3), jnp.asarray([2, 1, 0]))
    lazy, _, folded = score(target, params, state, tree)

    @jax.jit
    def once_more(folded):
        output, _, twice = target.score(params, folded, tree)
        assert all(a is b for a, b in zip(jax.tree.leaves(folded), jax.tree.leaves(twice), strict=True))
        return output

    again = once_more(folded)
    full = score(target, params, materialize(target, state), tree)[0]
    for other in (again, full):
        np.testing.assert_allclose(other.logits, lazy.logits, atol=2e-5)
    for a, b in zip(
        jax.tree.leaves(materialize(target, state)), jax.tree.leaves(materialize(target, folded)), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_commit_refuses_a_state_that_score_did_not_return():
    target, params = kit.small()
    _, state = prefilled(target, params)
    _, staged, after = score(target, params, state, tree_of(np.zeros((3, 2)), (-1, 0)))
    path, length = jnp.zeros((3, 1), jnp.int32), jnp.ones(3, jnp.int32)
    for wrong in (state, commit(target, after, staged, path, length), materialize(target, after)):
        with pytest.raises(ValueError, match="state: got one with accepted rows pending"):
            target.commit(wrong, staged, path, length)
    toy = RecurrenceTarget(11)
    with pytest.raises(ValueError, match="state: got one with accepted tokens pending"):
        toy.commit(toy.init_state(audit_table(11), 1, 8), jnp.zeros((1, 2), jnp.int32), path[:1], length[:1])


def test_a_tree_scored_in_parts():
    target, params = kit.small()
    _, state = prefilled(target, params)
    tree = tree_of(np.random.default_rng(2).integers(0, VOCAB, (3, 8)), PARENTS)
    whole, want, _ = score(target, params, state, tree)
    staged = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), want)  # what a slot held before does not matter
    logits = []
    for start, n in ((0, 2), (2, 3), (5, 3)):
        output, staged, state = jax.jit(lambda s, x, at, n=n: target.score(params, s, tree, x, (at, n)))(
            state, staged, start
        )
        logits.append(output.logits)
    np.testing.assert_allclose(jnp.concatenate(logits, 1), whole.logits, atol=3e-5)
    for a, b in zip(jax.tree.leaves(staged), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_rows_move_with_what_they_have_pending():
    target, params = kit.small()
    tokens, state = prefilled(target, params)
    tree = tree_of(np.random.default_rng(1).integers(0, VOCAB, (3, 8)), PARENTS)
    _, staged, state = score(target, params, state, tree)
    after = commit(target, state, staged, jnp.asarray([[0, 2, 5, 7]] * 3), jnp.asarray([4, 1, 0]))
    texts = [
        np.append(np.asarray(tokens[i, :n]), np.asarray(tree.tokens[i, jnp.asarray([0, 2, 5, 7])])[:k])
        for i, (n, k) in enumerate(zip(LENGTHS, (4, 1, 0), strict=True))
    ]
    same_state(target, params, target.take(after, jnp.asarray([2, 0])), [texts[2], texts[0]])
    swapped = target.insert(after, jnp.asarray([2, 7]), target.take(after, jnp.asarray([0, 1])))
    same_state(target, params, swapped, [texts[0], texts[1], texts[0]])
    same_state(target, params, target.take(state, jnp.asarray([1])), [np.asarray(tokens[1, :6])])  # pending None
    gone = target.release(after, jnp.asarray([1]))
    same_state(target, params, gone, [texts[0], np.asarray([], np.int32), texts[2]])


def test_stacked_layers_equal_a_tuple():
    config = dataclasses.replace(
        kit.HYBRID,
        layer_types=("linear_attention", "full_attention") * 2 + ("linear_attention",),
        sparse=(True, False, True, False, True),
    )
    target, params = kit.small(config, taps=(0, 3, 5))
    stacked = qwen.stack_layers(config, params)
    assert len(stacked.layers.stacked) == 2 and len(stacked.layers.rest) == 1
    outputs = []
    for p in (params, stacked):
        tokens, state = prefilled(target, p)
        tree = tree_of(np.random.default_rng(1).integers(0, VOCAB, (3, 8)), PARENTS)
        output, staged, state = score(target, p, state, tree)
        state = commit(target, state, target.widen(staged, 12), jnp.asarray([[0, 1, 4, 6]] * 3), jnp.asarray([4, 2, 0]))
        state = target.insert(state, jnp.asarray([1, 7]), target.take(state, jnp.asarray([0, 0])))
        after = score(target, p, target.release(state, jnp.asarray([0])), tree)
        outputs.append((output, after[0], materialize(target, after[2]).length))
    for a, b in zip(*map(jax.tree.leaves, outputs), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)
    assert outputs[0][0].features.shape == (3, 8, 3, 32)


def test_the_state_check():
    target, params = kit.small()
    report = check_state(target, params, [3, 1, 4, 1, 5], k=3, rounds=2, patterns=8)
    assert report.text_equal and 0 < report.error < 1e-4
    exact = check_state(RecurrenceTarget(11), audit_table(11), [3, 1, 4], k=3, rounds=3, patterns=64)
    assert exact.text_equal and exact.error == 0.0


@dataclasses.dataclass(frozen=True)
class KeepsOne(RecurrenceTarget):
    """A commit that loses the path's last token."""

    def commit(self, state, staged, path, length):
        return dataclasses.replace(super().commit(state, staged, path, length - 1), length=state.length + length)


def test_the_state_check_sees_a_lost_token():
    assert check_state(KeepsOne(11), audit_table(11), [3, 1, 4], k=2, rounds=2, patterns=9).error > 0


def test_the_integer_state_is_exact_along_every_path():
    toy, table = RecurrenceTarget(VOCAB, pending_rows=3), audit_table(VOCAB)
    rng, texts = np.random.default_rng(0), [[5, 1, 2], [7], [9, 9, 8, 1, 0, 3]]
    state = toy.init_state(table, 3, 0)
    count = jnp.asarray([3, 1, 6])
    state = toy.prefill(table, state, jnp.asarray([t + [4] * (6 - len(t)) for t in texts]), count)[1]
    for accepted in ((6, 7, 0), (3, -1, 5), (1, 4, 7), (-1, 6, 2)):
        tree = tree_of(rng.integers(0, VOCAB, (3, 8)), PARENTS)
        output, staged, state = toy.score(table, state, tree)
        paths = [path_of(PARENTS, a) if a >= 0 else [] for a in accepted]
        for row, (path, text) in enumerate(zip(paths, texts, strict=True)):
            for depth, node in enumerate(path):
                s, last = by_hand(toy, text + [int(tree.tokens[row, i]) for i in path[: depth + 1]])
                assert output.features[row, node].tolist() == [s, *last]
            text += [int(tree.tokens[row, i]) for i in path]
        padded = jnp.asarray([p + [7] * (4 - len(p)) for p in paths])
        state = toy.commit(state, toy.widen(staged, 9), padded, jnp.asarray([len(p) for p in paths]))
        whole = toy.materialize(state)
        for row, text in enumerate(texts):
            s, last = by_hand(toy, text)
            assert (int(whole.s[row]), whole.last[row].tolist(), int(whole.length[row])) == (s, last, len(text))
    moved = toy.release(toy.insert(state, jnp.asarray([0]), toy.take(state, jnp.asarray([2]))), jnp.asarray([1]))
    whole = toy.materialize(moved)
    assert whole.s.tolist() == [by_hand(toy, t)[0] for t in (texts[2], [], texts[2])]


def by_hand(toy, text):
    s = 0
    for token in text:
        s = (toy.a * s + toy.b * token + toy.c) % 8191
    return s, ([-1] * 4 + text)[-4:]


PROMPTS = [[3, 1, 4, 1, 5, 3, 1, 4], [7] * 6, [2, 8, 2, 8, 2]]
HOT = Sampling(temperature=1.3, top_p=0.9)


def decoders(drafter, drafter_params=None, widths=()):
    """Decoders of an engine by batch size, each made once."""
    target, params = kit.small()
    engine = Engine(target, 64, drafter=drafter, prefill_chunk=8, widths=widths)
    return functools.cache(lambda batch: Decoder(engine, params, drafter_params, batch=batch))


@functools.cache
def ngrams():
    return decoders(NGram(5), widths=(1, 6))


def texts_of(decoder_of, batches=(1, 3)):
    """Greedy and sampled texts: of the first prompt alone, then of all three together."""
    out = []
    for batch in batches:
        for sampling in (Sampling(), HOT):
            for prompts in ([PROMPTS[0]],) if batch == 1 else (PROMPTS,):
                out += [r.tokens for r in decoder_of(batch).generate(prompts, 20, key=4, sampling=sampling)]
    return out


@pytest.fixture(scope="module")
def plain():
    return texts_of(decoders(NoDrafter()))


def test_plain_texts_are_no_loops(plain):
    assert len(plain) == 8 and all(len(t) == 20 for t in plain)
    assert plain[0] == plain[2] and plain[1] == plain[5] and len(set(plain)) == 6


def test_speculative_text_is_plain_text(plain):
    assert texts_of(ngrams()) == plain
    assert texts_of(decoders(Suffix(5)), (3,)) == plain[2:]


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_a_hybrid_drafts_for_itself(kind, plain):
    """A view without a layer as small model: its own lazy state follows every verdict."""
    target, params = kit.small()
    view, fewer = views.skip(target, params, (2,))
    drafter = SmallModel(view, 3) if kind == "chain" else ModelTree(view, Growth(7, 3, 2, 2))
    assert texts_of(decoders(drafter, fewer), (3,)) == plain[2:]


def test_save_and_resume(tmp_path, plain):
    d = ngrams()(3)
    ids = [d.submit(prompt, 20, key=4, sampling=HOT)[0] for prompt in PROMPTS]
    d.step(3)
    d.save(str(tmp_path / "state"))
    for id in ids:
        d.close(id)
    assert all(u.result.finish == "closed" for u in d.run())
    d.restore(str(tmp_path / "state"))
    assert [r.tokens for r in sorted((u.result for u in d.run() if u.result), key=lambda r: r.id)] == plain[5:]
