"""Check a set-up before trusting it: state, replay and law, on your model and drafter.

state: accepted counts are forced in many orders; the state must then answer as a fresh run on the committed text does.
replay: generated text, greedy and sampled, is scored once more without the engine; no token may differ from the choice.
law: short strings over a few tokens are drawn with independent keys and compared with the exact law.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "jax"))

import choose  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from spec_jax import noise  # noqa: E402
from spec_jax.audit.law import check_law  # noqa: E402
from spec_jax.audit.replay import Replay, chain_logits, replay  # noqa: E402
from spec_jax.audit.state import check_state  # noqa: E402
from spec_jax.engine.engine import Engine  # noqa: E402
from spec_jax.models.load import LoadedTarget, load_target  # noqa: E402
from spec_jax.sampling.settings import Sampling  # noqa: E402
from spec_jax.verify.match import match  # noqa: E402

_PROMPT = "Count from one to twenty in words, then count from one to twenty in words again."
_SETTINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.8, top_p=0.95),
    "penalised": Sampling(temperature=1.0, top_k=50, presence_penalty=0.5, repetition_penalty=1.1),
}


def main() -> None:
    """Run the checks asked for, print a line each, and fail if one fails."""
    args = _parse()
    model = load_target(args.model)
    name = choose.config_of(args, "suffix_decoding")
    engine, drafter_params = choose.build(args, model, name)
    prompt = _prompt(args, model)
    report = {}
    for check in args.checks:
        report[check] = _CHECKS[check](args, model, engine, drafter_params, prompt)
        verdict = "passed" if report[check]["passed"] else "FAILED"
        print(f"{check}: {verdict} {json.dumps({k: v for k, v in report[check].items() if k != 'passed'})}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(report) + "\n")
    if not all(r["passed"] for r in report.values()):
        sys.exit(1)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choose.add_model_arguments(parser)
    parser.set_defaults(max_len=512)
    parser.add_argument("--prompt", default=_PROMPT)
    parser.add_argument("--checks", nargs="+", choices=sorted(_CHECKS), default=list(_CHECKS), metavar="CHECK")
    parser.add_argument("--tokens", type=int, default=96, help="tokens per text of the replay check")
    parser.add_argument("--draws", type=int, default=512, help="strings drawn for the law check")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="largest logit difference of the state check")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="also write the report to FILE")
    return parser.parse_args()


def _prompt(args: argparse.Namespace, model: LoadedTarget) -> list[int]:
    if model.tokenizer is None:
        raise ValueError(f"--model: {args.model} has no tokenizer, which the prompt needs")
    if model.tokenizer.chat_template is None:
        return model.tokenizer.encode(args.prompt)
    return model.tokenizer.encode(model.tokenizer.apply_chat([{"role": "user", "content": args.prompt}]), special=False)


def _state(args: Any, model: LoadedTarget, engine: Engine, drafter_params: Any, prompt: list[int]) -> dict[str, Any]:
    report = check_state(model.target, model.params, prompt, k=3, rounds=4, patterns=8, seed=args.seed)
    passed = report.text_equal and report.error <= args.tolerance
    return {"passed": passed, "text_equal": report.text_equal, "largest_logit_difference": report.error}


def _replay(args: Any, model: LoadedTarget, engine: Engine, drafter_params: Any, prompt: list[int]) -> dict[str, Any]:
    if engine.rule is not match:
        return {"passed": True, "skipped": "text of another rule than match is not plain decoding's; see the law check"}
    decoder = choose.decoder(model, engine, drafter_params, batch=2)
    total, out = Replay(0, 0, 0), {}
    for name, sampling in _SETTINGS.items():
        for i, result in enumerate(decoder.generate([prompt], args.tokens, n=2, key=args.seed, sampling=sampling)):
            key = noise.sample_key(noise.request_key(args.seed), i)
            eos = model.eos_token_ids
            total += replay(model.target, model.params, prompt, result.tokens, key, sampling, eos, max_len=args.max_len)
            out[name] = result.acceptance_length
    counts = {"equal": total.equal, "near_tie": total.near_tie, "different": total.different}
    return {"passed": total.different == 0, **counts, "acceptance_length": out}


def _law(args: Any, model: LoadedTarget, engine: Engine, drafter_params: Any, prompt: list[int]) -> dict[str, Any]:
    logits = chain_logits(model.target, model.params, jnp.asarray(prompt, jnp.int32), 16)[-1]
    likely = [int(t) for t in np.argsort(-np.asarray(logits))[:4]]
    decoder = choose.decoder(model, engine, drafter_params)
    sampling = Sampling(temperature=1.0)
    report = check_law(engine, decoder.params, prompt, likely, 3, args.draws, 16, sampling, args.seed)
    return {
        "passed": report.passed,
        "draws": report.draws,
        "p_value": report.p_value,
        "total_variation": report.total_variation,
        "off_support": report.off_support,
        "accepted_of_drafted": report.acceptance,
    }


_CHECKS = {"state": _state, "replay": _replay, "law": _law}


if __name__ == "__main__":
    choose.run(main)
