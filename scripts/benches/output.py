"""What every subcommand does with its result: check it, write it, draw it, and print it as the last line of stdout."""

import argparse
import importlib.util
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import schema as schemas

PLOT_FORMATS = (".pdf", ".png", ".svg")

Plot = Callable[[dict[str, Any], Any], None]


def add_arguments(parser: argparse.ArgumentParser, plots: bool = True) -> None:
    """Add --json FILE, --quick and, for a subcommand that draws its result, --plot FILE.

    A file that can't be written is refused here, before anything is measured.
    """
    add_json_argument(parser)
    parser.add_argument(
        "--quick", action="store_true", help="less of everything: shows that it runs, not how fast it is"
    )
    if plots:
        parser.add_argument(
            "--plot", type=_plot_file, metavar="FILE", help=f"draw the result ({' '.join(PLOT_FORMATS)})"
        )


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Add --json FILE alone."""
    parser.add_argument("--json", type=_output_file, metavar="FILE", help="also write the result to FILE")


def finish(result: dict[str, Any], schema: dict[str, Any], args: argparse.Namespace, plot: Plot | None = None) -> None:
    """Check a result against its schema, write --json and --plot, and print it as one line of JSON.

    `plot(result, figure)` draws on a matplotlib figure. Arrays and NumPy scalars become plain lists and numbers. Raises
    ValueError if the result departs from the schema or holds a NaN or an infinity (the result then goes to stderr, so
    that no measurement is lost), or if --plot is given and the subcommand draws nothing.
    """
    try:
        result = _plain(result)
        schemas.validate(result, schema)
        line = json.dumps(result, allow_nan=False)
    except ValueError:
        print(result, file=sys.stderr)
        raise
    if args.json:
        _replace(args.json, (line + "\n").encode())
    if getattr(args, "plot", None):
        if plot is None:
            raise ValueError("--plot: this subcommand draws nothing")
        _draw(args.plot, result, plot)
    print(line, flush=True)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _draw(path: Path, result: dict[str, Any], plot: Plot) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    FigureCanvasAgg(figure)
    plot(result, figure)
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:])
    _replace(path, picture.getvalue())


def _replace(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _output_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder, takes a file")
    if not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path.parent} is no folder that can be written to")
    return path


def _plot_file(text: str) -> Path:
    path = _output_file(text)
    if path.suffix not in PLOT_FORMATS:
        raise argparse.ArgumentTypeError(f"got {text}, takes a file ending in one of {' '.join(PLOT_FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("plots are drawn with matplotlib: pip install 'spec_jax[bench]'")
    return path
