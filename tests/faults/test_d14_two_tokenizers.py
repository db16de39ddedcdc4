"""D14: a drafter with another tokenizer. Text is not translated; what is offered are the tokens that both have."""

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from spec_jax.drafters.none import NoDrafter
from spec_jax.drafters.small_model import SmallModel
from spec_jax.engine.decoder import Decoder
from spec_jax.engine.engine import Engine
from spec_jax.models.shared_tokens import SharedTokens, require_same_ids, shared_ids
from spec_jax.models.tokenizer import Tokenizer
from spec_jax.models.toy import AuditTarget, audit_table

LETTERS = "abcd"
PAIRS = [(x, y) for x in LETTERS for y in LETTERS]
V = len(LETTERS)


def made(tokens, merges=()):
    backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, list(merges)))
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend)


CHARS = made(LETTERS)
BOTH = made([*map("".join, PAIRS), *LETTERS], PAIRS)
PAIRS_ALONE = made(map("".join, PAIRS))


def test_a_drafter_with_another_tokenizer_is_refused():
    assert BOTH.encode("abc") != CHARS.encode("abc") and BOTH.decode(BOTH.encode("abc")) == "abc"
    with pytest.raises(ValueError, match="text is not translated between tokenizers"):
        require_same_ids(CHARS, BOTH)
    with pytest.raises(ValueError, match="at least one that it has"):
        SharedTokens(AuditTarget(len(PAIRS)), V).params(None, shared_ids(CHARS, PAIRS_ALONE, V))


def in_own_ids(d, view, prompt):
    """After every round, whether what the drafter's model holds is the text, in that model's ids and positions."""
    d.submit(prompt, 24)
    ids = shared_ids(CHARS, BOTH, V)
    while d.busy:
        d.step(1)
        rows, state = d._state.rows, d._state.drafter.model
        for row in np.flatnonzero(np.asarray(rows.running)):
            length = int(rows.length[row]) - 1
            seen = ids[np.asarray(rows.tokens[row])]
            entries = np.asarray(view.model.entry(jnp.asarray(seen), jnp.arange(seen.size)))[:length]
            yield np.array_equal(state.slots[row, :length], entries)


def test_drafts_of_shared_tokens_change_no_text():
    """The drafter's own model sees its own ids of the text, at its own positions; the target sees its own alone."""
    size, ids = len(PAIRS) + V, shared_ids(CHARS, BOTH, V)
    assert BOTH.decode(ids) == LETTERS
    view = SharedTokens(AuditTarget(size), V)
    drafter = SmallModel(view, 3)
    engine = Engine(AuditTarget(V), 48, drafter=drafter, prefill_chunk=8)
    plain = Engine(AuditTarget(V), 48, drafter=NoDrafter(), prefill_chunk=8)
    own, table = view.params(audit_table(size), ids), audit_table(V)
    rng = np.random.default_rng(14)
    prompts = [CHARS.encode("".join(rng.choice(list(LETTERS), rng.integers(1, 9)))) for _ in range(50)]
    got = (d := Decoder(engine, table, own, batch=10)).generate(prompts, 24)
    want = Decoder(plain, table, batch=10).generate(prompts, 24)
    assert [r.tokens for r in got] == [r.tokens for r in want]
    assert sum(r.counters["accepted"] for r in got) > 0
    assert all(in_own_ids(d, view, prompts[0]))
    untranslated = Decoder(engine, table, view.params(audit_table(size), np.arange(V)), batch=10)
    assert not any(in_own_ids(untranslated, view, prompts[0]))
