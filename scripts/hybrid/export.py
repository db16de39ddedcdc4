"""A trained model as a Hugging Face directory, and back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors import safe_open
from safetensors.numpy import save_file

from .forward import Params
from .shape import Shape
from .vocabulary import EOS, eos_id

_WEIGHTS, _CONFIG, _TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"


def to_tensors(params: Params, shape: Shape, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """The parameters under Hugging Face's names, [out, in], experts one by one, the MTP head as mtp.*."""
    tensors = {
        "model.embed_tokens.weight": params["embed"],
        "model.norm.weight": params["norm"],
        "mtp.fc.weight": params["mtp"]["fc"].T,
        "mtp.pre_fc_norm_embedding.weight": params["mtp"]["norm_embedding"],
        "mtp.pre_fc_norm_hidden.weight": params["mtp"]["norm_hidden"],
        "mtp.norm.weight": params["mtp"]["norm"],
    }
    for prefix, kind, layer in _layers(params, shape):
        tensors |= {f"{prefix}.{name}": tensor for name, tensor in _to_layer(layer, kind).items()}
    return {name: np.ascontiguousarray(np.asarray(tensor), dtype) for name, tensor in tensors.items()}


def from_tensors(tensors: Mapping[str, np.ndarray], shape: Shape) -> Params:
    """The inverse of `to_tensors`, in float32."""
    found = {name: np.asarray(tensor, np.float32) for name, tensor in tensors.items()}
    kinds = [(f"model.layers.{i}", kind) for i, kind in enumerate(shape.layer_types)]
    return {
        "embed": found["model.embed_tokens.weight"],
        "layers": [_from_layer(found, prefix, kind, shape) for prefix, kind in kinds],
        "norm": found["model.norm.weight"],
        "mtp": {
            "fc": found["mtp.fc.weight"].T,
            "norm_embedding": found["mtp.pre_fc_norm_embedding.weight"],
            "norm_hidden": found["mtp.pre_fc_norm_hidden.weight"],
            "norm": found["mtp.norm.weight"],
            "layer": _from_layer(found, "mtp.layers.0", "full_attention", shape),
        },
    }


def save(directory: Path, params: Params, shape: Shape, tokenizer: tokenizers.Tokenizer, dtype: Any) -> None:
    """Write config.json, generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json.

    ValueError if a weight does not fit `dtype`.
    """
    tensors = to_tensors(params, shape, dtype)
    if wrong := [name for name, tensor in tensors.items() if not np.isfinite(tensor.astype(np.float32)).all()]:
        raise ValueError(f"params: {wrong[0]} has numbers that {np.dtype(dtype)} can't hold")
    directory.mkdir(parents=True, exist_ok=True)
    eos = eos_id(tokenizer)
    save_file(tensors, directory / _WEIGHTS, {"format": "pt"})
    (directory / _WEIGHTS).chmod(0o644)  # the library makes it private
    tokenizer.save(str(directory / _TOKENIZER))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_position_embeddings,
    }
    for name, fields in (
        (_CONFIG, shape.to_hf(eos)),
        ("generation_config.json", {"eos_token_id": eos, "pad_token_id": eos, "do_sample": False}),
        ("tokenizer_config.json", settings),
    ):
        (directory / name).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def load(directory: Path) -> tuple[Params, Shape]:
    """The parameters and the shape that `save` wrote; FileNotFoundError if there are none."""
    for name in (_CONFIG, _WEIGHTS):
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{directory / name}: no such file")
    shape = Shape.from_hf(json.loads((directory / _CONFIG).read_text(encoding="utf-8")))
    with safe_open(str(directory / _WEIGHTS), framework="numpy") as file:
        return from_tensors({name: file.get_tensor(name) for name in file.keys()}, shape), shape  # noqa: SIM118


def _layers(params: Params, shape: Shape) -> Iterator[tuple[str, str, Params]]:
    for i, (kind, layer) in enumerate(zip(shape.layer_types, params["layers"], strict=True)):
        yield f"model.layers.{i}", kind, layer
    yield "mtp.layers.0", "full_attention", params["mtp"]["layer"]


_ATTENTION = {name: f"self_attn.{name}_proj.weight" for name in "qkvo"}
_NORMS = {name: f"self_attn.{name}.weight" for name in ("q_norm", "k_norm")}
_DELTA = {"qkvz": "linear_attn.in_proj_qkvz.weight", "ba": "linear_attn.in_proj_ba.weight"}
_DELTA |= {"out": "linear_attn.out_proj.weight"}
_GATES = {"A_log": "linear_attn.A_log", "dt_bias": "linear_attn.dt_bias", "norm": "linear_attn.norm.weight"}


def _to_layer(layer: Params, kind: str) -> dict[str, Any]:
    mixer, sparse = layer["mixer"], layer["experts"]
    maps, plain = (_ATTENTION, _NORMS) if kind == "full_attention" else (_DELTA, _GATES)
    found = {name: mixer[key].T for key, name in maps.items()} | {name: mixer[key] for key, name in plain.items()}
    if kind == "linear_attention":
        found["linear_attn.conv1d.weight"] = mixer["conv"].T[:, None]
    found["input_layernorm.weight"], found["post_attention_layernorm.weight"] = layer["input_norm"], layer["post_norm"]
    found["mlp.gate.weight"] = sparse["router"].T
    found["mlp.shared_expert_gate.weight"] = sparse["shared_gate"].T
    stacks = [(f"mlp.experts.{i}", sparse["gate_up"][i], sparse["down"][i]) for i in range(len(sparse["down"]))]
    for prefix, up, down in [*stacks, ("mlp.shared_expert", sparse["shared_gate_up"], sparse["shared_down"])]:
        gate, up = np.split(np.asarray(up), 2, -1)
        found |= {f"{prefix}.{n}_proj.weight": w.T for n, w in (("gate", gate), ("up", up), ("down", down))}
    return found


def _from_layer(found: Mapping[str, np.ndarray], prefix: str, kind: str, shape: Shape) -> Params:
    def get(name: str) -> np.ndarray:
        return found[f"{prefix}.{name}"]

    def up(name: str) -> np.ndarray:
        return np.concatenate([get(f"{name}.{half}_proj.weight").T for half in ("gate", "up")], -1)

    maps, plain = (_ATTENTION, _NORMS) if kind == "full_attention" else (_DELTA, _GATES)
    mixer = {key: get(name).T for key, name in maps.items()} | {key: get(name) for key, name in plain.items()}
    if kind == "linear_attention":
        mixer["conv"] = get("linear_attn.conv1d.weight")[:, 0].T
    names = [f"mlp.experts.{i}" for i in range(shape.num_experts)]
    sparse = {
        "router": get("mlp.gate.weight").T,
        "gate_up": np.stack([up(name) for name in names]),
        "down": np.stack([get(f"{name}.down_proj.weight").T for name in names]),
        "shared_gate": get("mlp.shared_expert_gate.weight").T,
        "shared_gate_up": up("mlp.shared_expert"),
        "shared_down": get("mlp.shared_expert.down_proj.weight").T,
    }
    norms = {"input_norm": get("input_layernorm.weight"), "post_norm": get("post_attention_layernorm.weight")}
    return {**norms, "mixer": mixer, "experts": sparse}
