"""`[redis]`: the URL to connect to, and the secrets that never stand in the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from redis.asyncio.connection import parse_url

from agent_r1.runtime.config import RedisConfig, hide_password, split_password

PASSWORD = "p@ss/w:rd?#%"


@pytest.mark.parametrize(
    ("url", "username", "host"),
    [
        ("redis://h:1/2", None, "h"),
        ("rediss://me@h:1/2", "me", "h"),
        ("unix:///run/redis.sock?db=2", None, None),
        ("redis://[::1]:1/2", None, "::1"),
    ],
)
@pytest.mark.parametrize("source", ["file", "variable"])
def test_the_password_comes_from_a_file_or_a_variable(
    url: str, username: str | None, host: str | None, source: str, tmp_path: Path
):
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n")
    by_file = source == "file"
    config = RedisConfig(url=url, password_file=file if by_file else None)
    found = config.connection_url({} if by_file else {"AGENT_R1_REDIS_PASSWORD": PASSWORD})
    parsed: dict[str, Any] = {**parse_url(found)}
    assert parsed["password"] == PASSWORD
    assert parsed.get("username") == username
    assert parsed.get("host") == host
    assert parsed["db"] == 2
    assert config.url == url
    assert "***" in hide_password(found)


def test_a_password_in_the_url_is_kept():
    # The Redis that a run starts for itself, on a machine with the variable of another.
    config = RedisConfig(url="redis://:own@h:1/0")
    assert config.connection_url({"AGENT_R1_REDIS_PASSWORD": PASSWORD}) == config.url
    assert RedisConfig(url="redis://h:1/0").connection_url({}) == "redis://h:1/0"


def test_the_certificates_go_with_the_url(tmp_path: Path):
    file = tmp_path / "the ca.pem"
    config = RedisConfig(url="rediss://h:1/0", ca_file=file)
    with pytest.raises(ValueError, match=r"redis.ca_file \(.*the ca.pem\) is not a file"):
        config.connection_url({})
    file.touch()
    parsed: dict[str, Any] = {**parse_url(config.connection_url({}))}
    assert parsed["ssl_ca_certs"] == str(file)


def test_a_missing_password_file_is_named(tmp_path: Path):
    config = RedisConfig(url="redis://h:1/0", password_file=tmp_path / "none")
    with pytest.raises(ValueError, match=r"redis.password_file \(.*none\) cannot be read: No such"):
        config.connection_url({})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"password_file": "p"}, "redis.password_file .* is not set"),
        ({"url": "redis://:own@h", "password_file": "p"}, "holds a password itself"),
        ({"url": "redis://h", "ca_file": "c"}, "redis.ca_file .* starts with rediss://"),
        ({"url": "http://:hunter2@h"}, r"'http://:\*\*\*@h'\) must start with"),
        ({"url": "redis://:hunter2/x@h:1"}, "percent-encoded"),
    ],
)
def test_what_does_not_fit_is_refused_without_the_password(values: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message) as caught:
        RedisConfig.model_validate(values)
    said = caught.value.errors()[0]["msg"]  # type: ignore[attr-defined] - what is shown of it
    assert "hunter2" not in said


@pytest.mark.parametrize("password", ["pw", "p/w", "p@w", "p:w"])
def test_no_part_of_a_password_is_shown(password: str):
    assert hide_password(f"redis://me:{password}@h:1/0") == "redis://me:***@h:1/0"


@pytest.mark.parametrize(
    ("url", "bare", "password"),
    [
        ("redis://h:1/0", "redis://h:1/0", None),
        ("redis://me@h/0", "redis://me@h/0", None),
        ("redis://:a%40b%2Fc@h:1/0", "redis://h:1/0", "a@b/c"),
        ("rediss://me:pw@h:1/0?x=1", "rediss://me@h:1/0?x=1", "pw"),
        ("unix://me:pw@/run/redis.sock", "unix://me@/run/redis.sock", "pw"),
    ],
)
def test_a_url_without_its_password_leads_to_the_same_place(
    url: str, bare: str, password: str | None, tmp_path: Path
):
    assert split_password(url) == (bare, password)
    if password is not None:
        (tmp_path / "password").write_text(password)
        again = RedisConfig(url=bare, password_file=tmp_path / "password")
        assert again.connection_url({}) == url
