"""The systems that `bench.py drafters` sets side by side, each with drafts of the same number of nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from spec_jax import configs
from spec_jax.configs.medusa import RATES
from spec_jax.control.throughput import Throughput
from spec_jax.drafters import load
from spec_jax.drafters.block.drafter import BlockDrafter
from spec_jax.drafters.block.shape import BestFirst
from spec_jax.drafters.combined import Combined
from spec_jax.drafters.depth_tree import Choices, DepthTree
from spec_jax.drafters.eagle import head as eagle
from spec_jax.drafters.head_tree import HeadTree
from spec_jax.drafters.ngram import NGram
from spec_jax.drafters.suffix import Suffix
from spec_jax.engine.engine import Engine
from spec_jax.models.load import LoadedTarget
from spec_jax.topology.branching import Branching
from spec_jax.topology.growth import Growth
from spec_jax.topology.static import likeliest

Shape = Growth | BestFirst | Choices | Branching
COMBINED = {"combined": "combined", "fallback": "suffix_fallback"}
"""Rows that join another one with retrieval, and their configurations."""
TRAINED = Path(load.__file__).with_name("trained")


@dataclasses.dataclass(frozen=True)
class System:
    """A configuration, and the folders that its weights may be in, the first that is there (none: it needs none).

    chain: drafted as a chain, where the configuration's drafts are trees.
    """

    config: str
    weights: tuple[str, ...] = ()
    chain: bool = False


SYSTEMS = {
    "ngram": System("prompt_lookup"),
    "suffix": System("suffix_decoding"),
    "mtp": System("mtp"),
    "mtp_trained": System("mtp", ("mtp",)),
    "eagle3": System("eagle3", ("eagle3",), chain=True),
    "eagle3_tree": System("eagle3", ("eagle3",)),
    "medusa": System("medusa", ("medusa",)),
    "dflash": System("dflash", ("dflash",)),
    "ddtree": System("ddtree", ("dflash",)),
    "domino": System("domino", ("domino",)),
    "domino_tree": System("domino_tree", ("domino",)),
    "dspark": System("dspark", ("dspark",)),
    "pctree": System("pctree", ("pctree", "dspark")),
    "jetspec": System("jetspec", ("jetspec",)),
    "dartree": System("dartree", ("dartree", "dspark")),
    "weaver": System("weaver", ("weaver",)),
    "treeflash": System("treeflash", ("treeflash",)),
}
JOINED = (
    "domino_tree",
    "ddtree",
    "pctree",
    "jetspec",
    "eagle3_tree",
    "treeflash",
    "weaver",
    "medusa",
    "mtp_trained",
    "mtp",
)
"""Which drafter is joined with retrieval if none is asked for: the first that is there."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A system that can be measured: its engine and its drafter's parameters.

    weights is the folder they came from, joined the system that retrieval was added to; None: there is none.
    """

    config: str
    engine: Engine
    params: Any
    weights: str | None = None
    joined: str | None = None


def collect(
    model: LoadedTarget,
    folder: Path,
    nodes: int,
    max_len: int,
    names: Iterable[str] | None = None,
    joined: str | None = None,
) -> tuple[dict[str, Row], dict[str, str]]:
    """The systems that the target has a drafter for, each with `nodes` drafted nodes, and why others are left out.

    Args:
        model: the target.
        folder: holds a folder of trained weights for each name in a `System`'s weights.
        nodes: most drafted nodes. A chain has as many, or as its drafter's block allows.
        max_len: the engines'.
        names: of SYSTEMS and COMBINED; None: all.
        joined: the system that rows of COMBINED add retrieval to; None: the first of JOINED that is there.
    """
    wanted = [*SYSTEMS, *COMBINED] if names is None else list(names)
    loaded: dict[str, load.LoadedDrafter] = {}
    rows: dict[str, Row] = {}
    left: dict[str, str] = {}
    for name in [n for n in wanted if n not in COMBINED]:
        made = _row(SYSTEMS[name], model, folder, loaded, nodes, max_len)
        if isinstance(made, str):
            left[name] = made
        else:
            rows[name] = made
    asked = [n for n in wanted if n in COMBINED]
    bases = JOINED if joined is None else (joined,)
    for name in bases if asked else ():
        base = rows.get(name) or _row(SYSTEMS[name], model, folder, loaded, nodes, max_len)
        if isinstance(base, Row):
            rows |= {n: _combined(COMBINED[n], name, base, nodes, max_len) for n in asked}
            break
    else:
        left |= {n: f"no drafter to join with retrieval, of {', '.join(bases)}" for n in asked}
    return rows, left


def equal(drafter: Any, nodes: int, chain: bool = False) -> Any:
    """The drafter with drafts of `nodes` nodes and the root: a tree of as many, a chain as deep as that or its block.

    Trees keep their settings as far as these fit. chain: a head's tree becomes a chain.
    """
    if isinstance(drafter, NGram):
        return dataclasses.replace(drafter, k=nodes)
    if isinstance(drafter, Suffix):
        return dataclasses.replace(drafter, nodes=nodes + 1)
    shape = eagle.chain(nodes) if chain else _sized(shape_of(drafter), nodes, deepest(drafter, nodes))
    return with_shape(drafter, shape)


def deepest(drafter: BlockDrafter | DepthTree | HeadTree, nodes: int) -> int:
    """The longest root path of that many nodes that a drafter can draft."""
    if isinstance(drafter, BlockDrafter):
        return min(nodes, drafter.config.depth)
    return min(nodes, getattr(drafter.head, "depth", nodes))


def shape_of(drafter: BlockDrafter | DepthTree | HeadTree) -> Shape:
    """The shape of a drafter's drafts."""
    return drafter.shape


