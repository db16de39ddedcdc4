import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_jax.sampling.constraint import free, from_transitions
from spec_jax.sampling.history import from_text

V, SIZE = 5, 12
BOUND = from_transitions(np.array([[1, 0, 0, 1, 0], [0, 1, 1, 0, 1]]))


@jax.jit
def stepped(text, prompt_length, length, block, n):
    """The history of text[:length], then of the first n tokens of a block."""
    past = from_text(text, prompt_length, length, jnp.int32(1), V)
    return jax.lax.fori_loop(0, n, lambda i, h: h.step(block[i], BOUND), past)


@given(st.lists(st.integers(0, V - 1), min_size=2, max_size=SIZE), st.data())
@settings(max_examples=40)
def test_inside_a_block_as_in_the_text(tokens, data):
    prompt = data.draw(st.integers(1, len(tokens) - 1))
    length = data.draw(st.integers(prompt, len(tokens)))
    text = np.full(SIZE, V - 1)  # what lies behind the text looks like tokens
    text[: len(tokens)] = tokens
    block = np.resize(tokens[length:], SIZE) if length < len(tokens) else np.zeros(SIZE)
    given_ = (jnp.asarray(text, jnp.int32), jnp.int32(prompt))
    inside = stepped(*given_, jnp.int32(length), jnp.asarray(block, jnp.int32), jnp.int32(len(tokens) - length))
    from_all = stepped(*given_, jnp.int32(len(tokens)), jnp.asarray(block, jnp.int32), jnp.int32(0))
    for name in ("generated", "counts", "in_prompt"):
        np.testing.assert_array_equal(getattr(inside, name), getattr(from_all, name))
    assert inside.counts.tolist() == np.bincount(tokens[prompt:], minlength=V).tolist()
    assert inside.in_prompt.tolist() == [v in tokens[:prompt] for v in range(V)]
    assert inside.generated == len(tokens) - prompt
    state = 1
    for token in tokens[length:]:
        state = int(BOUND.step(jnp.int32(state), jnp.int32(token)))
    assert inside.state == state


def test_without_counts():
    past = from_text(jnp.zeros(4, jnp.int32), jnp.int32(1), jnp.int32(3), jnp.int32(0), None)
    after = past.step(jnp.int32(2), free(V))
    assert after.counts is None and after.in_prompt is None and after.generated == 3
