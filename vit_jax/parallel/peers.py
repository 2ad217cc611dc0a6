"""Coordination of a run's processes: start, barriers, and detection of failed processes.

Process 0 is the leader. Every process has a TCP connection to the leader and sends a heartbeat each
second. Messages are JSON objects, one per line. If a connection is closed, its process has died. If
no heartbeat arrives for some time, the host has died. This module does not use JAX. It therefore
also works before JAX starts, and while JAX's collectives hang.
"""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import select
import selectors
import socket
import sys
import threading
import time
import traceback
from typing import Any

from vit_jax.errors import UserError, mistake

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 20.0  # Heartbeat timeout. If a process dies, all others end within 30 s.
# Seconds that the leader waits after the first reported failure before it decides which failure is
# the cause. The failure of one process can lead to failures of other processes, and may be reported
# after them.
GRACE_SECONDS = 2.0
BARRIER_SECONDS = 600.0
END_SECONDS = 3600.0  # Maximum wait at the end, for the last process to write its files.
LONGEST = 64 * 2**20  # Maximum bytes of a message.
LONGEST_GREETING = 2**16  # Maximum bytes of the first message, which may be another program's.
AGAIN = "the same command resumes from the newest checkpoint"


class Peers:
    """The processes of a run. An instance of this base class is a run with one process.

    Instances are context managers. At the end of the context all processes wait for each other. If
    an exception leaves the context, all processes end: the leader prints a line that names the
    failed process, and the exit code is 2 for a UserError, else 1.

    Attributes:
      index: index of this process; 0 is the leader.
      count: number of processes.
      hosts: name of the host of each process.
    """

    def __init__(self, index: int = 0, count: int = 1):
        self.index, self.count = index, count
        self.hosts: list[str | None] = [None] * count
        self.hosts[index] = socket.gethostname()

    def share(self, name: str, value: Any = None, seconds: float = BARRIER_SECONDS) -> Any:
        """Waits for all processes, and returns the leader's `value` in every process.

        Args:
          name: name of this barrier, the same in all processes.
          value: a JSON value; only the leader's is used.
          seconds: timeout, counted from the arrival of the first process.

        Raises:
          UserError: some processes did not arrive in time. The message names them.
        """
        if self.count == 1:
            return value
        answer = self._meet(name, value, seconds)
        if missing := answer.get("missing"):
            raise UserError(
                f"{missing} timed out at the barrier {name!r} after {seconds:g} s; {AGAIN}"
            )
        return answer["value"]

    def barrier(self, name: str, seconds: float = BARRIER_SECONDS) -> None:
        """Waits for all processes; raises UserError if some do not arrive within `seconds`."""
        self.share(name, None, seconds)

    def agree(self, title: str, values: dict[str, Any]) -> None:
        """Checks that all processes have the same JSON values by key; `title` is their name.

        Raises:
          UserError: this process's values differ from the leader's. The message names the keys.
        """
        if self.count == 1:
            return
        mine = json.loads(json.dumps(values))
        leaders = self.share(f"{title} of the leader", mine)
        both = sorted(mine.keys() | leaders.keys())
        if keys := [key for key in both if mine.get(key) != leaders.get(key)]:
            details = [f"{key} is {mine.get(key)}, there {leaders.get(key)}" for key in keys[:8]]
            details += [f"{len(keys) - 8} more"] if len(keys) > 8 else []
            raise UserError(f"{title} differs from {self.name(0)}: {'; '.join(details)}")
        self.barrier(f"{title} of all")

    def name(self, index: int) -> str:
        """Returns the name of a process for messages: its index, and its host if known."""
        return f"process {index}" + (f" ({self.hosts[index]})" if self.hosts[index] else "")

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        if self.count == 1:
            return
        if error is None:
            self.barrier("end", END_SECONDS)
        elif (message := mistake(error)) is not None:
            self._fail({"mistake": message})
        else:
            message = " ".join(traceback.format_exception_only(error)[-1].split())
            self._fail({"fault": message, "traceback": "".join(traceback.format_exception(error))})

    def _meet(self, name: str, value: Any, seconds: float) -> dict:
        """Waits at a barrier and returns the leader's answer, a dict.

        The item `value` of the answer is the leader's value. After a timeout the answer has the
        item `missing` instead: the names of the missing processes.
        """
        raise NotImplementedError

    def _fail(self, news: dict) -> None:
        """Reports the failure of this process, and waits until the leader ends all processes."""
        raise NotImplementedError


