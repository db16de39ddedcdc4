"""Processes that a test starts: what they run under, and what they printed of their own."""

import json
import os


def environment(devices: int = 1, *flags: str) -> dict[str, str]:
    """The variables: JAX on CPU devices of its own, under `flags` of XLA and those that the tests run under."""
    asked = (*flags, os.environ.get("XLA_FLAGS", ""), f"--xla_force_host_platform_device_count={devices}")
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(asked)}


def printed(out):
    """The JSON objects among the lines of a standard output, in their order.

    gloo's C++ writes there too, in pieces from several threads: its lines can't be told by their beginnings.
    """
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]
