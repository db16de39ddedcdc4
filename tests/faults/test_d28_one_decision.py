"""D28: one decision for all. Devices and processes that share a batch emit the tokens that one device emits."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import environment, printed

ROOT = Path(__file__).parents[2]


def start(devices, *arguments):
    env = environment(devices, "--xla_backend_optimization_level=0")
    command = [sys.executable, "-m", "tests.faults.devices", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=ROOT)


def result(process):
    out, errors = process.communicate()
    assert process.returncode == 0, errors[-4000:]
    (found,) = printed(out)
    return found


@pytest.fixture(scope="module")
def eight():
    """What eight devices did, case by case, in one process."""
    return result(start(8, "attention", "verdicts", "alone", "mixes", "refused"))


def check(found, accepted):
    assert found["different"] == 0 and found["same"] + found["near"] == 200
    assert found["same"] >= 160  # near ties are few: most rows must not need a replay
    assert found["agree"] and found["counts_equal"] and found["accepted"] > accepted, found


def test_eight_devices_emit_one_devices_text(eight):
    check(eight["attention"], accepted=100)


def test_verdicts_on_near_ties_are_one_devices_bit_for_bit(eight):
    assert eight["verdicts"]["sound"] == {"equal": True, "agree": True}
    assert eight["verdicts"]["accepted"] > 100


@pytest.mark.parametrize("fault", ("own logits", "own key"))
def test_a_device_that_decides_alone_is_caught(eight, fault):
    assert eight["verdicts"][fault] == {"equal": False, "agree": False}


def two(*arguments):
    """What each of two processes of one job did."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    processes = [start(2, "two", port, index, *arguments) for index in range(2)]
    return tuple(found["two"] for found in map(result, processes))


def test_two_processes_give_one_devices_text(eight):
    first, second = two()
    assert first == second == eight["alone"]
    assert sum(counters["accepted"] for _, counters in first) > 10


def test_experts_split_over_devices_mix_as_whole_ones(eight):
    assert len(eight["mixes"]) == 16 and max(eight["mixes"].values()) < 1e-3, eight["mixes"]


def test_what_can_not_be_split_is_refused(eight):
    batch, target = eight["refused"]
    assert batch == "batch: got 3 slots, takes a multiple of the mesh's 2 along data"
    assert target == "mesh: got one with the target AuditTarget, takes one with a Llama or Qwen"


@pytest.mark.slow
def test_two_processes_roll_out_by_one_clock():
    """Each measures other times; what is decided by them is the same, and the text is one process's without drafts."""
    alone, (first, second) = result(start(1, "rolled"))["rolled"], two("rolled")
    assert first["own"] != second["own"] and len(first["own"]) == len(second["own"])
    assert first["costs"] == second["costs"] and first["chosen"] == second["chosen"]
    assert {drafting for _, drafting, _, _ in first["chosen"]} == {True, False}
    assert first["texts"] == second["texts"] == alone["texts"]


@pytest.mark.slow
def test_nothing_compiles_behind_the_warm_up_on_a_mesh():
    """What rollouts remember lies where their programs leave it, from the first call on."""
    begun, after = result(start(2, "warmed"))["warmed"]
    assert begun == after > 0


@pytest.mark.slow
def test_recurrent_experts_on_eight_devices():
    check(result(start(8, "recurrent"))["recurrent"], accepted=10)


@pytest.mark.slow
def test_a_draft_head_on_eight_devices():
    assert result(start(8, "heads"))["heads"] == {"equal": True}


@pytest.mark.slow
def test_every_form_of_parameters_on_every_mesh():
    found = result(start(8, "meshes"))["meshes"]
    assert found.pop("not summed") > 0.1
    assert len(found) == 6 and max(found.values()) < 1e-4, found