class Connected(Peers):
    """Base class of leader and follower. The main thread sends, a separate thread receives."""

    def __init__(self, index: int, count: int, silence: float):
        super().__init__(index, count)
        self._silence = silence
        self._changed = threading.Condition(threading.RLock())
        self._answers: dict[str, dict] = {}
        self._traceback = ""
        self._ended = False
        # Without this filter, Python's resource tracker prints warnings after the error message.
        sys.warnoptions.append("ignore:resource_tracker")

    def _meet(self, name, value, seconds):
        value = value if self.index == 0 else None
        with self._changed:
            self._tell({"at": name, "value": value, "seconds": seconds})
            self._changed.wait_for(lambda: name in self._answers)
            return self._answers.pop(name)

    def _fail(self, news):
        self._traceback = news.pop("traceback", "")
        self._tell(news)
        # The leader normally ends this process during the sleep.
        time.sleep(self._silence + 2 * GRACE_SECONDS)
        print(f"{self._traceback}error: {' '.join(news.values())}", file=sys.stderr, flush=True)
        leave(1)

    def _answered(self, answer: dict):
        with self._changed:
            self._answers[answer["at"]] = answer
            self._ended = self._ended or answer["at"] == "end"
            self._changed.notify_all()

    def _listen(self):
        """Starts the receiving thread."""

        def watch():
            try:
                self._watch()
            except BaseException:
                traceback.print_exc()
                leave(1)

        threading.Thread(target=watch, name="peers", daemon=True).start()

    def _tell(self, message: dict) -> None:
        """Sends a message of this process to the leader."""
        raise NotImplementedError

    def _watch(self) -> None:
        """Receives messages until the run ends; called in the receiving thread."""
        raise NotImplementedError


class Leader(Connected):
    """Process 0. It receives messages from all others, and ends all processes if one fails."""

    def __init__(self, count: int, listener: socket.socket, silence: float):
        super().__init__(0, count, silence)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._listener = listener
        self._followers: dict[int, Connection] = {}
        self._refused: list[Connection] = []
        self._arrivals: dict[str, Arrivals] = {}
        # Reported failures, by the index of the process: UserErrors, dead processes, and other
        # errors.
        self._mistakes: dict[int, str] = {}
        self._deaths: dict[int, str] = {}
        self._faults: dict[int, str] = {}
        self._verdict_at = float("inf")
        self._listen()

    def close_door(self) -> None:
        """Stops accepting connections of processes."""
        with self._changed:
            if self._listener.fileno() >= 0:
                self._selector.unregister(self._listener)
                self._listener.close()

    def _tell(self, message):
        with self._changed:
            self._hear(0, message)

    def _watch(self):
        beaten = 0.0
        while not self._ended:
            # The time is read before `select` waits. If this process was suspended during `select`,
            # this iteration still uses the old time, and first receives the messages that arrived
            # in the meantime. Only the next iteration compares the new time with the timeout.
            now = time.monotonic()
            ready = self._selector.select(BEAT_SECONDS / 4)
            with self._changed:
                for key, _ in ready:
                    self._accept() if key.fileobj is self._listener else self._read(key.fileobj)
                for index, follower in self._followers.items():
                    if now - follower.heard > self._silence:
                        self._note(self._deaths, index, f"has not answered for {self._silence:g} s")
                if now - beaten >= BEAT_SECONDS:
                    beaten = now
                    send({}, self._followers.values())
                self._end_barriers(now)
                if now > self._verdict_at:
                    self._end()

    def _end_barriers(self, now: float) -> None:
        """Answers the barriers that have timed out. The answer names the missing processes."""
        for name, arrivals in list(self._arrivals.items()):
            if now > arrivals.deadline:
                missing = [self.name(i) for i in range(self.count) if i not in arrivals.here]
                self._answer(name, missing=", ".join(missing[:8]))

    def _accept(self):
        with contextlib.suppress(OSError):
            connection = Connection(self._listener.accept()[0], LONGEST_GREETING)
            self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection):
        try:
            for message in connection.receive():
                if connection.process is None:
                    index, count, host = (message[key] for key in ("process", "processes", "host"))
                    of_types = type(index) is type(count) is int and type(host) is str
                    if not (of_types and 0 <= index < count):
                        raise ValueError("no process of a run")
                    connection.process, connection.longest = index, LONGEST
                    self._greet(connection, index, count, host)
                elif self._followers.get(connection.process) is connection:
                    self._hear(connection.process, message)
        # The other end has died, or is not a process of a run.
        except (OSError, ValueError, LookupError, TypeError):
            self._selector.unregister(connection)
            connection.close()
            if self._followers.get(connection.process) is connection and not self._ended:
                self._note(self._deaths, connection.process, "died")

    def _greet(self, connection, index: int, count: int, host: str):
        if count != self.count:
            wrong = (
                f"process {index} ({host}) was started with --processes={count} and "
                f"{self.name(0)} with --processes={self.count}; give all the same"
            )
        elif index == 0 or index in self._followers:
            wrong = (
                f"{self.name(index)} was started a second time, on {host}; give each its own "
                "--process"
            )
        else:
            self.hosts[index], self._followers[index] = host, connection
            return
        self._refused.append(connection)
        self._note(self._mistakes, 0, wrong)

    def _hear(self, index, message):
        if name := message.get("at"):
            deadline = time.monotonic() + message["seconds"]
            arrivals = self._arrivals.setdefault(name, Arrivals(deadline))
            arrivals.here.add(index)
            if index == 0:
                arrivals.value = message["value"]
            if len(arrivals.here) == self.count:
                self._answer(name, value=arrivals.value)
        elif "mistake" in message:
            self._note(self._mistakes, index, message["mistake"])
        elif "fault" in message:
            self._note(self._faults, index, message["fault"])

    def _answer(self, name, **answer):
        here = self._arrivals.pop(name).here
        send({"at": name, **answer}, [self._followers[index] for index in here if index])
        self._answered({"at": name, **answer})

    def _note(self, news: dict[int, str], index: int, problem: str):
        news.setdefault(index, problem)
        grace = 0 if 0 in self._mistakes else GRACE_SECONDS
        self._verdict_at = min(self._verdict_at, time.monotonic() + grace)

    def _end(self):
        """Prints the cause of the failure, ends the other processes and exits.

        Several failures may have been reported, because one failure can lead to others. A UserError
        is the cause if one was reported, or else the death of a process, or else another error.
        """
        news = self._mistakes or self._deaths or self._faults
        culprit, code = min(news), 2 if self._mistakes else 1
        if self._mistakes and culprit == 0:
            line = news[0]
        elif news is self._deaths:
            dead = [f"{self.name(i)} {how}" for i, how in sorted(news.items())[:8]]
            line = f"{', '.join(dead)}; {AGAIN}"
        else:
            line = f"{self.name(culprit)}: {news[culprit]}"
        self.close_door()
        send({"leave": code, "culprit": culprit}, [*self._followers.values(), *self._refused])
        before = self._traceback if culprit == 0 else ""
        print(f"{before}error: {line}", file=sys.stderr, flush=True)
        # When this process ends, messages that other processes have not read are lost. Therefore
        # this process waits until the other processes have closed their connections.
        until = time.monotonic() + GRACE_SECONDS
        while self._selector.get_map() and time.monotonic() < until:
            for key, _ in self._selector.select(BEAT_SECONDS / 4):
                self._read(key.fileobj)
        leave(code)


