"""Messages between ranks: JSON and raw arrays over TCP, after both ends have proved that they know the secret.

A message is the length of its header (4 bytes, big end first), the header as JSON, and the bytes of its arrays in the
order of the header. What arrives is data alone: nothing in it is run or unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

logger = logging.getLogger("msds")

Arrays = Mapping[str, npt.NDArray[Any]]

HANDSHAKE_SECONDS = 5.0
"""All of a handshake, however slowly the other end speaks."""
_TICK = 0.25
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""A machine that lost its power or network is missed within 25 seconds."""
_NONCE = 32
_PROOF = hashlib.sha256().digest_size
_LONGEST_HEADER = 1 << 24
_LENGTH = struct.Struct(">I")
_RANK = struct.Struct(">I")


@dataclass(frozen=True)
class Message:
    """kind: what is meant; fields: its JSON; arrays: name -> array."""

    kind: str
    fields: dict[str, Any]
    arrays: dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Limit:
    """How long something is waited for: until the deadline (monotonic), or until something is `received`."""

    deadline: float
    received: Sequence[object] = ()

    def portion(self) -> float:
        """Seconds to wait before this is asked again, above 0; TimeoutError when the wait is over."""
        rest = self.deadline - time.monotonic()
        if rest <= 0 or self.received:
            raise TimeoutError("the wait was ended by a signal" if self.received else "it took too long")
        return min(rest, _TICK)


def handshake_limit(received: Sequence[object] = ()) -> Limit:
    """What the other end gets to say who it is."""
    return Limit(time.monotonic() + HANDSHAKE_SECONDS, received)


class Connection:
    """One end, after the handshake. Several threads may send; one receives."""

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
        self._socket = connected
        self._sending = threading.Lock()

    def send(self, kind: str, fields: Mapping[str, Any] | None = None, arrays: Arrays | None = None) -> None:
        """Returns when the system has taken it over; OSError when the other end has left."""
        parts = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
        listed = (
            [[name, array.dtype.str, list(np.shape(arrays[name]))] for name, array in parts.items()] if arrays else []
        )
        header = json.dumps({"kind": kind, "fields": dict(fields or {}), "arrays": listed}).encode()
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(header)) + header)
            for array in parts.values():
                self._socket.sendall(_bytes(array))

    def receive(self, limit: Limit | None = None) -> Message | None:
        """The next message; None at the end, a broken one and that of the limit included, after which the connection
        is of no use. ValueError for what is no message."""
        try:
            (length,) = _LENGTH.unpack(_read(self._socket, _LENGTH.size, limit))
            if length > _LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes is no header")
            header = json.loads(_read(self._socket, length, limit))
            arrays = {}
            for name, dtype, shape in header["arrays"]:
                if np.dtype(dtype).kind not in "biuf":
                    raise ValueError(f"array {name!r} is of {dtype}, which is not sent")
                arrays[name] = np.empty(shape, dtype)
                _fill(self._socket, _bytes(arrays[name]), limit)
        except (EOFError, OSError):
            return None
        if limit is not None:
            self._socket.settimeout(None)
        return Message(header["kind"], header["fields"], arrays)

    def has_left(self) -> bool:
        """Whether the other end is known to have closed. Not while another thread receives."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """The other end hears of it, and so does a thread that receives here."""
        with contextlib.suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def accept(
    listener: socket.socket, secret: str, deadline: float, *, kind: str = "rank", received: Sequence[object] = ()
) -> tuple[int, Connection]:
    """The next peer that knows the secret, and the rank it says it is.

    TimeoutError at the deadline (monotonic), or as soon as something is `received`. Whoever does not know the secret is
    sent away, and the wait goes on. kind: what is numbered, a rank or a node.
    """
    limit = Limit(deadline, received)
    while True:
        listener.settimeout(limit.portion())
        try:
            peer, address = listener.accept()
        except TimeoutError:
            continue
        try:
            return _admit(peer, secret, kind, handshake_limit(received))
        except (OSError, EOFError, ValueError) as error:
            reason = str(error) or "it left without a word"
            logger.warning("a connection from %s:%d is refused: %s", *address[:2], reason)
            peer.close()


def _admit(peer: socket.socket, secret: str, kind: str, limit: Limit) -> tuple[int, Connection]:
    """The leader's side of the handshake."""
    own = secrets.token_bytes(_NONCE)
    peer.settimeout(HANDSHAKE_SECONDS)
    peer.sendall(own)
    answer = _read(peer, _RANK.size + _NONCE + _PROOF, limit)
    (rank,) = _RANK.unpack(answer[: _RANK.size])
    theirs, proof = answer[_RANK.size : -_PROOF], answer[-_PROOF:]
    if not hmac.compare_digest(proof, _proof(secret, f"{kind} follower", rank, own, theirs)):
        raise ValueError(f"it failed the secret check for {kind} {rank}")
    peer.sendall(_proof(secret, f"{kind} leader", rank, own, theirs))
    return rank, Connection(peer)


def connect(
    address: tuple[str, int],
    secret: str,
    rank: int,
    deadline: float,
    *,
    kind: str = "rank",
    received: Sequence[object] = (),
) -> Connection:
    """A connection to whoever listens there and knows the secret, tried until the deadline. OSError, ValueError.

    TimeoutError, which is an OSError, also where something is `received` when the other end is heard.
    """
    while True:
        try:
            peer = socket.create_connection(address, timeout=HANDSHAKE_SECONDS)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    try:
        # who listens may be busy with others for as long as it waits
        limit = Limit(max(handshake_limit().deadline, deadline), received)
        theirs, own = _read(peer, _NONCE, limit), secrets.token_bytes(_NONCE)
        peer.sendall(_RANK.pack(rank) + own + _proof(secret, f"{kind} follower", rank, theirs, own))
        if not hmac.compare_digest(_read(peer, _PROOF, limit), _proof(secret, f"{kind} leader", rank, theirs, own)):
            raise ValueError(f"what listens on {address[0]}:{address[1]} does not know the secret: it is not {kind} 0")
        return Connection(peer)
    except EOFError:
        peer.close()
        raise ValueError(
            f"{address[0]}:{address[1]} sent {kind} {rank} away, which failed its secret check: the secrets differ, or "
            "the program there has started already"
        ) from None
    except BaseException:
        peer.close()
        raise


def _proof(secret: str, role: str, rank: int, leader_nonce: bytes, follower_nonce: bytes) -> bytes:
    message = role.encode() + _RANK.pack(rank) + leader_nonce + follower_nonce
    return hmac.digest(secret.encode(), message, "sha256")


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    """The memory of a contiguous array; an empty one has no other view."""
    return memoryview(array.reshape(-1).view(np.uint8).data)


def _read(source: socket.socket, count: int, limit: Limit | None) -> bytes:
    buffer = bytearray(count)
    _fill(source, memoryview(buffer), limit)
    return bytes(buffer)


def _fill(source: socket.socket, buffer: memoryview, limit: Limit | None) -> None:
    """EOFError where the other end leaves in between, TimeoutError at the limit."""
    while len(buffer):
        if limit is not None:
            source.settimeout(limit.portion())
        try:
            count = source.recv_into(buffer)
        except TimeoutError:
            if limit is None:
                raise  # the system has missed the other end
            continue
        if count == 0:
            raise EOFError
        buffer = buffer[count:]
