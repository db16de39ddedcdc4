"""What a process that may run jax.distributed printed of its own."""

import json


def printed(out):
    """The JSON objects among the lines of a standard output, in their order.

    gloo's C++ writes there too, in pieces from several threads: its lines can't be told by their beginnings.
    """
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]
