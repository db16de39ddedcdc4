"""One round: draft, score, accept, commit. Batched, pure, no shape depends on data."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from spec_jax import tree as trees
from spec_jax.drafters.drafter import Committed, Context
from spec_jax.engine import devices
from spec_jax.engine.changes import Changes, changed, changes
from spec_jax.engine.engine import Engine, EngineParams
from spec_jax.engine.state import EngineState, Rows
from spec_jax.engine.stops import trim
from spec_jax.models.target import Output
from spec_jax.sampling import history
from spec_jax.sampling.constraint import FREE, Constraint
from spec_jax.tree import Draft
from spec_jax.verify.scores import Scores
from spec_jax.verify.verdict import Verdict


@devices.on_devices
def decode_round(engine: Engine, params: EngineParams, state: EngineState) -> EngineState:
    """One draft, one target pass, one verdict and one commit for every running row; finished rows do not move."""
    rows = state.rows
    context = context_of(rows, params.constraint, state.target)
    draft, drafter_state = engine.drafter.propose(params.drafter, state.drafter, context)
    draft = devices.one_draft(engine, usable(draft, context, engine.target.vocab_size))
    which = engine.controller.decide(state.controller, draft, rows.running, params.cost, engine.widths)
    width = jnp.asarray(engine.widths)[which]
    passes = [_verify_width(engine, params, state, context, w) for w in engine.widths]
    verdict, staged, taps, difference = lax.switch(which, passes, draft)
    target_state = changed(state.target, difference)

    keep, finish = trim(rows, verdict, engine.max_len)
    target_state = engine.target.commit(target_state, staged, verdict.path, keep)
    anchor = context.anchor
    block = jnp.concatenate([anchor[:, None], verdict.tokens[:, :-1]], axis=1)
    last = jax.vmap(lambda tokens, n: tokens[jnp.maximum(n - 1, 0)])(verdict.tokens, keep)
    committed = Committed(
        tokens=block,
        start=rows.length - 1,
        length=keep,
        next_token=jnp.where(keep > 0, last, anchor),
        path=verdict.path,
        taps=taps,
        tree=dataclasses.replace(draft.tree, valid=_verified(draft, width)),
    )
    after = EngineState(
        rows=_advance(rows, draft, width, verdict, keep, finish),
        target=target_state,
        drafter=engine.drafter.observe(params.drafter, drafter_state, committed),
        controller=engine.controller.observe(state.controller, draft, width, verdict, rows.running),
    )
    return devices.settled(engine, after)


def context_of(rows: Rows, constraint: Constraint, target: Any = None) -> Context:
    """The drafter's view of the rows, and of the target's state."""
    return Context(
        tokens=rows.tokens,
        length=jnp.maximum(rows.length, 1),
        prompt_length=rows.prompt_length,
        room=rows.limit - rows.length,
        active=rows.running,
        key=rows.key,
        sampling=rows.sampling,
        state=rows.state,
        constraint=constraint,
        sampled=(rows.running & rows.sampling.sampled).any(),
        adjusted=(rows.running & (rows.sampling.adjusted | (rows.state != FREE))).any(),
        target=target,
    )


def verify_rows(engine: Engine, context: Context, draft: Draft, output: Output) -> Verdict:
    """The rule on every row, in the cheapest of three programs that serves the batch: greedy, sampled, or adjusted."""

    def program(sampled: bool, adjusted: bool):
        def run(batch: Any, constraint: Constraint) -> Verdict:
            def one(key, draft, logits, features, row, text, prompt_length, length, constraint_state):
                vocab = logits.shape[-1] if adjusted else None
                past = history.from_text(text, prompt_length, length, constraint_state, vocab)
                flags = {"sampled": sampled, "adjusted": adjusted, "want_log_probs": engine.log_probs}
                scores = Scores(logits, row, past, length, constraint, **flags, features=features)
                return engine.rule(key, draft, scores, engine.block)

            return jax.vmap(one)(*batch)

        return run

    programs = [program(False, False), program(True, False), program(True, True)]
    run = lambda batch, shared: lax.switch(shared[0], programs, batch, shared[1])  # noqa: E731
    c = context
    scored = (output.logits, output.features)
    batch = (c.key, draft, *scored, c.sampling, c.tokens, c.prompt_length, c.length, c.state)
    shared = (jnp.where(c.adjusted, 2, c.sampled.astype(jnp.int32)), c.constraint)
    mesh = devices.mesh_of(engine)
    return run(batch, shared) if mesh is None else devices.decided(mesh, run, batch, shared)


def _verify_width(engine: Engine, params: EngineParams, state: EngineState, context: Context, width: int):
    """The branch that scores and verifies the first `width` nodes; results padded to the full draft."""
    n = engine.widths[-1]

    def branch(draft: Draft) -> tuple[Verdict, Any, Any, Changes]:
        cut = trees.first(draft, width)
        output, staged, target_state = engine.target.score(params.target, state.target, cut.tree)
        verdict = verify_rows(engine, context, cut, output)
        taps = engine.drafter.tap(output)
        fill = lambda x, axis: jnp.pad(x, [(0, n - width if a == axis else 0) for a in range(x.ndim)])  # noqa: E731
        taps = jax.tree.map(lambda x: fill(x, 1), taps)
        return verdict, engine.target.widen(staged, n), taps, changes(state.target, target_state)

    return branch


def usable(draft: Draft, context: Context, vocab_size: int) -> Draft:
    """The draft without nodes that could not be emitted, and without ids that are no tokens of the target's.

    Dropped are nodes deeper than the room less the bonus token, those of finished rows, and those on a root path with
    an id outside the vocabulary, in whose place stands token 0. A drafter that says which law it drew from must draw
    the target's tokens: the last kind of drop would depend on what was drawn.
    """
    reach = jax.vmap(trees.ancestors)(draft.tree.parent)
    depth = reach.sum(-1) - 1
    known = (draft.tree.tokens >= 0) & (draft.tree.tokens < vocab_size)
    useful = (depth < context.room[:, None]) & context.active[:, None] & (known[:, None] | ~reach).all(-1)
    tree = dataclasses.replace(
        draft.tree,
        tokens=jnp.where(known, draft.tree.tokens, 0),
        valid=(draft.tree.valid & useful) | (depth == 0),
    )
    return dataclasses.replace(draft, tree=tree)


def _verified(draft: Draft, width: Int[Array, ""]) -> Array:
    return draft.tree.valid & (jnp.arange(draft.tree.valid.shape[1]) < width)


def _advance(rows: Rows, draft: Draft, width: Array, verdict: Verdict, keep: Array, finish: Array) -> Rows:
    """Rows with the kept tokens written behind their text."""
    m, size = verdict.tokens.shape[1], rows.tokens.shape[1]
    offset = jnp.arange(m)
    slot = jnp.where(offset < keep[:, None], rows.length[:, None] + offset, size)
    write = lambda buffer, values: (  # noqa: E731
        None if buffer is None else jax.vmap(lambda b, s, v: b.at[s].set(v, mode="drop"))(buffer, slot, values)
    )
    last_state = jax.vmap(lambda s, n: s[jnp.maximum(n - 1, 0)])(verdict.states, keep)
    return dataclasses.replace(
        rows,
        tokens=write(rows.tokens, verdict.tokens),
        length=rows.length + keep,
        finish=finish,
        state=jnp.where(keep > 0, last_state, rows.state),
        raw_log_probs=write(rows.raw_log_probs, verdict.raw_log_probs),
        log_probs=write(rows.log_probs, verdict.log_probs),
        counters=_count(rows, draft, width, verdict, keep),
    )


def _count(rows: Rows, draft: Draft, width: Array, verdict: Verdict, keep: Array):
    c, running = rows.counters, rows.running
    live = _verified(draft, width) & running[:, None]
    levels = jnp.arange(1, c.depth_reached.shape[1] + 1)
    depth = jax.vmap(trees.depth)(draft.tree.parent)
    reached = (live[:, :, None] & (depth[:, :, None] == levels)).any(1)
    accepted = jnp.minimum(verdict.accepted, keep)
    return dataclasses.replace(
        c,
        rounds=c.rounds + running,
        scored=c.scored + running * width,
        drafted=c.drafted + (live.sum(1) - running),
        accepted=c.accepted + jnp.where(running, accepted, 0),
        emitted=c.emitted + keep,
        trimmed=c.trimmed + (running & (keep <= verdict.accepted)),
        depth_reached=c.depth_reached + reached,
        depth_accepted=c.depth_accepted + (running[:, None] & (levels <= accepted[:, None])),
    )
