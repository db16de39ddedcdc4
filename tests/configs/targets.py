"""A target that each config can be built for."""

import importlib
import inspect

from spec_jax import configs
from spec_jax.drafters.block.config import BlockConfig
from spec_jax.models.toy import AuditTarget, audit_table
from tests.drafters.hybrid import agreeing

V = 8


def module(name):
    return importlib.import_module(f"spec_jax.configs.{name}")


DRAFT_MODEL = {name for name in configs.names() if "draft_model" in inspect.signature(module(name).engine).parameters}
NETWORK = {name for name in configs.names() if "network" in inspect.signature(module(name).engine).parameters}
BLOCK = {
    name for name in NETWORK if inspect.signature(module(name).engine).parameters["network"].annotation is BlockConfig
}
OWN_HEAD = {name for name in configs.names() if hasattr(module(name), "drafter_params")}


def model_of(name):
    """(target, parameters): with an MTP head for the configs that draft with it, the audit model otherwise."""
    return agreeing(sparse=False, vocab_size=V) if name in OWN_HEAD else (AuditTarget(V), audit_table(V))


def build(name, max_len=80):
    """The config's engine for that target, with the target itself as draft model where there is one."""
    target = model_of(name)[0]
    return configs.build(name, target, max_len, draft_model=target if name in DRAFT_MODEL else None)
