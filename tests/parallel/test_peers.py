"""Processes that meet, exchange values, fail and die, without JAX."""

import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.conftest import HANG
from tests.system.conftest import ROOT, free_port
from vit_jax.errors import UserError
from vit_jax.parallel.peers import join

pytestmark = pytest.mark.slow  # Each test starts processes, or compiles for seconds.

PROCESS = """
import os, sys, time
from vit_jax import command
from vit_jax.errors import UserError
from vit_jax.parallel.peers import join

def main(arguments):
    address, count, index, connect, silence, what = arguments
    index = int(index)
    with join(address, int(count), index, float(connect), float(silence)) as peers:
        exec(what)

command.run(main)
"""


def start(port, index, what="", count=2, connect=HANG, silence=HANG):
    arguments = [f"localhost:{port}", count, index, connect, silence, what]
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def results(processes):
    """Returns exit code and stderr of each process after all have ended."""
    try:
        errors = [process.communicate(timeout=HANG)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, text) for process, text in zip(processes, errors, strict=True)]


def together(what, count=2, **options):
    port = free_port()
    return results([start(port, index, what, count, **options) for index in range(count)])


HERE = socket.gethostname()
AGAIN = "the same command resumes from the newest checkpoint"


@pytest.mark.slow
def test_processes_that_finish_leave_with_zero():
    assert together("time.sleep(index)", count=3) == [(0, "")] * 3


def test_the_leaders_value_reaches_all():
    what = (
        "assert peers.share('seed', index + 7, 5) == 7; peers.barrier('seed', 5); "
        "peers.barrier('seed', 5)"
    )
    assert together(what, count=3) == [(0, "")] * 3


def test_values_that_differ_are_named_by_the_leader():
    what = "peers.agree('the config', {'seed': 0, 'batch_size': 32 * (index + 1), 'crop': (1, 2)})"
    leader, follower = together(what)
    line = (
        f"process 1 ({HERE}): the config differs from process 0 ({HERE}): batch_size is 64, there "
        "32"
    )
    assert leader == (2, f"error: {line}\n")
    assert follower == (2, "")


@pytest.mark.slow
def test_leader_does_not_go_on_before_all_agree():
    what = "peers.agree('the config', {'a': index}); print('went on', file=sys.stderr)"
    assert "went on" not in "".join(text for _, text in together(what))


def test_killed_process_is_named_by_the_leader():
    what = "os.kill(os.getpid(), 9) if index == 1 else time.sleep(1000)"
    leader, killed, other = together(what, count=3)
    assert leader == (1, f"error: process 1 ({HERE}) died; {AGAIN}\n")
    assert killed[0] == -signal.SIGKILL
    assert other == (1, "")


@pytest.mark.slow
def test_killed_leader_is_named_by_one_of_the_others(tmp_path):
    # The leader does not die immediately, because messages that the others have not read are lost
    # with the connection.
    what = f"""
from pathlib import Path
peers.barrier("up", {HANG})
if index:
    Path({str(tmp_path)!r}, str(index)).touch()
    time.sleep(1000)
while len(os.listdir({str(tmp_path)!r})) < 2:
    time.sleep(0.01)
os.kill(os.getpid(), 9)
"""
    _, second, third = together(what, count=3)
    assert second == (1, f"error: process 0 ({HERE}) died; {AGAIN}\n")
    assert third == (1, "")


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [0, 1])
def test_process_that_stands_still_is_named(frozen):
    port = free_port()
    pair = [
        start(port, index, "print('up', flush=True); time.sleep(1000)", silence=5)
        for index in range(2)
    ]
    try:
        for process in pair:
            process.stdout.readline()
        pair[frozen].send_signal(signal.SIGSTOP)
        _, line = pair[1 - frozen].communicate(timeout=HANG)
        assert line == f"error: process {frozen} ({HERE}) has not answered for 5 s; {AGAIN}\n"
        assert pair[1 - frozen].returncode == 1
        pair[frozen].send_signal(signal.SIGCONT)
        assert pair[frozen].wait(HANG) == 1
    finally:
        for process in pair:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_mistake_of_one_process_is_printed_by_the_leader():
    what = "if index == 1: raise UserError('no folder /data/train')\ntime.sleep(1000)"
    leader, follower = together(what)
    assert leader == (2, f"error: process 1 ({HERE}): no folder /data/train\n")
    assert follower == (2, "")