class Follower(Connected):
    """A process that is not the leader. It ends when it loses the leader."""

    def __init__(self, index: int, count: int, connection: "Connection", silence: float):
        super().__init__(index, count, silence)
        self._leader = connection
        self._started = False
        self._tell({"process": index, "processes": count, "host": self.hosts[index]})
        self._listen()

    def _tell(self, message):
        with self._changed:
            send(message, [self._leader])  # The receiving thread detects a lost connection.

    def _watch(self):
        spoken = 0.0
        while not self._ended:
            now = time.monotonic()
            ready, _, _ = select.select([self._leader], [], [], BEAT_SECONDS / 4)
            try:
                for message in self._leader.receive() if ready else ():
                    self._hear(message)
            except (OSError, ValueError, LookupError, TypeError):
                # The other end has died, or is not the leader of a run.
                return self._orphaned("died")
            if now - self._leader.heard > self._silence:
                return self._orphaned(f"has not answered for {self._silence:g} s")
            if now - spoken >= BEAT_SECONDS:
                spoken = now
                self._tell({})

    def _hear(self, message):
        if "at" in message:
            self._started = True
            self._answered(message)
        elif "leave" in message:
            if message["culprit"] == self.index:
                print(self._traceback, end="", file=sys.stderr, flush=True)
            leave(message["leave"])

    def _orphaned(self, how: str):
        """Ends this process after the loss of the leader.

        Process 1 prints the error. It may run on the leader's host and die together with it, so the
        first process on another host prints the error, too.
        """
        if self._ended:
            return
        if not self._started:
            self._answered({"at": "start", "lost": how})
            return
        elsewhere = next((i for i, host in enumerate(self.hosts) if host != self.hosts[0]), None)
        if self.index in (1, elsewhere):
            print(f"error: {self.name(0)} {how}; {AGAIN}", file=sys.stderr, flush=True)
        leave(1)


