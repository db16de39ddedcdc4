"""The model of a job on a host's devices, and a digest that tells whether two hosts have the same one."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
from pathlib import Path

import choose
import jax.numpy as jnp
from jax.sharding import Mesh

from spec_jax.engine.decoder import Decoder
from spec_jax.models.load import LoadedTarget, load_target, model_path

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
_HEAD = 1 << 20


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model ready to serve. digest: of what its text depends on; drafter: of what only its speed depends on."""

    target: LoadedTarget
    decoder: Decoder
    config: str
    digest: str
    drafter: str


def load(args: argparse.Namespace, mesh: Mesh | None) -> Loaded:
    """Load what the command line names, split over the mesh's devices."""
    read = functools.partial(load_target, dtype=DTYPES[args.dtype])
    target = read(args.model, mesh=mesh)
    name = choose.config_of(args, "suffix_decoding")
    engine, drafter_params = choose.build(args, target, name, load=read)
    decoder = choose.decoder(target, engine, drafter_params, args.batch, mesh)
    tokenizer = target.tokenizer.fingerprint() if target.tokenizer else ""
    about = f"{target.target.config!r} {tokenizer} {target.eos_token_ids} {args.dtype} {files(model_path(args.model))}"
    drafter = " ".join(files(Path(p)) for p in (args.weights, args.draft_model) if p)
    return Loaded(target, decoder, name, hashlib.sha256(about.encode()).hexdigest(), drafter)


def files(path: Path) -> str:
    """A digest of a file or folder: every file's name, size and first mebibyte."""
    found = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    total = hashlib.sha256()
    for file in found:
        with file.open("rb") as opened:
            name = file.relative_to(path).as_posix() if path.is_dir() else file.name
            total.update(f"{name} {file.stat().st_size} ".encode() + hashlib.sha256(opened.read(_HEAD)).digest())
    return total.hexdigest()
