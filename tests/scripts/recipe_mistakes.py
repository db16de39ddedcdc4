"""Recipes that train_drafter.py is to refuse, and a process that gives it each of them."""

import contextlib
import functools
import io
import json
import runpy
import sys
from pathlib import Path

RECIPE = """
[drafter]
block_size = 4
intermediate_size = 32
draft_vocab_size = 64
head = "markov"
head_settings = { rank = 4 }
slots = "shifted"

[data]
passages = 12
files = 3
longest_prompt = 16
max_new_tokens = 12
batch = 4

[objective]
divergences = { ce = 0.1, l1 = 0.9 }
weights = { decay = { gamma = 4.0 } }
confidence = 1.0

[training]
steps = 6
batch = 4
length = 24
anchors = 4
warmup = 1
decay = 2
measure_every = 3

[held_out]
classes = ["passages"]
count = 2
max_new_tokens = 8
"""


def changed(text, changes):
    """A recipe with other lines: table -> {entry: its value as TOML, None to leave it out}; None: no table but 3."""
    tables = {}
    for line in filter(None, text.splitlines()):
        if line.startswith("["):
            entries = tables.setdefault(line[1:-1], {})
        else:
            name, value = line.split(" = ", 1)
            entries[name] = value
    for table, entries in changes.items():
        if entries is None:
            del tables[table]
            continue
        old = {} if "kind" in entries else tables[table]
        tables[table] = {name: value for name, value in (old | entries).items() if value is not None}
    lines = [f"{table} = 3" for table, entries in changes.items() if entries is None]
    for table, entries in tables.items():
        lines += [f"[{table}]", *(f"{name} = {value}" for name, value in entries.items())]
    return "\n".join(lines)


