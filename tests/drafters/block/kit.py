"""What the block drafter tests share: a tiny Llama, block configs, and random parameters that draft something."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.drafters.block.config import FULL, BlockConfig
from spec_jax.drafters.block.ends import ends_of
from spec_jax.drafters.block.heads.ancestor import Ancestor
from spec_jax.drafters.block.heads.bigram import Bigram
from spec_jax.drafters.block.heads.gru import Domino
from spec_jax.drafters.block.heads.head import Plain
from spec_jax.drafters.block.heads.jacobi import Jacobi
from spec_jax.drafters.block.heads.lattice import Lattice
from spec_jax.drafters.block.heads.local import Local
from spec_jax.drafters.block.heads.markov import Markov
from spec_jax.drafters.block.heads.mixture import Mixture
from spec_jax.drafters.block.heads.selector import Selector
from spec_jax.drafters.block.heads.swiglu import SwiGlu
from spec_jax.drafters.block.network import BlockParams, init_network
from spec_jax.engine import loop, rows
from spec_jax.engine.engine import EngineParams
from spec_jax.engine.requests import request, stack
from spec_jax.models.checkpoint import required_tensors
from spec_jax.models.config import LlamaConfig
from spec_jax.models.llama import Llama, from_tensors
from spec_jax.sampling.constraint import free
from spec_jax.sampling.settings import Sampling

# Each program runs once: compiled without optimisation.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
V, H, MASK = 20, 16, 19
LLAMA = LlamaConfig(
    vocab_size=V, hidden_size=H, intermediate_size=24, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4
)

HEADS = {
    "plain": Plain(),
    "vanilla": Markov(rank=6),
    "gated": Markov(rank=6, kind="gated"),
    "rnn": Markov(rank=6, kind="rnn", confidence="hidden"),
    "domino": Domino(state=7, low=5),
    "selector": Selector(rank=6, candidates=4),
    "selector of all": Selector(rank=6, candidates=None),
    "swiglu": SwiGlu(inner=8),
    "jacobi": Jacobi(rank=6),
    "local": Local(low=5, state=6, alpha=0.4, beta=0.2),
    "local markov": Local(low=5, kind="markov", alpha=(9.0, 0.1, 0.2, 0.3), beta=0.3),
    "mixture": Mixture(components=3, rank=4),
    "ancestor": Ancestor(size=8, layers=2, heads=2, inner=6, candidates=5),
    "ancestor of all": Ancestor(size=8, heads=2, inner=6, candidates=None),
    "lattice": Lattice(candidates=3, size=8, heads=2, factor=6),
    "bigram": Bigram(weight=0.5, successors=3),
}


def tensors(config=LLAMA, seed=0, sharp=2.0):
    """A random target's tensors, whose laws are neither flat nor certain."""
    rng = np.random.default_rng(seed)
    draw = lambda shape: 1 + rng.normal(0, 0.1, shape) if len(shape) == 1 else rng.normal(0, 0.3, shape)  # noqa: E731
    found = {name: draw(shape) for name, shape in required_tensors(config).items()}
    return found | {"lm_head.weight": sharp * found["lm_head.weight"]}


@functools.cache
def llama(layers=3):
    """The target of these tensors."""
    config = dataclasses.replace(LLAMA, num_layers=layers)
    return Llama(config), from_tensors(config, tensors(config))


def config(**changes):
    sizes = dict(vocab_size=V, hidden_size=H, intermediate_size=24, num_heads=4, num_kv_heads=2, head_dim=4)
    rest = dict(block_size=5, mask_token=MASK, taps=(1, 3), layer_types=(FULL, FULL), causal=(False, False))
    return BlockConfig(**(sizes | rest | changes))


def noisy(tree, seed=0, scale=0.3):
    """Every float array of a tree with noise added, so that nothing is zero or the identity any more."""
    leaves, structure = jax.tree.flatten(tree)
    rng = np.random.default_rng(seed)
    return structure.unflatten([x + jnp.asarray(rng.normal(0, scale, x.shape), x.dtype) for x in leaves])


def params(c, head=None, seed=0, scale=0.3):
    """Random block parameters over the tiny Llama."""
    network = noisy(init_network(c, jax.random.key(seed)), seed, scale)
    own = None if head is None else noisy(head.init(c, jax.random.key(seed + 1)), seed + 1, scale)
    lm_head, kept = None, None
    return BlockParams(network, ends_of(llama()[1]), own, lm_head, kept)


def features(b=2, n=7, taps=2, seed=3):
    return jnp.asarray(np.random.default_rng(seed).normal(0, 1, (b, n, taps, H)), jnp.float32)


PROMPTS = [[1, 2, 3, 4, 5], [4], [5, 6, 7]]
SETTINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.8),
    "penalties": Sampling(temperature=1.0, presence_penalty=0.7, banned_tokens=(2,)),
}
begin = jit(rows.init, static_argnums=0)
go_on = jit(loop.decode, static_argnums=0)


def start(engine, own=None, params=None):
    """A batch with every prompt under every setting, prefilled; and the engine's parameters."""
    asked = [(prompt, setting) for setting in SETTINGS.values() for prompt in PROMPTS]
    made = [request(engine, p, engine.max_len - len(p), key=i, sampling=s) for i, (p, s) in enumerate(asked)]
    costs = jnp.ones(len(engine.widths))
    together = EngineParams(llama()[1] if params is None else params, own, free(engine.target.vocab_size), costs)
    return together, begin(engine, together, stack(made))


def decoded(engine, own=None, params=None):
    """The rows of that batch when all have ended."""
    together, state = start(engine, own, params)
    return go_on(engine, together, state, 2**30).rows
