"""What generate, bench and audit share on the command line: which model, which configuration, which sampling."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from jax.sharding import Mesh

from spec_jax import configs
from spec_jax.drafters.load import load_drafter
from spec_jax.drafters.rest import Rest, Store, build_store
from spec_jax.engine.decoder import Decoder
from spec_jax.engine.engine import Engine
from spec_jax.models.load import LoadedTarget, load_target
from spec_jax.models.shared_tokens import require_same_ids
from spec_jax.sampling.settings import Sampling

DRAFTERS = {
    "none": "plain",
    "ngram": "prompt_lookup",
    "suffix": "suffix_decoding",
    "recycling": "token_recycling",
    "model": "coupled_draft_model",
}


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --model, --config, --drafter, --draft-model, --weights, --corpus and --max-len."""
    parser.add_argument(
        "--model", default="smollm2", help="smollm2 (default), small_hybrid, a .gguf file or a Hugging Face directory"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--config", metavar="NAME", help=f"a published system: {', '.join(configs.names())}")
    which.add_argument("--drafter", choices=sorted(DRAFTERS), help="a drafter, with its usual settings")
    parser.add_argument("--draft-model", metavar="PATH", help="the small model of a configuration that drafts with one")
    parser.add_argument("--weights", metavar="DIR", help="a trained drafter, for a --config of its family")
    parser.add_argument(
        "--corpus", metavar="PATH", help="a text file, or a folder of them, for a --config that reads one: rest"
    )
    parser.add_argument("--max-len", type=int, default=1024, metavar="N", help="longest text, prompt and answer (1024)")


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sampling settings, under the names of `Sampling`."""
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) takes the likeliest token")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--presence-penalty", type=float, default=0.0)
    parser.add_argument("--frequency-penalty", type=float, default=0.0)
    parser.add_argument("--min-new-tokens", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0, help="the request's key: the same seed gives the same text")


def sampling_of(args: argparse.Namespace) -> Sampling:
    """The settings given on the command line."""
    names = {f.name for f in dataclasses.fields(Sampling)}
    return Sampling(**{k: v for k, v in vars(args).items() if k in names})


def config_of(args: argparse.Namespace, default: str) -> str:
    """The name of the configuration asked for."""
    if args.weights and not args.config:
        raise ValueError("--weights: got no --config beside it, takes one of the drafter's family, such as eagle3")
    return args.config or (DRAFTERS[args.drafter] if args.drafter else default)


def build(
    args: argparse.Namespace,
    model: LoadedTarget,
    name: str,
    load: Callable[[str], LoadedTarget] = load_target,
    **engine_options: Any,
) -> tuple[Engine, Any]:
    """The engine of a configuration and its drafter's parameters (None if it has none); `load` reads a draft model."""
    if args.max_len > model.max_position_embeddings:
        raise ValueError(f"--max-len: got {args.max_len}, takes at most the model's {model.max_position_embeddings}")
    draft = load(args.draft_model) if args.draft_model else None
    if draft is not None and draft.tokenizer is not None and model.tokenizer is not None:
        require_same_ids(model.tokenizer, draft.tokenizer, "--draft-model")
    if args.weights and name != "plain":
        trained = load_drafter(args.weights, model)
        parts: dict[str, Any] = {"drafter": trained.drafter} if "drafter" in configs.parts(name) else trained.parts
        engine, drafter_params = configs.build(name, trained.target, args.max_len, **parts), trained.params
    else:
        engine = configs.build(name, model.target, args.max_len, draft_model=draft.target if draft else None)
        drafter_params = draft.params if draft else configs.drafter_params(name, model.params)
    corpus = getattr(args, "corpus", None)
    if isinstance(engine.drafter, Rest):
        drafter_params = _store(corpus, model)
    elif corpus and name != "plain":
        raise ValueError(f"--corpus: {name} reads none, got one")
    return dataclasses.replace(engine, **engine_options), drafter_params


def _store(corpus: str | None, model: LoadedTarget) -> Store:
    """The store of the text files of a corpus."""
    if corpus is None:
        raise ValueError("--corpus: got none, takes a text file or a folder of them, for a --config that reads one")
    if model.tokenizer is None:
        raise ValueError("--model: got one without a tokenizer, takes one that has it, for the texts of --corpus")
    path, documents = Path(corpus), []
    for file in sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]:
        try:
            documents.append(model.tokenizer.encode(file.read_text(encoding="utf-8"), special=False))
        except UnicodeDecodeError:
            raise ValueError(f"--corpus: got {file}, takes text in UTF-8") from None
    return build_store(documents)


def decoder(
    model: LoadedTarget, engine: Engine, drafter_params: Any = None, batch: int = 1, mesh: Mesh | None = None
) -> Decoder:
    """A decoder of a loaded model."""
    return Decoder(engine, model.params, drafter_params, model.tokenizer, batch, model.eos_token_ids, mesh=mesh)


def run(main: Callable[[], None]) -> NoReturn:
    """Run a script; what the user got wrong is one line on stderr and exit status 2, not a traceback."""
    try:
        main()
    except (ValueError, TypeError, FileNotFoundError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)