def is_chain(shape: Shape) -> bool:
    """Whether no node of such a draft has a sibling."""
    if isinstance(shape, Choices):
        return shape.template.width == 1
    return max(shape.widths) == 1 if isinstance(shape, Branching) else shape.children == 1


def with_shape(drafter: BlockDrafter | DepthTree | HeadTree, shape: Shape) -> Any:
    """The drafter with drafts of another shape."""
    return dataclasses.replace(drafter, shape=shape)


def _row(
    system: System, model: LoadedTarget, folder: Path, loaded: dict[str, load.LoadedDrafter], nodes: int, max_len: int
) -> Row | str:
    """The row, or why there is none."""
    build = lambda **parts: configs.build(system.config, model.target, max_len, **parts)  # noqa: E731
    if system.config == "mtp" and not getattr(model.target.config, "mtp", False):
        return "the target has no such head"
    name = next((n for n in system.weights if (folder / n).is_dir()), None)
    if system.weights and name is None:
        return f"no trained weights in {' or '.join(str(folder / n) for n in system.weights)}"
    if name is None:
        own = configs.drafter_params(system.config, model.params)
        return Row(system.config, _cut(build(), nodes, system.chain), own)
    if name not in loaded:
        loaded[name] = load.load_drafter(folder / name, model)
    engine = build(**loaded[name].parts)
    return Row(system.config, _cut(engine, nodes, system.chain), loaded[name].params, name)


def _combined(config: str, name: str, base: Row, nodes: int, max_len: int) -> Row:
    """The drafter of a row with retrieval, of as many nodes together."""
    engine = configs.build(config, base.engine.target, max_len, drafter=base.engine.drafter)
    assert isinstance(engine.drafter, Combined)
    joined = dataclasses.replace(engine.drafter, retrieval=Suffix(nodes=nodes + 1), nodes=nodes + 1)
    return Row(config, _controlled(engine, joined, nodes), base.params, base.weights, name)


def _cut(engine: Engine, nodes: int, chain: bool) -> Engine:
    return _controlled(engine, equal(engine.drafter, nodes, chain), nodes)


def _controlled(engine: Engine, drafter: Any, nodes: int) -> Engine:
    """With a controller that weighs cost: the configuration's own if it does, else `Throughput`."""
    controller = engine.controller if isinstance(engine.controller, Throughput) else Throughput()
    widths = sorted({1, *(n for n in (4, 1 + nodes // 2) if n < drafter.nodes), drafter.nodes})
    return dataclasses.replace(engine, drafter=drafter, controller=controller, widths=tuple(widths))


def _sized(shape: Shape, nodes: int, most: int) -> Shape:
    if isinstance(shape, Choices):
        rates = RATES[: shape.candidates]
        return dataclasses.replace(shape, template=likeliest(rates, nodes + 1, most))
    assert not isinstance(shape, Branching), "no configuration here draws its drafts"
    if is_chain(shape):
        return dataclasses.replace(shape, nodes=most + 1, depth=most, ranking="coupled")
    sizes = {"nodes": nodes + 1, "depth": min(shape.depth, most), "children": min(shape.children, nodes)}
    if isinstance(shape, Growth):
        sizes["width"] = min(shape.width, nodes)
    return dataclasses.replace(shape, **sizes, ranking="coupled")
