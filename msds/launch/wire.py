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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

logger = logging.getLogger("msds")

Arrays = Mapping[str, npt.NDArray[Any]]

HANDSHAKE_SECONDS = 5.0
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


class Connection:
    """One end, after the handshake. Several threads may send; one receives."""

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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

    def receive(self) -> Message | None:
        """The next message; None at the end, a broken one included. ValueError for what is no message."""
        try:
            (length,) = _LENGTH.unpack(_read(self._socket, _LENGTH.size))
            if length > _LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes is no header")
            header = json.loads(_read(self._socket, length))
            arrays = {}
            for name, dtype, shape in header["arrays"]:
                if np.dtype(dtype).kind not in "biuf":
                    raise ValueError(f"array {name!r} is of {dtype}, which is not sent")
                arrays[name] = np.empty(shape, dtype)
                _fill(self._socket, _bytes(arrays[name]))
        except (EOFError, OSError):
            return None
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


def accept(listener: socket.socket, secret: str, deadline: float, *, kind: str = "rank") -> tuple[int, Connection]:
    """The next peer that knows the secret, and the rank it says it is; TimeoutError at the deadline (monotonic).

    Whoever does not know it is sent away, and the wait goes on. kind: what is numbered, a rank or a node.
    """
    while True:
        listener.settimeout(max(0.0, deadline - time.monotonic()) or 1e-3)
        peer, address = listener.accept()
        try:
            peer.settimeout(HANDSHAKE_SECONDS)
            own = secrets.token_bytes(_NONCE)
            peer.sendall(own)
            answer = _read(peer, _RANK.size + _NONCE + _PROOF)
            (rank,) = _RANK.unpack(answer[: _RANK.size])
            theirs, proof = answer[_RANK.size : -_PROOF], answer[-_PROOF:]
            if not hmac.compare_digest(proof, _proof(secret, f"{kind} follower", rank, own, theirs)):
                raise ValueError(f"it failed the secret check for {kind} {rank}")
            peer.sendall(_proof(secret, f"{kind} leader", rank, own, theirs))
            return rank, Connection(peer)
        except (OSError, EOFError, ValueError) as error:
            reason = str(error) or "it left without a word"
            logger.warning("a connection from %s:%d is refused: %s", *address[:2], reason)
            peer.close()


def connect(address: tuple[str, int], secret: str, rank: int, deadline: float, *, kind: str = "rank") -> Connection:
    """A connection to whoever listens there and knows the secret, tried until the deadline. OSError, ValueError."""
    while True:
        try:
            peer = socket.create_connection(address, timeout=HANDSHAKE_SECONDS)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    try:
        peer.settimeout(max(HANDSHAKE_SECONDS, deadline - time.monotonic()))
        theirs, own = _read(peer, _NONCE), secrets.token_bytes(_NONCE)
        peer.sendall(_RANK.pack(rank) + own + _proof(secret, f"{kind} follower", rank, theirs, own))
        if not hmac.compare_digest(_read(peer, _PROOF), _proof(secret, f"{kind} leader", rank, theirs, own)):
            raise ValueError(f"what listens on {address[0]}:{address[1]} does not know the secret: it is not {kind} 0")
        return Connection(peer)
    except EOFError:
        peer.close()
        raise ValueError(
            f"{address[0]}:{address[1]} sent {kind} {rank} away, which failed its secret check: the secrets differ"
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


def _read(source: socket.socket, count: int) -> bytes:
    buffer = bytearray(count)
    _fill(source, memoryview(buffer))
    return bytes(buffer)


def _fill(source: socket.socket, buffer: memoryview) -> None:
    """EOFError where the other end leaves in between."""
    while len(buffer):
        count = source.recv_into(buffer)
        if count == 0:
            raise EOFError
        buffer = buffer[count:]
