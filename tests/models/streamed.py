"""Run in a process of its own, with eight devices: models streamed onto meshes, and what was read for it, as JSON."""

import json
import math
import sys
from pathlib import Path

import jax
import numpy as np

from spec_jax.models import lazy, orbax_weights, partition, placement, shards
from spec_jax.models.load import load_target

MESH = {"data": 2, "tensor": 2, "expert": 2}


def main(models: Path, saved: Path) -> None:
    mesh = placement.make_mesh(MESH)
    report = {}
    for path in sorted(models.iterdir()):
        for stacked in {"llama": (False, True), "apart": (False,)}.get(path.name, (True,)):
            reads, shard = Watched(shards, "read_box"), Watched(lazy.Lazy, "read")
            usual, lazy.BLOCK_BYTES = lazy.BLOCK_BYTES, 1 << 10
            streamed = load_target(path, stacked=stacked, mesh=mesh)
            lazy.BLOCK_BYTES = usual
            reads.stop(), shard.stop()
            apart = load_target(path, stacked=stacked, transposed=False)
            want = jax.tree.leaves(apart.params)
            places = placement.shardings(mesh, partition.param_specs(apart.target, apart.params, mesh))
            sizes = [part_sizes(x, place) for x, place in zip(want, jax.tree.leaves(places), strict=True)]
            report[f"{path.name}, stacked {stacked}"] = {
                "equal": equal(streamed.params, apart.params, places),
                "on_mesh": streamed.target.mesh == mesh,
                "read": sum(reads.sizes),
                "needed": sum(map(sum, sizes)),
                "largest_read": max(reads.sizes),
                "largest_held": max(shard.sizes),
                "largest_shard": max(map(max, sizes)),
                "largest_array": max(x.nbytes for x in want),
            }
            if (path.name, stacked) in (("llama", False), ("packed", True)):
                orbax_weights.save_orbax(saved / f"{path.name}-{stacked}", streamed.params, path)
    print(json.dumps(report))


class Watched:
    """The sizes of the arrays that a function returns."""

    def __init__(self, where, name) -> None:
        self.where, self.name, self.real, self.sizes = where, name, getattr(where, name), []

        def call(*args):
            x = self.real(*args)
            self.sizes.append(4 * x.size if where is shards else x.nbytes)
            return x

        setattr(where, name, call)

    def stop(self):
        setattr(self.where, self.name, self.real)


def equal(got, want, places) -> bool:
    """Values and types, and that `got` lies in its places."""
    same = lambda x, y, at: x.dtype == y.dtype and x.sharding == at and np.array_equal(x, y)  # noqa: E731
    return jax.tree.structure(got) == jax.tree.structure(want) and jax.tree.all(jax.tree.map(same, got, want, places))


def part_sizes(x, place) -> list[int]:
    """Bytes of the different parts of an array that the devices hold, in float32."""
    boxes = {str(box): box for box in place.addressable_devices_indices_map(x.shape).values()}
    return [4 * math.prod(len(range(n)[s]) for s, n in zip(box, x.shape, strict=True)) for box in boxes.values()]


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
