"""Run in a process of its own, with four devices: saved weights onto their mesh, and saved again from it."""

import json
import sys
from pathlib import Path

import jax

from spec_jax.models import orbax_weights, placement
from spec_jax.models.load import load_target
from tests.models.streamed import equal


def main(models: Path, saved: Path, again: Path) -> None:
    assert len(jax.devices()) == 4
    mesh, report = placement.make_mesh({"tensor": 2, "expert": 2}), {}
    for path in sorted(saved.iterdir()):
        name, stacked = path.name.rsplit("-", 1)
        got = load_target(path, mesh=mesh)
        want = load_target(models / name, stacked=stacked == "True", mesh=mesh)
        places = jax.tree.map(lambda x: x.sharding, want.params)
        report[path.name] = equal(got.params, want.params, places) and got.target == want.target
        orbax_weights.save_orbax(again / path.name, got.params, path)
    print(json.dumps(report))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
