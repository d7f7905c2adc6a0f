"""The run token: where it comes from, and that nothing shows it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from agent_r1.runtime.config import RunConfig
from agent_r1.runtime.http.token import RunToken, find_token, token_headers, write_token

TOKEN = "0123456789abcdef"
OTHER = "fedcba9876543210"


def run_with(file: Path, text: str) -> RunConfig:
    file.write_text(text)
    return RunConfig(token_file=file)


def test_the_file_holds_it_or_the_variable(tmp_path: Path):
    run = run_with(tmp_path / "token", f"{TOKEN}\n")
    assert find_token(run, {}) == RunToken(TOKEN)
    assert find_token(RunConfig(), {"AGENT_R1_TOKEN": TOKEN}) == RunToken(TOKEN)
    assert find_token(run, {"AGENT_R1_TOKEN": OTHER}) == RunToken(OTHER)
    assert find_token(RunConfig(), {}) is None


@pytest.mark.parametrize("text", ["", "short", "x" * 513, f"{TOKEN}\n{OTHER}", "ÄÖÜ" + TOKEN])
def test_what_is_no_token_is_refused_without_showing_it(tmp_path: Path, text: str):
    run = run_with(tmp_path / "token", text)
    rule = "16 to 512 letters"
    with pytest.raises(ValueError, match=rf"run.token_file \(.*\).*{rule}") as of_file:
        find_token(run, {})
    with pytest.raises(ValueError, match=f"AGENT_R1_TOKEN.*{rule}") as of_variable:
        find_token(run, {"AGENT_R1_TOKEN": text})
    for refusal in (of_file, of_variable):
        assert not text or text not in str(refusal.value)


def test_a_missing_file_is_named(tmp_path: Path):
    run = RunConfig(token_file=tmp_path / "none")
    with pytest.raises(ValueError, match=r"none\) cannot be read: No such file"):
        find_token(run, {})


def test_the_value_is_in_no_repr():
    token = RunToken(TOKEN)
    assert TOKEN not in repr(token)
    assert TOKEN not in f"{token} {[token]}"
    assert token_headers(token) == {"authorization": f"Bearer {TOKEN}"}
    assert token_headers(None) == {}


def test_a_token_is_made_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AGENT_R1_TOKEN", raising=False)
    made = set()
    for name in "abc":
        write_token(RunConfig(), tmp_path / name)
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
        token = find_token(RunConfig(token_file=tmp_path / name), {})
        assert token is not None
        made.add(token.value)
    assert len(made) == 3
    assert all(len(value) == 43 for value in made)  # 32 random bytes in base64


def test_a_given_token_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AGENT_R1_TOKEN", raising=False)
    write_token(run_with(tmp_path / "mine", TOKEN), tmp_path / "token")
    assert (tmp_path / "token").read_text() == f"{TOKEN}\n"
