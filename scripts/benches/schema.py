"""The JSON schema of a subcommand's result, in the file <name>.schema.json beside the subcommand."""

import json
from pathlib import Path
from typing import Any


def load(name: str, folder: Path | None = None) -> dict[str, Any]:
    """The schema of a subcommand, checked against the rules for schemas (draft 2020-12).

    Raises FileNotFoundError if there is none, and jsonschema.SchemaError if the file is no schema.
    """
    path = (folder or Path(__file__).parent) / f"{name}.schema.json"
    if not path.is_file():
        raise FileNotFoundError(f"name: {name!r} has no schema file {path}")
    schema = json.loads(path.read_text(encoding="utf-8"))
    _validator().check_schema(schema)
    return schema


def validate(result: Any, schema: dict[str, Any]) -> None:
    """Raise ValueError naming every place where a result departs from its schema."""
    errors = sorted(_validator()(schema).iter_errors(result), key=lambda error: error.json_path)
    if errors:
        places = "; ".join(f"{error.json_path}: {error.message}" for error in errors)
        raise ValueError(f"result does not fit its schema: {places}")


def _validator() -> Any:
    try:
        import jsonschema
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            "benchmark results are checked with jsonschema: pip install 'spec_jax[bench]'", name="jsonschema"
        ) from missing
    return jsonschema.Draft202012Validator