@pytest.mark.slow
def test_mistake_of_all_is_printed_once():
    what = "time.sleep(index == 0); raise UserError('batch size 3')"
    assert together(what, count=3) == [(2, "error: batch size 3\n"), (2, ""), (2, "")]


@pytest.mark.slow
def test_fault_is_named_and_its_process_prints_the_traceback():
    leader, follower = together("if index == 1: {}['x']\ntime.sleep(1000)")
    assert leader == (1, f"error: process 1 ({HERE}): KeyError: 'x'\n")
    assert follower[0] == 1
    assert follower[1].startswith("Traceback")


@pytest.mark.slow
def test_death_explains_the_faults_that_follow():
    what = (
        "if index == 1: os.kill(os.getpid(), 9)\n"
        "raise ValueError('Gloo: Connection closed by peer')"
    )
    assert together(what)[0] == (1, f"error: process 1 ({HERE}) died; {AGAIN}\n")


@pytest.mark.slow
def test_barrier_names_the_missing_process():
    leader, _, late = together(
        "if index < 2: peers.barrier('saved', 10)\ntime.sleep(1000)", count=3
    )
    assert leader == (
        2,
        f"error: process 2 ({HERE}) timed out at the barrier 'saved' after 10 s; {AGAIN}\n",
    )
    assert late == (2, "")


def test_process_that_never_starts_is_named():
    port = free_port()
    ((code, line),) = results([start(port, 0, connect=1)])
    assert code == 2
    assert line == (
        f"error: process 1 did not reach localhost:{port} within 1 s (--connect_seconds); "
        "start the same command on every host\n"
    )


def test_coordinator_that_cannot_be_reached_is_named():
    port = free_port()
    ((code, line),) = results([start(port, 1, connect=1)])
    assert code == 2
    assert line.startswith(
        f"error: no coordinator at localhost:{port} after 1 s (--connect_seconds): "
    )
    assert line.count("\n") == 1


def test_process_that_is_started_twice_is_named():
    port = free_port()
    leader, *others = results([start(port, index, count=3) for index in (0, 1, 1)])
    assert leader[0] == 2
    assert leader[1] == (
        f"error: process 1 ({HERE}) was started a second time, on {HERE}; give each its own "
        "--process\n"
    )
    assert others == [(2, ""), (2, "")]


def test_different_numbers_of_processes_are_named():
    port = free_port()
    leader, follower = results([start(port, 0, count=2), start(port, 1, count=3)])
    assert leader[0] == 2
    assert (
        f"process 1 ({HERE}) was started with --processes=3 and process 0 ({HERE}) with"
        in leader[1]
    )
    assert follower == (2, "")


def test_port_in_use_is_named():
    with socket.create_server(("", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
        with pytest.raises(UserError, match="cannot listen on port .*: Address already in use"):
            join(address, 2, 0, 1).__enter__()


@pytest.mark.parametrize(
    ("address", "index", "count", "named"),
    [
        ("localhost:1234", 2, 2, "--process=2 must be from 0 to 1"),
        ("localhost:1234", -1, 2, "--process=-1 must be from 0 to 1"),
        ("localhost", 0, 2, "--coordinator=localhost must be HOST:PORT"),
        ("localhost:99999", 0, 2, "--coordinator=localhost:99999 must be HOST:PORT"),
    ],
)
def test_wrong_number_or_address_is_named(address, index, count, named):
    with pytest.raises(UserError, match=named):
        join(address, count, index, 1).__enter__()


def test_foreign_connections_are_ignored():
    port = free_port()
    pair = [start(port, 0, "time.sleep(1)")]
    while pair[0].poll() is None:
        try:
            stranger = socket.create_connection(("localhost", port))
            break
        except OSError:
            time.sleep(0.05)
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    greeting = b'{"process": %s, "processes": 2, "host": "x"}\n'
    noise = (b"[" * 50_000 + b"\n", b"[1]\n", b"[" * 100_000, greeting % b"-1", greeting % b"[1]")
    for content in noise:
        with socket.create_connection(("localhost", port)) as other:
            other.sendall(content)
    with socket.create_connection(("localhost", port)) as other:
        other.sendall(b'{"hello": 1}\n')
        pair.append(start(port, 1, "time.sleep(1)"))
        assert results(pair) == [(0, ""), (0, "")]
    stranger.close()