PLAIN = {"head": None, "head_settings": None, "draft_vocab_size": None}
BARE = {"confidence": None}
EAGLE = {"kind": '"eagle"', "slots": "2", "intermediate_size": "32", "taps": "[1, 2]"}
FACTOR, WEIGHT = "takes a number in [0.0, inf]", "takes a number in (0.0, inf]"
MISTAKES = [
    ({"data": {"made_up": "-1"}}, "made_up: got -1, takes an integer of at least 0"),
    ({"data": {"asked": "2"}}, "asked: got 2 with a target without a chat template, takes 0"),
    ({"data": {"passages": "0"}}, "made_up, asked, passages: got 0 of each, takes at least one prompt"),
    ({"data": {"passages": "3"}}, "batch: got 4, takes at most the number of prompts in data, 3"),
    ({"data": {"longest_prompt": "0"}}, "longest_prompt: got 0, takes an integer of at least 1"),
    ({"data": {"max_new_tokens": '"x"'}}, "max_new_tokens: got 'x', takes an integer of at least 1"),
    ({"data": {"batch": "0"}}, "batch: got 0, takes an integer of at least 1"),
    ({"data": {"temperature": "-1"}}, "temperature: got -1, takes a number in [0.0, inf]"),
    ({"data": {"temperature": "false"}}, "temperature: got False, takes a number in [0.0, inf]"),
    ({"data": {"top_p": "1.5"}}, "top_p: got 1.5, takes a number in (0.0, 1.0]"),
    ({"data": {"top_k": "-3"}}, "top_k: got -3, takes an integer in [0, inf]"),
    ({"data": {"greedy_share": "7"}}, "greedy_share: got 7, takes a number in [0.0, 1.0]"),
    ({"data": {"files": "0"}}, "files: got 0, takes an integer of at least 1"),
    ({"training": {"steps": "0"}}, "steps: got 0, takes an integer of at least 1"),
    ({"training": {"steps": '"a"'}}, "steps: got 'a', takes an integer of at least 1"),
    ({"training": {"batch": "0"}}, "batch: got 0, takes an integer of at least 1"),
    ({"training": {"length": "1"}}, "length: got 1, takes an integer of at least 2"),
    ({"training": {"anchors": "0"}}, "anchors: got 0, takes an integer of at least 1"),
    ({"training": {"rate": "-1"}}, f"rate: got -1, {WEIGHT}"),
    ({"training": {"rate": "0.0"}}, f"rate: got 0.0, {WEIGHT}"),
    ({"training": {"warmup": "-1"}}, "warmup: got -1, takes an integer of at least 0"),
    ({"training": {"decay": "7"}}, "decay: got 7, takes 0 to total, 6"),
    ({"training": {"weight_decay": "-1"}}, f"weight_decay: got -1, {FACTOR}"),
    ({"training": {"clip": "0"}}, f"clip: got 0, {WEIGHT}"),
    ({"training": {"measure_every": "1.5"}}, "measure_every: got 1.5, takes an integer of at least 0"),
    ({"training": {"labels": '"agin"'}}, "labels: got 'agin', takes 'text', 'rollout', 'inside', 'draft', 'again'"),
    ({"training": {"labels": "3"}}, "labels: got 3, takes 'text', 'rollout'"),
    ({"training": {"labels": '"again"'}}, "labels: got 'again' for a drafter with rejected=None; 'again' is for such"),
    ({"training": {"begin": "3"}}, "begin: got 3, takes a drafter's folder"),
    ({"training": {"begin": '"nowhere"'}}, "nowhere, takes the folder of a trained drafter"),
    ({"training": {"reference": '"nowhere"'}}, "reference: got 'nowhere', takes None with an objective without tree"),
    ({"held_out": {"count": "0"}}, "count: got 0, takes an integer of at least 1"),
    ({"held_out": {"temperature": "-1"}}, "temperature: got -1, takes a number in [0.0, 1e+30]"),
    ({"held_out": {"classes": '"mtbench"'}}, "classes: got 'mtbench', takes a list of names"),
    ({"drafter": {"layers": '"x"'}}, "layers is 'x'; taken: a positive integer"),
    ({"drafter": {"slots": '"x"'}}, "slots is 'x'; taken: fill_in or shifted"),
    ({"drafter": {"intermediate_size": "0"}}, "intermediate_size is 0; taken: a positive integer"),
    ({"drafter": {"taps": "[1, 99]"}}, "taps: got (1, 99), takes counts of the target's layers, 0 .. 2"),
    ({"drafter": {"taps": "3"}}, "taps is 3; taken: a list of integers"),
    ({"drafter": {"mask_token": "257"}}, "mask_token is 257; taken: a token id under vocab_size, 257"),
    ({"drafter": {"draft_vocab_size": "999"}}, "draft_vocab_size is 999; taken: at most vocab_size, 257"),
    ({"drafter": {"head": '"foo"'}}, "head: got 'foo', takes one of plain, markov"),
    ({"drafter": {"head_settings": "{low = 4}"}}, "head_settings: got ['low'], takes some of confidence, kind, rank"),
    ({"drafter": {"head_settings": "4"}}, "head_settings: got 4, takes a table"),
    ({"drafter": {"head_settings": "{rank = 0}"}}, "rank is 0; taken: an integer of at least 1"),
    (
        {"drafter": PLAIN | {"head": '"domino"', "head_settings": '{scale="x"}'}},
        "scale is 'x'; taken: a posit",
    ),
    ({"drafter": {"layer_types": '["full_attention", "x"]'}}, "layer_types: got ('full_attention', 'x'), takes a kind"),
    ({"drafter": {"layer_types": '["x"]'}}, "layer_types is 'x'; taken: full_attention, sliding_attention"),
    ({"drafter": {"layer_types": '["sliding_attention"]'}}, "sliding_window is None; taken: a number for sliding"),
    (
        {"drafter": {"layer_types": '["full_attention"]', "sliding_window": "8"}},
        "sliding_window: got 8 with no sliding layer in layer_types, takes None",
    ),
    (
        {"drafter": {"is_causal": "[true, false]"}},
        "is_causal: got (True, False), takes true, false, or a list",
    ),
    ({"drafter": {"is_causal": '"x"'}}, "is_causal: got 'x', takes true, false, or a list of these for 1 layers"),
    ({"drafter": {"per_layer_features": "1"}}, "per_layer_features is 1; taken: true or false"),
    ({"drafter": PLAIN | {"head": '"bigram"', "draft_vocab_size": "64"}}, "draft_vocab_size: got 64, takes None with"),
    ({"drafter": {"kind": "3"}}, "kind: got 3, takes one of block, eagle"),
    ({"drafter": {"kind": '"mtp"'}}, "drafter: got kind 'mtp' for a target without an MTP head, takes one that has it"),
    ({"drafter": {"kind": '"medusa"', "heads": "0"}}, "heads is 0; taken: a positive integer"),
    ({"drafter": {"kind": '"early_exit"', "layers": "2"}}, "layers is 2; taken: 1 .. 1"),
    ({"drafter": {"kind": '"parallel"'}}, "model, layers: got None and None, takes one of them"),
    ({"drafter": {"kind": '"parallel"', "layers": "1", "rate": "1.5"}}, "rate, floor: got 1.5 and 0.2, takes"),
    ({"drafter": EAGLE | {"slots": "0"}}, "slots is 0; taken: a positive integer"),
    ({"drafter": EAGLE | {"taps": "[]"}}, "taps is (); taken: at least one layer count"),
    ({"drafter": EAGLE | {"feature_norm": '"x"'}}, "feature_norm is 'x'; taken: none, each or all"),
    ({"drafter": EAGLE | {"norm_before_residual": "1"}}, "norm_before_residual is 1; taken: true or false"),
    ({"drafter": EAGLE | {"inputs": '"x"'}}, "inputs is 'x'; taken: joined or fused"),
    ({"drafter": PLAIN}, "confidence: got a drafter without a confidence head, takes one that has it"),
    ({"drafter": PLAIN, "objective": BARE | {"base_until": "1.0"}}, "base_until: got a drafter without a head, takes"),
    ({"objective": {"regression": "1.0"}}, "regression: got a drafter whose hidden states stand for nothing, takes"),
    ({"objective": {"confidence": '"x"'}}, f"confidence: got 'x', {FACTOR}"),
    ({"objective": {"base_until": "2"}}, "base_until: got 2, takes a number in (0.0, 1.0]"),
    ({"objective": {"tree_nodes": '"x"'}}, "tree_nodes: got 'x', takes an integer in [2, inf]"),
    ({"objective": {"per": '["slot"]'}}, "per: got ['slot'], takes 'weight', 'slot' or 'block'"),
    ({"objective": {"divergences": '{ce = "x"}'}}, f"divergences.ce: got 'x', {FACTOR}"),
    ({"objective": {"divergences": '["ce"]'}}, "divergences: got ['ce'], takes a table"),
    ({"objective": {"divergences": "{ce = 0.0}"}}, "divergences: got {'ce': 0.0}, takes a factor over 0"),
    ({"objective": {"weights": '{decay = {gamma = "x"}}'}}, f"weights.decay.gamma: got 'x', {WEIGHT}"),
    ({"objective": {"weights": "{decay = {gamma = 0.0}}"}}, f"weights.decay.gamma: got 0.0, {WEIGHT}"),
    ({"objective": {"weights": "{decay = {gamma = -1.0}}"}}, f"weights.decay.gamma: got -1.0, {WEIGHT}"),
    ({"objective": {"weights": "{powers = {base = 0.6, share = 1}}"}}, "weights.powers.share: got 1, takes true or"),
    ({"objective": {"weights": "{d_pace = {alpha = 2}}"}}, "weights.d_pace.alpha: got 2, takes a number in [0.0, 1.0]"),
    ({"objective": {"weights": "{within_top = {k = 0}}"}}, "weights.within_top.k: got 0, takes an integer in [1, inf]"),
    ({"objective": {"weights": "{decay = 4.0}"}}, "weights.decay: got 4.0, takes a table"),
    ({"objective": {"weights": '["decay"]'}}, "weights: got ['decay'], takes a table"),
    *(
        ({table: None}, f"{table}: got 3, takes a table")
        for table in ("drafter", "data", "objective", "training", "held_out")
    ),
]


def main(folder, target):
    """Print what the script says of every mistake, as JSON lines."""
    script = Path(__file__).parents[2] / "scripts" / "train_drafter.py"
    sys.path.insert(0, str(script.parent))
    from spec_jax.models import load

    load.load_target = functools.cache(load.load_target)
    for i, (changes, _) in enumerate(MISTAKES):
        at, said = Path(folder) / str(i), io.StringIO()
        at.mkdir()
        (at / "toy.toml").write_text(changed(RECIPE, changes))
        given = {"--config": at / "toy.toml", "--run": at / "run", "--texts": at / "texts", "--target": target}
        sys.argv = [str(script), *(str(x) for pair in given.items() for x in pair), "--texts-only"]
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                runpy.run_path(str(script), run_name="__main__")
                status = None
            except SystemExit as ended:
                status = ended.code
        print(json.dumps({"said": said.getvalue(), "status": status, "made": sorted(p.name for p in at.iterdir())}))


if __name__ == "__main__":
    main(*sys.argv[1:])
