"""The card of the trained weights."""

from __future__ import annotations

import dataclasses
import platform
import textwrap

from spec_jax.models.qwen_config import DELTA, QwenConfig

from .corpus import Source, fingerprint


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the card says; tokens are those of the files, seen those of the run, figures those of objective.measure.

    long_loss among them is the loss in windows four times as long as the training's.
    """

    config: QwenConfig
    train: list[Source]
    held_out: list[Source]
    tokens: int
    held_out_tokens: int
    context: int
    seen: int
    steps: int
    figures: dict[str, float]
    tests: bool
    parameters: int
    mtp_parameters: int
    command: str

    @property
    def active(self) -> int:
        """Parameters of the model that a token goes through, the MTP head left out."""
        c = self.config
        expert = 3 * c.hidden_size * (c.moe_intermediate_size or 0)
        idle = (c.num_experts or 0) - (c.num_experts_per_tok or 0)
        return self.parameters - self.mtp_parameters - idle * expert * sum(c.sparse)


def render(facts: Facts) -> str:
    """The card as Markdown."""
    c, f = facts.config, facts.figures
    delta = c.layer_types.count(DELTA)
    size = sum(len(source.text.encode()) for source in facts.train) / 1e6
    suite = "with its test suite" if facts.tests else "without its test suite"
    names = textwrap.fill(", ".join(source.name for source in facts.held_out), 110, break_on_hyphens=False)
    agrees = [f"{f[f'mtp_{k}_nats']:.3f}, {100 * f[f'mtp_{k}_agrees']:.1f} %" for k in (1, 2)]
    return f"""\
# small hybrid

A Qwen3-Next of {facts.parameters / 1e6:.1f} million parameters, {facts.active / 1e6:.1f} million of them active,
made for the tests and benchmarks of spec_jax: real text through gated delta layers, attention, sparse experts and an
MTP head. It writes what looks like Python; it is no assistant and knows nothing.

| | |
|---|---|
| layers | {delta} gated delta, {c.num_layers - delta} attention; hidden size {c.hidden_size} |
| gated delta | {c.linear_num_key_heads} key heads of {c.linear_key_head_dim}, \
{c.linear_num_value_heads} value heads of {c.linear_value_head_dim} |
| attention | {c.num_heads} heads of {c.head_dim}, {c.num_kv_heads} key/value heads |
| experts, in every layer | {c.num_experts} of {c.moe_intermediate_size}, {c.num_experts_per_tok} a token, \
and a shared one of {c.shared_expert_intermediate_size} |
| MTP head | one attention layer with experts; takes the hidden state behind the final norm; trained for two steps |
| vocabulary | {c.vocab_size}, byte-level BPE made from the training files; head tied to the embedding |
| on disk | float16; meant for float32 |

## Data

The .py files of the standard library of CPython {platform.python_version()}, {suite}, without `encodings`,
`pydoc_data`, `_sysconfigdata*` and installed packages: {len(facts.train)} files, {size:.1f} MB,
{facts.tokens / 1e6:.2f} million tokens, fingerprint `{fingerprint(facts.train)}`. Their licence is the PSF License
Agreement; copyright Python Software Foundation.

Held out, one file in twenty by a hash of its name ({len(facts.held_out)} files, {facts.held_out_tokens} tokens):

{textwrap.indent(names, "    ")}

## Training

{facts.steps} steps, {facts.seen / 1e6:.2f} million tokens seen, {facts.seen / facts.tokens:.1f} epochs,
in windows of {facts.context} tokens. AdamW; the rate warms up, stays, and falls to zero. Loss: next token + 0.3 x the
MTP head's two steps + 0.01 x the experts' balance. `loss.png` is the curve.

| these weights on the held-out files | |
|---|---|
| nats per token | {f["held_out_loss"]:.3f} |
| bits per byte | {f["held_out_bits"]:.3f} |
| nats per token in windows four times as long | {f["long_loss"]:.3f} |
| MTP step 1: nats, agreement with the model's likeliest token | {agrees[0]} |
| MTP step 2: nats, agreement with the model's likeliest token | {agrees[1]} |

Agreement is counted on the true text up to the guessed token. Texts are read in windows of the training context, so the
first tokens of each window have little to go by.

## Retrain, train on, load

    {facts.command}
    python scripts/train_hybrid.py --resume --steps 100000   # longer, from that run's last checkpoint
    python scripts/train_hybrid.py --weights spec_jax/models/small_hybrid --steps 20000   # from these weights

```python
from spec_jax.models.load import load_target

model = load_target("spec_jax/models/small_hybrid")
```

transformers' `Qwen3NextForCausalLM.from_pretrained` takes the same directory, and leaves the MTP head aside.
"""
