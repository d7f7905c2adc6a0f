"""The parts around Elasticsearch that need no server: credentials, names, messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1.tools.search import elasticsearch_index
from agent_r1.tools.search.elasticsearch_bm25 import missing_part
from agent_r1.tools.search.elasticsearch_client import ElasticsearchServer, reason_in
from agent_r1.tools.search.elasticsearch_index import (
    check_name,
    concrete_name,
    fingerprint_of,
    is_version_of,
)

URL = "https://es:9200"


def test_credentials_are_in_no_representation_of_a_server():
    key = ElasticsearchServer.from_environment(
        {"AGENT_R1_ELASTICSEARCH_API_KEY": "s3cret"}, url=URL
    )
    user = ElasticsearchServer.from_environment(
        {"AGENT_R1_ELASTICSEARCH_USER": "elastic", "AGENT_R1_ELASTICSEARCH_PASSWORD": "s3cret"},
        url=URL,
    )
    assert key.api_key == "s3cret"
    assert user.basic_auth == ("elastic", "s3cret")
    assert "s3cret" not in repr(key) + repr(user)


def test_credentials_may_be_in_files_that_variables_name(tmp_path: Path):
    file = tmp_path / "secret"
    file.write_text("s3cret\n")
    user = ElasticsearchServer.from_environment(
        {
            "AGENT_R1_ELASTICSEARCH_USER": "elastic",
            "AGENT_R1_ELASTICSEARCH_PASSWORD_FILE": str(file),
        },
        url=URL,
    )
    assert user.basic_auth == ("elastic", "s3cret")
    key = ElasticsearchServer.from_environment(
        {"AGENT_R1_ELASTICSEARCH_API_KEY_FILE": str(file)}, url=URL
    )
    assert key.api_key == "s3cret"


def test_a_file_of_credentials_that_cannot_be_read_is_named(tmp_path: Path):
    variable = "AGENT_R1_ELASTICSEARCH_API_KEY_FILE"
    with pytest.raises(ValueError, match=rf"{variable} \(.*gone\) cannot be read: No such file"):
        ElasticsearchServer.from_environment({variable: str(tmp_path / "gone")}, url=URL)


def test_an_empty_variable_is_an_unset_one():
    server = ElasticsearchServer.from_environment({"AGENT_R1_ELASTICSEARCH_API_KEY": ""}, url=URL)
    assert (server.api_key, server.basic_auth) == (None, None)


def test_a_url_with_a_password_is_refused_without_repeating_it():
    with pytest.raises(ValueError, match="AGENT_R1_ELASTICSEARCH_USER") as caught:
        ElasticsearchServer.from_environment({}, url="https://elastic:s3cret@es:9200")
    assert "s3cret" not in str(caught.value)


def test_only_versions_of_a_name_are_taken_for_them():
    version = concrete_name("wiki", "0123456789abcdef0123456789abcdef")
    assert version == "wiki-0123456789abcdef"
    assert is_version_of("wiki", version)
    # A user's own index beside it is never deleted.
    for other in ("wiki", "wiki-backup", "wiki-0123456789abcde", f"my-{version}", f"{version}-old"):
        assert not is_version_of("wiki", other)
    assert not is_version_of("w.ki", version)  # the dot is no pattern


@pytest.mark.parametrize("name", ["", "Wiki", "-wiki", "wiki*", "wi ki", "a" * 201])
def test_names_elasticsearch_would_refuse_are_refused_first(name: str):
    with pytest.raises(ValueError, match="choose another name"):
        check_name(name)


def test_the_fingerprint_names_corpus_and_settings(monkeypatch: pytest.MonkeyPatch):
    first = fingerprint_of("abc")
    assert first == fingerprint_of("abc")
    assert first != fingerprint_of("abd")
    monkeypatch.setattr(elasticsearch_index, "SETTINGS_HASH", "other")
    assert first != fingerprint_of("abc")


def test_the_reason_of_an_error_is_that_of_its_root():
    error = {
        "type": "search_phase_execution_exception",
        "reason": "all shards failed",
        "root_cause": [{"type": "illegal_state", "reason": "shard is closed"}],
    }
    assert reason_in(error) == "illegal_state: shard is closed"
    assert reason_in({"type": "t", "reason": "r", "root_cause": []}) == "t: r"
    assert reason_in("no handler found") == "no handler found"


def test_a_search_that_ended_early_is_partial():
    whole = {"_shards": {"total": 1, "failed": 0}, "timed_out": False}
    assert missing_part(whole) is None
    assert missing_part(whole | {"timed_out": True}) == "the search ended early (timed_out)"


def test_a_missing_certificate_file_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"ca_certs .*ca\.pem.* is not a file; name the PEM file"):
        ElasticsearchServer.from_environment({}, url=URL, ca_certs=tmp_path / "ca.pem")