@dataclasses.dataclass
class Arrivals:
    """State of a barrier: deadline, processes that have arrived, and the leader's shared value."""

    deadline: float
    here: set[int] = dataclasses.field(default_factory=set)
    value: Any = None


class Connection:
    """Connection that sends and receives JSON objects over a socket, one per line.

    Attributes:
      heard: `time.monotonic()` when data were last received.
      process: index of the process at the other end; None: not known yet.
      longest: maximum size of a received message in bytes.
    """

    def __init__(self, stream: socket.socket, longest: int = LONGEST):
        self.longest = longest
        stream.settimeout(BEAT_SECONDS)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream, self._rest = stream, b""
        self.heard = time.monotonic()
        self.process: int | None = None

    def fileno(self) -> int:
        """Returns the file descriptor of the socket. The module `selectors` calls this method."""
        return self._stream.fileno()

    def close(self) -> None:
        """Closes the socket."""
        self._stream.close()

    def receive(self) -> list[dict]:
        """Returns the received messages. It must only be called when the socket is readable.

        Raises:
          ConnectionError: the other end closed the connection.
          ValueError: the received data are not JSON objects.
        """
        data = self._stream.recv(2**16)
        if not data:
            raise ConnectionError("closed")
        self.heard = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > self.longest:
            raise ValueError("a message without an end")
        try:
            messages = [json.loads(line) for line in lines]
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("not an object")
        return messages

    def send(self, line: bytes) -> None:
        """Sends a line.

        Raises:
          OSError: the other end cannot be reached.
        """
        self._stream.sendall(line)


def send(message: dict, connections) -> None:
    """Sends a message to all connections; closed connections are skipped."""
    line = json.dumps(message).encode() + b"\n"
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.send(line)


def leave(code: int) -> None:
    """Ends this process and its decoding processes immediately, from any thread."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


@contextlib.contextmanager
def join(
    address: str,
    count: int,
    index: int,
    connect_seconds: float,
    silence_seconds: float = SILENCE_SECONDS,
):
    """Yields the run's `Peers` when all processes have joined.

    Args:
      address: `host:port` of the leader.
      connect_seconds: timeout for joining.
      silence_seconds: heartbeat timeout, after which a process counts as dead.

    Raises:
      UserError: `count`, `index` or the address is wrong, the leader's port is in use, or the
        leader cannot be reached within `connect_seconds`.
    """
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 2**16):
        raise UserError(f"--coordinator={address} must be HOST:PORT of process 0, or auto")
    if not 0 <= index < count:
        raise UserError(
            f"--process={index} must be from 0 to {count - 1}, below --processes={count}"
        )
    if count == 1:
        yield Peers()
        return
    if index == 0:
        peers = Leader(count, _listen(int(port)), silence_seconds)
    else:
        connection = Connection(_connect(host, int(port), connect_seconds))
        peers = Follower(index, count, connection, silence_seconds)
    with peers:
        answer = peers._meet("start", None, connect_seconds)
        if missing := answer.get("missing"):
            raise UserError(
                f"{missing} did not reach {address} within {connect_seconds:g} s "
                "(--connect_seconds); start the same command on every host"
            )
        if how := answer.get("lost"):
            # This process prints the error, because the leader has not started.
            print(f"error: the coordinator at {address} {how} before the start", file=sys.stderr)
            leave(2)
        if index == 0:
            peers.close_door()
        peers.hosts = peers.share("hosts", peers.hosts)
        yield peers


def _listen(port: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=1024)
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen on port {port}: {os.strerror(error.errno)}; "
            "end the process that uses it, or give another port in --coordinator=HOST:PORT"
        ) from error


def _connect(host: str, port: int, seconds: float) -> socket.socket:
    until = time.monotonic() + seconds
    while True:
        try:
            stream = socket.create_connection((host, port), timeout=min(seconds, 5))
            # If no process listens on a port of this host, TCP can connect the client's socket to
            # itself. Both ends of the connection then have the same address.
            if stream.getsockname() != stream.getpeername():
                return stream
            stream.close()
            reason = "nobody listens"
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > until:
            raise UserError(
                f"no coordinator at {host}:{port} after {seconds:g} s (--connect_seconds): "
                f"{reason}; process 0 must run there, and {socket.gethostname()} must be able to "
                "reach it"
            )
        time.sleep(0.2)
