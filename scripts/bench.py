"""Measurements, a subcommand each; every one ends in a line of JSON whose schema stands beside it in benches/."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "jax"))

import choose  # noqa: E402

from benches import coupling, decode, depth, drafters, kernels, peers, rules, state, text, trees  # noqa: E402

_COMMANDS = {
    "decode": decode,
    "trees": trees,
    "text": text,
    "peers": peers,
    "coupling": coupling,
    "drafters": drafters,
    "rules": rules,
    "kernels": kernels,
    "state": state,
    "depth": depth,
}


def main() -> None:
    """Parse, and run the subcommand."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in _COMMANDS.items():
        command = commands.add_parser(name, help=(module.__doc__ or "").split("\n")[0], description=module.__doc__)
        module.add_arguments(command)
    args = parser.parse_args()
    _COMMANDS[args.command].run(args)


if __name__ == "__main__":
    choose.run(main)
