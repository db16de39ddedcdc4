"""The processes of a job: how they start, which devices serve together, and that all of them want the same."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from spec_jax.models.placement import make_mesh

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Group:
    """Hosts whose devices hold one copy of the model between them, or one host with one or several copies.

    All hosts of a group serve the same prompts in step; `lead` is the one that writes. mesh: None for a single device.
    """

    host: int
    hosts: int
    index: int
    count: int
    lead: bool
    mesh: Mesh | None


def start(coordinator: str | None, processes: int | None, process_id: int | None) -> None:
    """Join the other processes, before anything runs on a device.

    coordinator: HOST:PORT of the first process, with `processes` and `process_id`; "auto" asks the cluster, as is done
    for None on a TPU machine; elsewhere None is one process by itself.
    """
    if coordinator not in (None, "auto"):
        if processes is None or process_id is None:
            raise ValueError(f"--coordinator: got {coordinator}, takes --processes and --process-id beside it")
        if processes < 1:
            raise ValueError(f"--processes: got {processes}, takes at least 1")
        if not 0 <= process_id < processes:
            raise ValueError(f"--process-id: got {process_id}, takes 0 .. {processes - 1}")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(coordinator, processes, process_id)
        return
    if processes is not None or process_id is not None:
        raise ValueError("--processes, --process-id: got no --coordinator HOST:PORT beside them, takes all or none")
    if coordinator == "auto" or _on_tpu():
        jax.distributed.initialize()


def group(tensor: int, expert: int) -> Group:
    """This host's group: as many hosts as hold tensor x expert devices, or one, with copies of the model side by side.

    Raises ValueError where hosts would have devices to spare.
    """
    for name, n in (("--tensor", tensor), ("--expert", expert)):
        if n < 1:
            raise ValueError(f"{name}: got {n}, takes at least 1")
    own, need, hosts = jax.local_device_count(), tensor * expert, jax.process_count()
    span = max(1, need // own)
    if max(own, need) % min(own, need) or hosts % span:
        raise ValueError(
            f"--tensor, --expert: got {tensor} x {expert} devices for a copy of the model, takes a number that divides "
            f"the {own} of a host, or a multiple of it that divides the {hosts * own} of all {hosts}"
        )
    host = jax.process_index()
    index = host // span
    members = range(index * span, (index + 1) * span)
    devices = sorted((d for d in jax.devices() if d.process_index in members), key=lambda d: (d.process_index, d.id))
    sizes = {"data": len(devices) // need, "tensor": tensor, "expert": expert}
    mesh = make_mesh(sizes, devices) if len(devices) > 1 else None
    return Group(host, hosts, index, hosts // span, host == members[0], mesh)


def gather(value: bytes) -> list[bytes]:
    """Every process's value, by process; all of them call this at the same point."""
    if jax.process_count() == 1:
        return [value]
    sizes = multihost_utils.process_allgather(np.array([len(value)], np.int32)).reshape(-1)
    padded = np.zeros(max(1, int(sizes.max())), np.uint8)
    padded[: len(value)] = np.frombuffer(value, np.uint8)
    rows = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
    return [rows[i, :n].astype(np.uint8).tobytes() for i, n in enumerate(sizes)]


def all_or_none(step: Callable[[], T]) -> T:
    """The step's result; if it fails on any host, an error on all, which says what was wrong there."""
    failure, result = None, None
    try:
        result = step()
    except Exception as error:
        failure = error
    said = [m.decode(errors="replace") for m in gather(b"" if failure is None else _said(failure))]
    if failure is not None:
        raise failure
    if any(said):
        raise ValueError("; ".join(f"host {i}: {message}" for i, message in enumerate(said) if message))
    return result  # type: ignore[return-value]


def agree(parts: Mapping[str, str]) -> None:
    """Raise ValueError, on every host alike, naming what the hosts do not have in common.

    parts: what to compare, by name, as digests or short texts.
    """
    names = list(parts)
    theirs = [row.decode().split("\x1f") for row in gather("\x1f".join(parts[name] for name in names).encode())]
    differing = []
    for i, name in enumerate(names):
        values: dict[str, list[int]] = {}
        for host, row in enumerate(theirs):
            values.setdefault(row[i], []).append(host)
        if len(values) > 1:
            sides = "; ".join(f"{value[:60]} on {_named(hosts)}" for value, hosts in values.items())
            differing.append(f"{name}: {sides}")
    if differing:
        raise ValueError(f"the hosts do not agree, takes the same on all: {'; '.join(differing)}")


def _named(hosts: list[int], most: int = 8) -> str:
    shown = ", ".join(map(str, hosts[:most])) + (f" and {len(hosts) - most} more" if len(hosts) > most else "")
    return f"host{'s' if len(hosts) > 1 else ''} {shown}"


def _said(error: Exception) -> bytes:
    return (str(error) or type(error).__name__).encode()[:2000]


def _on_tpu() -> bool:
    """Whether this machine has TPU chips and JAX would use them; asking JAX itself would start it."""
    platforms: Any = os.environ.get("JAX_PLATFORMS", "")
    if platforms and "tpu" not in platforms.split(","):
        return False
    chips = [*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")]
    return bool(chips) and importlib.util.find_spec("libtpu") is not None
