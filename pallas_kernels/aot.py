"""Ahead-of-time compilation for chips that are not there: real libtpu and XLA:GPU, no hardware.

`pip install 'spec_jax[aot]'` brings libtpu. XLA:GPU needs `pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt` of
jaxlib's version; on a machine without a GPU it prints a line to stderr whenever jax starts.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

TPU = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
CHIPS = (*TPU, "h100")

# NVIDIA's H100 SXM, as XLA describes a GPU.
_H100 = """
gpu_device_info {
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  memory_bandwidth: 3352000000000 l2_cache_size: 52428800 device_memory_size: 85899345920
  cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100"
"""


def missing(chip: str) -> str | None:
    """What has to be installed to compile for a chip, or None. ValueError for a chip that is not in CHIPS."""
    if chip not in CHIPS:
        raise ValueError(f"chip: got {chip!r}, takes one of {', '.join(CHIPS)}")
    package = "libtpu" if chip in TPU else "jax_plugins.xla_cuda12"
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        found = None
    if found:
        return None
    line = "'spec_jax[aot]'" if chip in TPU else f"--no-deps jax-cuda12-plugin=={jax.__version__} jax-cuda12-pjrt"
    return f"compiling for {chip} needs {package}: pip install {line}"


def dump_schedules(folder: Path) -> None:
    """Make libtpu write its schedules to a folder, for `bundles`. It reads this once, before the first compilation."""
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"


def device(chip: str) -> Any:
    """A chip to compile for; ModuleNotFoundError where its compiler is not installed."""
    if lacks := missing(chip):
        raise ModuleNotFoundError(lacks)
    if chip in TPU:
        return devices(TPU[chip])[0]
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="1x1x1", topology="1x1x1", target_config=_H100
    )
    return topology.devices[0]


def devices(topology: str) -> list[Any]:
    """The chips of a TPU topology such as v5e:16x16; ModuleNotFoundError where libtpu is not installed."""
    if lacks := missing("v5e"):
        raise ModuleNotFoundError(lacks)
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # or libtpu asks the cloud what machine this is
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # several processes may compile at a time
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


def compile(function: Callable, args: tuple[jax.ShapeDtypeStruct, ...], chip: str) -> Any:
    """`function` compiled for one chip and arrays of these shapes; `.as_text()` is its optimised HLO.

    Raises ModuleNotFoundError where the chip's compiler is not installed, and whatever the compiler refuses.
    """
    sharding = SingleDeviceSharding(device(chip))
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in args]
    return finish(jax.jit(function).lower(*placed))


def finish(lowered: Any) -> Any:
    """Compile what was lowered; a program for a chip that is not there is kept out of jax's cache on disk.

    It cannot be read back from there. Raises what the compiler refuses.
    """
    setting = "jax_persistent_cache_min_compile_time_secs"
    seconds = getattr(jax.config, setting)
    jax.config.update(setting, float("inf"))
    try:
        return lowered.compile()
    finally:
        jax.config.update(setting, seconds)


def bundles(kernel: str, folder: Path) -> int:
    """Instruction bundles of the newest compilation of the TPU kernel of this name: its issue cycles at best.

    Bodies of loops and both sides of branches count once. Raises FileNotFoundError if nothing was dumped.
    """
    found = list(folder.glob(f"*{kernel}*schedule-analysis_final_bundles.txt"))
    if not found:
        raise FileNotFoundError(f"folder: {folder} has no schedule of a kernel named {kernel!r}")
    count = re.search(r"total scheduled bundles:\s+(\d+)", max(found, key=lambda f: f.stat().st_mtime_ns).read_text())
    if count is None:
        raise ValueError(f"folder: the schedule of {kernel!r} in {folder} names no number of bundles")
    return int(count[1])
