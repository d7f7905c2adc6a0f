"""Client of Elasticsearch, and what its failures mean for the person who set it up.

Used by the search backend (`elasticsearch_bm25.py`) and by `agent-r1 search index`
(`elasticsearch_build.py`). Credentials come from the environment, or from files that it names, so
that no configuration holds them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import elastic_transport
import elasticsearch
from elasticsearch import AsyncElasticsearch, Elasticsearch

from agent_r1.runtime.files.private import read_secret
from agent_r1.tools.search.config import check_elasticsearch_url

logger = logging.getLogger(__name__)

SERVER_MAJOR = 8
API_KEY_VARIABLE = "AGENT_R1_ELASTICSEARCH_API_KEY"
USER_VARIABLE = "AGENT_R1_ELASTICSEARCH_USER"
PASSWORD_VARIABLE = "AGENT_R1_ELASTICSEARCH_PASSWORD"
FILE_SUFFIX = "_FILE"
"""Suffix of a variable that names a file with the API key or the password instead."""
CREDENTIALS_REMEDY = f"set {API_KEY_VARIABLE}, or {USER_VARIABLE} and {PASSWORD_VARIABLE}"

_SHOWN_CHARS = 300


@dataclass(frozen=True)
class ElasticsearchServer:
    """Address of an Elasticsearch server, and the credentials for it."""

    url: str
    ca_certs: Path | None = None
    verify_certs: bool = True
    request_timeout_s: float = 10.0
    api_key: str | None = field(default=None, repr=False)
    basic_auth: tuple[str, str] | None = field(default=None, repr=False)

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str], *, url: str, **settings: Any
    ) -> ElasticsearchServer:
        """Take the credentials from environment variables, or from files that such variables name.

        None of them set means none needed.

        Raises:
            ValueError: the URL is wrong, a file is missing, or credentials are ambiguous.
        """
        check_elasticsearch_url(url)
        ca_certs: Path | None = settings.get("ca_certs")
        if ca_certs is not None and not ca_certs.is_file():
            raise ValueError(
                f"ca_certs ({str(ca_certs)!r}) is not a file; name the PEM file of the authority "
                "that signed the server's certificate"
            )
        api_key = _secret(environ, API_KEY_VARIABLE)
        user = environ.get(USER_VARIABLE) or None
        password = _secret(environ, PASSWORD_VARIABLE)
        if (user is None) != (password is None):
            missing = USER_VARIABLE if user is None else PASSWORD_VARIABLE
            raise ValueError(f"{missing} is not set, but its other half is; set both or neither")
        if api_key is not None and user is not None:
            raise ValueError(
                f"{API_KEY_VARIABLE} and {USER_VARIABLE} are both set; unset one of them"
            )
        basic_auth = None if user is None or password is None else (user, password)
        return cls(url=url, api_key=api_key, basic_auth=basic_auth, **settings)

    def client(self, **options: Any) -> Elasticsearch:
        """Return a blocking client, which the caller closes."""
        return Elasticsearch(**self._options(), **options)

    def async_client(self, **options: Any) -> AsyncElasticsearch:
        """Return an asynchronous client, which the caller closes."""
        return AsyncElasticsearch(**self._options(), **options)

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "hosts": [self.url],
            "request_timeout": self.request_timeout_s,
            "api_key": self.api_key,
            "basic_auth": self.basic_auth,
        }
        if self.url.startswith("https://"):
            options["verify_certs"] = self.verify_certs
            options["ssl_show_warn"] = False
            if self.ca_certs is not None:
                options["ca_certs"] = str(self.ca_certs)
            if not self.verify_certs:
                logger.warning("server certificate is not verified url=%s", self.url)
        return options


def _secret(environ: Mapping[str, str], variable: str) -> str | None:
    """Return a secret: of its variable, else of the file that the variable beside it names."""
    given, file = environ.get(variable), environ.get(variable + FILE_SUFFIX)
    if given or not file:
        return given or None
    return read_secret(Path(file), variable + FILE_SUFFIX, "name a file with the secret")


@contextmanager
def explained(server: ElasticsearchServer) -> Iterator[None]:
    """Turn the client's errors into errors that say what to do.

    Raises:
        ValueError: instead of any error of the client.
    """
    try:
        yield
    except (elasticsearch.ApiError, elastic_transport.TransportError) as exc:
        raise ValueError(explain(exc, server)) from exc


def explain(exc: Exception, server: ElasticsearchServer) -> str:
    """Say what an error of the client means and what to do about it."""
    url = server.url
    if isinstance(exc, elasticsearch.UnsupportedProductError):
        return (
            f"{url} answers, but is not Elasticsearch; set the URL to that of an Elasticsearch "
            f"{SERVER_MAJOR} server"
        )
    if isinstance(exc, elasticsearch.AuthenticationException):
        given = server.api_key is not None or server.basic_auth is not None
        problem = "refuses the credentials" if given else "wants credentials"
        return f"{url} {problem} (401); {CREDENTIALS_REMEDY} to valid ones"
    if isinstance(exc, elasticsearch.AuthorizationException):
        return (
            f"{url} forbids this to the given credentials (403): {reason_of(exc)}; serving needs "
            "the privileges `monitor` of the cluster and `read`, `view_index_metadata` of the "
            "index, making an index needs `manage` and `write` of it and of NAME-*"
        )
    if isinstance(exc, elastic_transport.TlsError):
        return (
            f"{url} cannot be reached over TLS: {exc.message}; set ca_certs to the authority that "
            "signed the server's certificate, or use http:// if the server has no TLS"
        )
    if isinstance(exc, elastic_transport.ConnectionTimeout):
        return (
            f"{url} did not answer within {server.request_timeout_s:g} s; check that the server "
            "is up and not overloaded, or raise request_timeout_s"
        )
    if isinstance(exc, elastic_transport.ConnectionError):
        return (
            f"{url} cannot be reached: {exc.message[:_SHOWN_CHARS]}; check host and port, http or "
            "https, and that the server runs"
        )
    if isinstance(exc, elasticsearch.ApiError):
        return f"{url} answers {exc.status_code}: {reason_of(exc)}"
    if isinstance(exc, elastic_transport.SerializationError):
        return f"{url} answers, but not with JSON; check that this is an Elasticsearch server"
    return f"{url}: {type(exc).__name__}: {exc}"


def reason_of(exc: elasticsearch.ApiError) -> str:
    """Return the server's own words about an error."""
    body = exc.body
    if isinstance(body, dict) and "error" in body:
        return reason_in(body["error"])
    return str(body or exc.message)[:_SHOWN_CHARS]


def reason_in(error: Any) -> str:
    """Return the type and the reason in an `error` object of an answer."""
    if not isinstance(error, dict):
        return str(error)[:_SHOWN_CHARS]
    causes = error.get("root_cause") or [error]
    inner = causes[0] if isinstance(causes[0], dict) else error
    return f"{inner.get('type')}: {inner.get('reason')}"[:_SHOWN_CHARS]


def check_server(client: Elasticsearch, server: ElasticsearchServer) -> None:
    """Check that an Elasticsearch of the right version answers.

    Raises:
        ValueError: it does not; the text says what to do.
    """
    with explained(server):
        info = client.info()
        number = str(info.get("version", {}).get("number", "unknown"))
    if number.split(".")[0] != str(SERVER_MAJOR):
        raise ValueError(
            f"{server.url} is Elasticsearch {number}, and version {SERVER_MAJOR} is needed; use "
            f"a server of major version {SERVER_MAJOR} (tested with 8.19)"
        )
