"""What a score changed: untouched arrays stay out of the switch, and the structure may change."""

import jax
import jax.numpy as jnp

from spec_jax.engine.changes import changed, changes


def score(state, amount):
    """Folds what is pending, and leaves the cache alone."""
    return {"cache": state["cache"], "s": state["s"] + state["pending"] * amount, "pending": None}


def test_the_new_state_comes_back_with_its_own_structure():
    old = {"cache": jnp.arange(6.0), "s": jnp.float32(1), "pending": jnp.float32(2)}
    new = score(old, 3)
    difference = changes(old, new)
    assert len(difference.arrays) == 1
    again = changed(old, difference)
    assert again["cache"] is old["cache"] and again["s"] is new["s"] and again["pending"] is None
    same = changes(old, dict(old))
    assert same.arrays == [] and all(changed(old, same)[name] is old[name] for name in old)


def test_a_switch_returns_only_what_changed():
    old = {"cache": jnp.arange(6.0), "s": jnp.float32(1), "pending": jnp.float32(2)}

    def step(state, which):
        branches = [lambda n=n: changes(state, score(state, n)) for n in (1, 5)]
        return changed(state, jax.lax.switch(which, branches))

    assert float(jax.jit(step)(old, 1)["s"]) == 11.0
    switches = [e for e in jax.make_jaxpr(step)(old, 1).eqns if e.primitive.name == "cond"]
    assert [[v.aval.shape for v in e.outvars] for e in switches] == [[()]]
