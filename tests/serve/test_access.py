"""Who may use a service: API keys and where they come from, web origins."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import requests

from msds.errors import OptionError
from msds_serve.api_keys import accepted_keys
from msds_serve.cli import main
from msds_serve.service import ServiceOptions
from tests.serve.conftest import Rigged

Rig = Callable[..., Rigged]
ORIGIN = "https://chat.example.org"


def test_keys_from_everywhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\n  one\n\ntwo\n")
    file.chmod(0o600)
    assert accepted_keys(["zero", "one"], str(file), "three") == ("zero", "one", "two", "three")
    assert accepted_keys([], None, "") == ()
    assert not caplog.records
    file.chmod(0o644)
    accepted_keys([], str(file), None)
    assert "chmod o-r" in caplog.text


def test_key_files_that_hold_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").write_text("# none yet\n")
    for name, named in (("empty", "holds no key"), ("absent", "cannot be read")):
        assert main(["serve", str(tmp_path), "--api-key-file", str(tmp_path / name)]) == 2
        assert named in capsys.readouterr().err


def test_the_command_reads_file_and_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = {}
    monkeypatch.setattr("msds_serve.run.serve", lambda path, **options: seen.update(options["service"]))
    monkeypatch.setitem(os.environ, "MSDS_API_KEY", "env")
    (tmp_path / "keys").write_text("file")
    arguments = ["--api-key-file", str(tmp_path / "keys"), "--cors-origin", ORIGIN, "--cors-origin", "*"]
    assert main(["serve", "model", *arguments]) == 0
    assert seen["api_keys"] == ("file", "env")
    assert seen["cors_origins"] == (ORIGIN, "*")


@pytest.mark.parametrize("key", ["schlüssel", "two words", "tab\t", ""])
def test_keys_that_no_client_can_send(key: str) -> None:
    with pytest.raises(OptionError, match="API key"):
        ServiceOptions(model_names=("m",), api_keys=("good", key))


def test_keys_are_asked_for(rig: Rig) -> None:
    url = rig(api_keys=("one", "two")).url
    for key, status in (("two", 200), ("three", 401), ("", 401), ("\xff", 401)):
        headers = {"Authorization": f"Bearer {key}".encode("latin-1")}
        assert requests.get(f"{url}/v1/models", headers=headers, timeout=20).status_code == status
    assert requests.get(f"{url}/health", timeout=20).status_code == 200


def test_pages_of_no_origin_are_served_by_default(rig: Rig) -> None:
    answer = requests.get(f"{rig().url}/v1/models", headers={"Origin": ORIGIN}, timeout=20)
    assert "access-control-allow-origin" not in answer.headers
    assert requests.options(f"{rig().url}/v1/models", headers={"Origin": ORIGIN}, timeout=20).status_code == 405


def test_pages_of_a_named_origin_may_call(rig: Rig) -> None:
    url = rig(cors_origins=(ORIGIN,), api_keys=("one",)).url + "/v1/chat/completions"
    preflight = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    asked = preflight | {"Access-Control-Request-Headers": "authorization, content-type, x-stainless-lang"}
    answer = requests.options(url, headers=asked, timeout=20)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    headers = {"Origin": ORIGIN, "Authorization": "Bearer one"}
    answer = requests.post(url, json=body, headers=headers, timeout=20)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    other = requests.options(url, headers=preflight | {"Origin": "https://evil.example"}, timeout=20)
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("origin", ["chat.example.org", "https://a.b/", "https://a.b/c", "https://*.b", "", "null"])
def test_origins_that_are_none(origin: str) -> None:
    with pytest.raises(OptionError, match="cors_origin"):
        ServiceOptions(model_names=("m",), cors_origins=(origin,))
