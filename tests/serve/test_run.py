"""What a start of the service refuses before it loads anything."""

from __future__ import annotations

import socket

import pytest

from msds.errors import OptionError
from msds_serve.run import serve


def test_an_address_that_cannot_be_had_is_refused_at_once() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(OptionError, match=rf"host 127.0.0.1 with port {port} cannot be served on: .*in use"):
            serve("no such folder", host="127.0.0.1", port=port, engine={}, service={"model_names": ("tiny",)})
    with pytest.raises(OptionError, match=r"host nowhere.invalid with port 8000 cannot be served on"):
        serve("no such folder", host="nowhere.invalid", port=8000, engine={}, service={"model_names": ("tiny",)})
