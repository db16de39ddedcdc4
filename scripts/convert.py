"""Write a drafter in another format: that of its authors, of speculators (for vLLM), or this library's own.

    convert.py DRAFTER_DIR --target TARGET --to speculators --out DIR
    convert.py trained/dflash --target Qwen3-4B --verifier Qwen/Qwen3-4B --to speculators --dtype bfloat16 --out DIR

The drafter is read as any command here reads it, so it has to fit the target. What a format can't hold is an error, and
nothing is written. The last line says what was written, as JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import choose
import jax.numpy as jnp

from spec_jax.drafters import early_exit, medusa_files, mlp_speculator_files, mtp_files, parallel_files, recurrent_files
from spec_jax.drafters.block import native
from spec_jax.drafters.block import weights as block
from spec_jax.drafters.block.drafter import BlockDrafter
from spec_jax.drafters.depth_tree import DepthTree
from spec_jax.drafters.eagle import weights as eagle
from spec_jax.drafters.eagle.head import EagleHead
from spec_jax.drafters.early_exit import EarlyExitConfig
from spec_jax.drafters.head_tree import HeadTree
from spec_jax.drafters.load import LoadedDrafter, load_drafter
from spec_jax.drafters.mlp_speculator import MlpHead
from spec_jax.drafters.model_tree import ModelTree
from spec_jax.drafters.mtp import MtpHead
from spec_jax.drafters.parallel_model import ParallelModel
from spec_jax.drafters.recurrent import RecurrentHead
from spec_jax.models.checkpoint import read_json
from spec_jax.models.llama import Llama
from spec_jax.models.load import LoadedTarget, load_target

FORMATS = ("speculators", "published", "native")
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def main() -> None:
    """Read, write, say what was written."""
    args = _parse()
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise ValueError(f"--out: got {args.out}, which is there already, takes a folder that is new or empty")
    model = load_target(args.target)
    loaded = load_drafter(args.drafter, model, dtype=DTYPES[args.dtype])
    write(args.out, loaded, model, args.to, _verifier(args, model))
    size = (args.out / "model.safetensors").stat().st_size
    print(json.dumps({"format": args.to, "drafter": _named(loaded.drafter), "bytes": size}))


def write(out: Path, loaded: LoadedDrafter, model: LoadedTarget, to: str, verifier: dict[str, Any]) -> None:
    """Write a loaded drafter as `to`, one of FORMATS.

    Raises ValueError for a drafter, or a setting of it, that the format can't hold.
    """
    drafter, params, name = loaded.drafter, loaded.params, verifier["name_or_path"]
    if isinstance(drafter, BlockDrafter):
        given = (out, drafter.config, drafter.head, params)
        if to == "speculators":
            block.save_speculators(*given, verifier)
        elif to == "published":
            block.save_published(*given, model.target.config.num_layers)
        else:
            native.save_native(*given, target=name)
        return
    if isinstance(drafter, ParallelModel):
        _only(to, "native", "a PARD model")
        parallel_files.save(out, loaded.parts["network"], params, name)
        return
    if isinstance(network := loaded.parts.get("network"), EarlyExitConfig):
        _only(to, "native", "an early exit's adapter")
        early_exit.save(out, network, early_exit.of(params), name)
        return
    head = _head_of(drafter)
    if isinstance(head, MtpHead):
        if to == "native":
            mtp_files.save(out, head.target.config, params, name, steps=drafter.depth)
        else:
            _only(to, "speculators", "an MTP head, which is published inside its target", "'native' or 'speculators'")
            mtp_files.save_speculators(out, head.target.config, params, verifier, drafter.depth)
    elif isinstance(head, RecurrentHead):
        _only(to, "native", "a recurrent head")
        recurrent_files.save(out, head.config, params, name, steps=drafter.depth)
    elif isinstance(head, EagleHead):
        form = "published" if head.config.inputs == "fused" else "speculators"
        _only(to, form, "an EAGLE-1 head" if form == "published" else "an EAGLE-3 or P-EAGLE head")
        eagle.save(out, head.config, params, verifier, steps=drafter.depth)
    elif isinstance(head, MlpHead):
        _only(to, "published", "an MLP speculator")
        mlp_speculator_files.save(out, head.config, params, name)
    else:
        _only(to, "published", "Medusa's or Hydra's heads")
        medusa_files.save(out, head.config, params, name)


def _only(to: str, form: str, what: str, takes: str | None = None) -> None:
    if to != form:
        raise ValueError(f"--to: got {to!r} for {what}, takes {takes or repr(form)}")


def _named(drafter: Any) -> str:
    return type(drafter if isinstance(drafter, ParallelModel | ModelTree) else _head_of(drafter)).__name__


def _head_of(drafter: Any) -> Any:
    if isinstance(drafter, HeadTree | DepthTree | BlockDrafter):
        return drafter.head
    raise ValueError(f"drafter: got a {type(drafter).__name__}, takes a block drafter, a PARD model or one with a head")


def _verifier(args: argparse.Namespace, model: LoadedTarget) -> dict[str, Any]:
    """What the file says of its target: its name for others, and the classes that transformers has for it."""
    path = Path(args.target) / "config.json"
    named = read_json(path).get("architectures") if path.is_file() else None
    plain = ["LlamaForCausalLM" if isinstance(model.target, Llama) else "Qwen3NextForCausalLM"]
    return {"name_or_path": args.verifier or args.target, "architectures": named or plain}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", type=Path, metavar="DRAFTER_DIR", help="config.json and safetensors, of any format")
    parser.add_argument("--target", required=True, help="smollm2, small_hybrid, a .gguf file or a model directory")
    parser.add_argument("--to", required=True, choices=FORMATS)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a folder that is new or empty")
    parser.add_argument("--verifier", metavar="NAME", help="what the file calls the target (as --target names it)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the numbers in the file (float32)")
    return parser.parse_args()


if __name__ == "__main__":
    choose.run(main)
