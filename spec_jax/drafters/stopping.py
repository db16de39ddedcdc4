"""DISCO (arXiv 2405.04304): a classifier of what a drafter's law looks like says when to stop; after its abstract."""

from __future__ import annotations

import dataclasses
import math
from os import PathLike

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Bool, Float, Int
from safetensors.numpy import load_file, save_file

from spec_jax.models.target import Target
from spec_jax.tree import Tree

FEATURES = ("odds", "entropy", "depth")


@dataclasses.dataclass(frozen=True)
class Classifier:
    """The chance that a drafted token is accepted if those before it are: logistic in the `features` of its law.

    As it is without training, the chance is the likeliest token's own.

    Attributes:
        weights: of the log-odds of the likeliest token, of the law's entropy, and of the token's depth in the draft.
        bias: what is added to them.
    """

    weights: tuple[float, float, float] = (1.0, 0.0, 0.0)
    bias: float = 0.0

    def __post_init__(self) -> None:
        """Check the settings."""
        if not isinstance(self.weights, tuple) or len(self.weights) != len(FEATURES):
            raise ValueError(f"weights: got {self.weights!r}, takes a tuple of {len(FEATURES)}, for {FEATURES}")
        if not all(math.isfinite(x) for x in (*self.weights, self.bias)):
            raise ValueError(f"weights, bias: got {self.weights}, {self.bias}, takes finite numbers")

    def __call__(self, law: Float[Array, "*b vocab"], depth: Int[Array, "*b"] | int) -> Float[Array, "*b"]:
        """The chance of a token of a law of log-probs, at a depth counted from 0."""
        return jax.nn.sigmoid(features(law, depth) @ jnp.asarray(self.weights, jnp.float32) + self.bias)

    def save(self, path: str | PathLike) -> None:
        """Write both as a safetensors file."""
        save_file({"weights": np.array(self.weights), "bias": np.array(self.bias)}, path)


def load(path: str | PathLike) -> Classifier:
    """A classifier that `save` wrote. Raises ValueError for a file of other arrays."""
    file = load_file(path)
    found, wanted = {name: x.shape for name, x in file.items()}, {"weights": (len(FEATURES),), "bias": ()}
    if found != wanted:
        raise ValueError(f"path: got arrays {found}, takes {wanted}")
    odds, entropy, depth = file["weights"].tolist()
    return Classifier((odds, entropy, depth), float(file["bias"]))


def features(law: Float[Array, "*b vocab"], depth: Int[Array, "*b"] | int) -> Float[Array, "*b f"]:
    """Log-odds of the likeliest token (chances of 0.001 .. 0.999), entropy in nats, and depth, of laws of log-probs."""
    p = jnp.exp(law)
    peak = jnp.clip(p.max(-1), 1e-3, 1 - 1e-3)
    entropy = -jnp.where(p > 0, p * law, 0.0).sum(-1)
    return jnp.stack([jnp.log(peak / (1 - peak)), entropy, jnp.broadcast_to(depth, entropy.shape)], axis=-1)


def examples(
    model: Target, params: object, tokens: npt.ArrayLike, prompt_length: int, k: int
) -> tuple[Float[np.ndarray, "m f"], Bool[np.ndarray, "m"]]:
    """What a drafter's drafts behind each place of a greedy text would have been: features, and whether accepted.

    One pass of the drafter's model over the text tells all drafts: a token at depth d is drafted behind accepted ones,
    which are the text's, and is accepted where the model's choice is the text's next token. A draft ends with the
    first that is not.

    Args:
        model: the drafter's.
        params: its parameters.
        tokens: a text that the target wrote greedily, prompt first.
        prompt_length: drafts begin behind this many tokens or more; at least 1.
        k: most tokens of a draft.
    """
    text = np.asarray(tokens, np.int32)
    if text.ndim != 1 or not 1 <= prompt_length < len(text):
        raise ValueError(f"prompt_length: got {prompt_length} for a text of shape {text.shape}, takes 1 .. length - 1")
    read = text[None, :-1]
    tree = Tree(jnp.asarray(read), jnp.arange(-1, read.shape[1] - 1)[None], jnp.ones(read.shape, bool))
    logits = model.score(params, model.init_state(params, 1, len(text)), tree)[0].logits[0, prompt_length - 1 :]
    right = np.asarray(logits.argmax(-1)) == text[prompt_length:]
    laws, found, accepted = jax.nn.log_softmax(logits.astype(jnp.float32)), [], []
    for start in range(len(right)):
        wrong = np.flatnonzero(~right[start : start + k])
        count = int(wrong[0]) + 1 if len(wrong) else min(k, len(right) - start)
        found += [(start + d, d) for d in range(count)]
        accepted += right[start : start + count].tolist()
    at, depth = np.array(found, np.int32).T
    return np.asarray(features(laws[at], jnp.asarray(depth))), np.array(accepted)


def fit(features: npt.ArrayLike, accepted: npt.ArrayLike, ridge: float = 1e-3, steps: int = 50) -> Classifier:
    """The classifier of the greatest likelihood, less ridge / 2 of the squared weights for each example, by Newton.

    Args:
        features: [m, f] of drafted tokens whose predecessors were accepted (`examples`).
        accepted: [m], whether each was.
        ridge: above 0; keeps weights finite where one feature tells all.
        steps: of Newton's method, at most.
    """
    x, y = np.asarray(features, np.float64), np.asarray(accepted, bool)
    if x.ndim != 2 or x.shape[1:] != (len(FEATURES),) or y.shape != x.shape[:1] or not len(y):
        wanted = f"[m, {len(FEATURES)}] and [m]"
        raise ValueError(f"features: got shape {x.shape} with accepted of {y.shape}, takes {wanted}")
    if not ridge > 0:
        raise ValueError(f"ridge: got {ridge!r}, takes a number above 0")
    x = np.column_stack([x, np.ones(len(x))])
    held, w = ridge * np.diag([1.0] * len(FEATURES) + [1e-3]), np.zeros(len(FEATURES) + 1)

    def loss(w: np.ndarray) -> float:
        return np.logaddexp(0, np.where(y, -1, 1) * (x @ w)).mean() + w @ held @ w / 2

    for _ in range(steps):
        p = np.exp(-np.logaddexp(0, -x @ w))
        slope = x.T @ (y - p) / len(y) - held @ w
        step = np.linalg.solve((x * (p * (1 - p))[:, None]).T @ x / len(y) + held, slope)
        while loss(w + step) > loss(w) and np.abs(step).max() > 1e-9:
            step = step / 2
        w = w + step
        if np.abs(step).max() <= 1e-9:
            break
    return Classifier((float(w[0]), float(w[1]), float(w[2])), float(w[3]))
