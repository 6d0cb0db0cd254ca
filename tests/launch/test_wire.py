"""Messages arrive as they were sent, and only from those who know the secret."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from msds.launch.wire import Connection, Limit, accept, connect

SECRET = "s" * 32


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        found.listen()
        yield found


def pair() -> tuple[Connection, Connection]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        found.listen()
        other = socket.create_connection(found.getsockname())
        return Connection(found.accept()[0]), Connection(other)


NAMES = st.text(max_size=8)
ANY = st.sampled_from(["int32", "float32", "bool", "int64", "uint16"])
SHAPES = array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)


@given(
    st.text(max_size=8),
    st.dictionaries(NAMES, st.integers() | st.text() | st.none()),
    st.dictionaries(NAMES, ANY.flatmap(lambda dtype: arrays(dtype, SHAPES)), max_size=3),
)
def test_what_is_sent_arrives(kind: str, fields: dict[str, Any], sent: dict[str, Any]) -> None:
    here, there = pair()
    here.send(kind, fields, sent)
    got = there.receive()
    assert got is not None
    assert (got.kind, got.fields) == (kind, fields)
    assert list(got.arrays) == list(sent)
    for name, array in sent.items():
        assert got.arrays[name].dtype == array.dtype
        assert got.arrays[name].shape == array.shape
        assert got.arrays[name].tobytes() == array.tobytes()
        assert got.arrays[name].flags.writeable
    here.close()
    assert there.receive() is None
    there.close()


def test_a_transposed_array_arrives_as_it_reads() -> None:
    here, there = pair()
    array = np.arange(6, dtype=np.int32).reshape(2, 3).T
    here.send("x", {}, {"a": array})
    got = there.receive()
    assert got is not None
    np.testing.assert_array_equal(got.arrays["a"], array)
    here.close()
    there.close()


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", 1 << 30),
        struct.pack(">I", 2) + b"{]",
        struct.pack(">I", 54) + b'{"kind": "x", "fields": {}, "arrays": [["a","|O",[1]]]}',
    ],
)
def test_what_is_no_message_raises(data: bytes) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        found.listen()
        with socket.create_connection(found.getsockname()) as raw:
            there = Connection(found.accept()[0])
            raw.sendall(data + b" " * 60)
            with pytest.raises(ValueError):  # noqa: PT011  (whatever JSON says)
                there.receive()
            there.close()


def test_both_ends_must_know_the_secret(listener: socket.socket, caplog: pytest.LogCaptureFixture) -> None:
    refused: list[Exception] = []
    deadline = time.monotonic() + 20

    def knock() -> None:
        socket.create_connection(listener.getsockname()).close()  # somebody's port scan
        try:
            connect(listener.getsockname(), "another", 1, deadline)
        except ValueError as error:
            refused.append(error)
        good = connect(listener.getsockname(), SECRET, 2, deadline)
        good.send("hello")
        good.close()

    caller = threading.Thread(target=knock)
    caller.start()
    rank, connection = accept(listener, SECRET, deadline)
    caller.join()
    assert rank == 2
    message = connection.receive()
    assert message is not None
    assert message.kind == "hello"
    assert "secrets differ" in str(refused[0])
    assert caplog.text.count("refused") == 2
    connection.close()


def test_a_rank_is_not_taken_for_a_node(listener: socket.socket, caplog: pytest.LogCaptureFixture) -> None:
    deadline = time.monotonic() + 20

    def knock() -> None:
        with pytest.raises(ValueError, match="the secrets differ, or the program there has started already"):
            connect(listener.getsockname(), SECRET, 1, deadline)
        connect(listener.getsockname(), SECRET, 1, deadline, kind="node").close()

    caller = threading.Thread(target=knock)
    caller.start()
    number, connection = accept(listener, SECRET, deadline, kind="node")
    caller.join()
    assert number == 1
    assert "it failed the secret check for node 1" in caplog.text
    connection.close()


def test_a_false_rank_0_is_not_followed(listener: socket.socket) -> None:
    def pretend() -> None:
        peer = listener.accept()[0]
        peer.sendall(b"n" * 32)
        peer.recv(4 + 32 + 32, socket.MSG_WAITALL)
        peer.sendall(b"p" * 32)
        peer.close()

    false = threading.Thread(target=pretend)
    false.start()
    with pytest.raises(ValueError, match="not rank 0"):
        connect(listener.getsockname(), SECRET, 1, time.monotonic() + 20)
    false.join()


def test_waiting_ends(listener: socket.socket) -> None:
    with pytest.raises(TimeoutError):
        accept(listener, SECRET, time.monotonic() + 0.05)


def test_waiting_ends_also_while_strangers_come(listener: socket.socket, caplog: pytest.LogCaptureFixture) -> None:
    strangers = [socket.create_connection(listener.getsockname()) for _ in range(3)]
    for stranger in strangers:
        stranger.close()
    with pytest.raises(TimeoutError):
        accept(listener, SECRET, time.monotonic() + 20, received=["a signal"])
    with pytest.raises(TimeoutError):
        accept(listener, SECRET, time.monotonic() - 1)
    assert "refused" not in caplog.text


def test_who_speaks_slowly_is_sent_away(
    listener: socket.socket, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msds.launch.wire.HANDSHAKE_SECONDS", 0.3)
    told: list[int] = []

    def drip() -> None:
        with socket.create_connection(listener.getsockname()) as slow, contextlib.suppress(OSError):
            slow.recv(32, socket.MSG_WAITALL)
            slow.settimeout(0.1)
            while len(told) < 50:
                told.append(slow.send(b"x"))
                with contextlib.suppress(TimeoutError):
                    if slow.recv(1) == b"":
                        return

    caller = threading.Thread(target=drip)
    caller.start()
    with pytest.raises(TimeoutError):
        accept(listener, SECRET, time.monotonic() + 1)
    caller.join()
    assert len(told) < 50
    assert "is refused: it took too long" in caplog.text


def test_a_message_that_does_not_come_in_time_is_none() -> None:
    here, there = pair()
    assert here.receive(Limit(time.monotonic() + 0.05)) is None
    there.send("x")
    assert here.receive(Limit(time.monotonic() + 20)) is not None
    here.close()
    there.close()


def test_a_machine_that_is_lost_is_missed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as found, socket.create_connection(found.getsockname()) as raw:
        Connection(raw)
        assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, every, count = (
            raw.getsockopt(socket.IPPROTO_TCP, name)
            for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
    assert idle + every * count <= 30  # the wait that a refused successor is told
