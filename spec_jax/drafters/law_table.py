"""What a target said behind n-grams of tokens: a hash table of the heads of its laws."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, UInt32

from spec_jax.drafters.laws import Laws
from spec_jax.drafters.matches import NO_TOKEN
from spec_jax.drafters.writers import hashed, winners


@flax.struct.dataclass
class LawTable:
    """Entries by n-gram: a mark that tells n-grams of one entry apart (0: unused), the mean law, and of how many."""

    mark: UInt32[Array, "e"]
    laws: Laws
    seen: Int[Array, "e"]


def empty(entries: int, k: int) -> LawTable:
    """No laws, and room for their k likeliest tokens."""
    laws = Laws(jnp.full((entries, k), NO_TOKEN, jnp.int32), jnp.full((entries, k), -jnp.inf, jnp.float32))
    return LawTable(jnp.zeros(entries, jnp.uint32), laws, jnp.zeros(entries, jnp.int32))


def places(last: Int[Array, "n"], entries: int) -> tuple[Int[Array, "n"], UInt32[Array, "n"]]:
    """Entry and mark of the last 1, 2, .. n tokens of a text, given latest first; mark 0 where it is shorter.

    Tokens before a text's first are NO_TOKEN.
    """
    seeds = jnp.array([2166136261, 84696351], jnp.uint32)
    factors = jnp.array([16777619, 709607], jnp.uint32)

    def step(code: Array, token: Array) -> tuple[Array, Array]:
        code = (code ^ (token + 1).astype(jnp.uint32)) * factors
        code = code ^ (code >> 15)
        return code, code

    code = lax.scan(step, seeds, last)[1]
    known = jnp.cumprod(last >= 0).astype(bool)
    return (code[:, 0] % jnp.uint32(entries)).astype(jnp.int32), jnp.where(known, code[:, 1] | 1, 0)


def find(table: LawTable, last: Int[Array, "n"]) -> Laws:
    """The law behind the longest end of a text, given latest first, that has one; no token where none has."""
    at, mark = places(last, table.mark.shape[0])
    hit = (table.mark[at] == mark) & (mark > 0)
    longest = jnp.max(jnp.where(hit, jnp.arange(1, last.shape[0] + 1), 0))
    laws = jax.tree.map(lambda x: x[at[jnp.maximum(longest - 1, 0)]], table.laws)
    return Laws(jnp.where(longest > 0, laws.ids, NO_TOKEN), jnp.where(longest > 0, laws.log_probs, -jnp.inf))


def renew(table: LawTable, last: Int[Array, "m n"], laws: Laws, rank: Int[Array, "m"], most: int) -> LawTable:
    """The table with m laws, each behind every n-gram that ends its text.

    An entry of the same n-gram becomes the mean of its laws, the last `most` of them at equal weight and earlier ones
    fading; another n-gram's is replaced. Of several for one entry, the one of highest rank counts, and of equals the
    one whose law hashes higher: their order plays no part. A rank below 0 leaves a law out.
    """
    entries, n = table.mark.shape[0], last.shape[1]
    at, mark = (x.reshape(-1) for x in jax.vmap(lambda x: places(x, entries))(last))
    laws, rank = jax.tree.map(lambda x: jnp.repeat(x, n, axis=0), (laws, rank))
    slot = jnp.where((mark > 0) & (rank >= 0), at, entries)
    bits = lax.bitcast_convert_type(laws.log_probs, jnp.uint32)
    code = hashed(jnp.concatenate([mark[:, None], laws.ids.astype(jnp.uint32), bits], axis=1))
    slot = winners(slot, entries, rank, code, jnp.arange(slot.shape[0], dtype=jnp.int32))

    seen = jnp.where(table.mark[at] == mark, table.seen[at], 0)
    share = jnp.log1p(seen)[:, None]
    old = Laws(table.laws.ids[at], table.laws.log_probs[at] + jnp.log(seen)[:, None] - share)
    mean = jax.vmap(_sum)(old, Laws(laws.ids, laws.log_probs - share))
    new = LawTable(mark, mean, jnp.minimum(seen + 1, most - 1))
    return jax.tree.map(lambda to, x: to.at[slot].set(x, mode="drop"), table, new)


def _sum(one: Laws, other: Laws) -> Laws:
    """The k likeliest tokens of two laws added up."""
    same = (one.ids[:, None] == other.ids) & (one.ids >= 0)[:, None]
    both = jnp.logaddexp(one.log_probs, jnp.where(same, other.log_probs, -jnp.inf).max(1))
    rest = jnp.where(same.any(0), -jnp.inf, other.log_probs)
    top, at = lax.top_k(jnp.concatenate([both, rest]), one.ids.shape[0])
    return Laws(jnp.where(top > -jnp.inf, jnp.concatenate([one.ids, other.ids])[at], NO_TOKEN), top)
