"""The URI of the tracking store, read once, and shown without its secrets. Imports neither MLflow nor SQLAlchemy.

Whatever is printed, logged or tagged has the shown form: ``str``, ``repr`` and f-strings of a ``StoreURI`` give it.
"""

import os
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from unicodedata import category
from urllib.parse import unquote, unquote_plus, urlsplit

from lit_memory.plan.errors import ConfigError
from lit_memory.util.checks import nearest
from lit_memory.util.files import chain

VARIABLE = "MLFLOW_TRACKING_URI"
SCHEMES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql", "databricks")
"""Stores that MLflow 3 can write to. It refuses its old folders of text files."""
HIDDEN = "***"
USERINFO = re.compile(r"([^:/@]*)(?::([^@]*))?@")
"""User and password in front of a host, as SQLAlchemy reads them: up to the first "@"."""
SETTING = re.compile(r"(?<=[?&])([^=&]*=)([^&]+)")
"""A setting behind the "?" of a URI: its name with the "=", its value."""
SECRET = re.compile(r"pass|pwd|token|secret|key|auth|cred|sig|odbc_connect", re.IGNORECASE)
"""What the names of secret settings contain."""
INNER = re.compile(r"(?:pwd|pass\w*)=([^;&]+)", re.IGNORECASE)
"""A password inside such a value: ``odbc_connect=DRIVER=...;PWD=...``."""


@dataclass(frozen=True)
class StoreURI:
    """A tracking URI. Every text makes one; ``check`` tells what is wrong with it."""

    text: str = field(repr=False)
    """As it was given, with its secrets. "" is the default, a database below the root."""

    @classmethod
    def of_environment(cls) -> "StoreURI":
        """``MLFLOW_TRACKING_URI``."""
        return cls(os.environ.get(VARIABLE) or "")

    def __str__(self) -> str:
        return self.shown

    def __repr__(self) -> str:
        return f"StoreURI({self.shown!r})"

    @cached_property
    def scheme(self) -> str:
        """Kind of the store: postgresql for ``postgresql+psycopg2://...``; the whole text where it has no "://"."""
        scheme, colon, _ = self.text.partition("://")
        return scheme.partition("+")[0].lower() if colon else self.text

    @property
    def is_server(self) -> bool:
        """Whether MLflow asks a server over HTTP."""
        return self.scheme in ("http", "https")

    @property
    def viewer(self) -> str:
        """How to look at the store in a browser: the address of a server, or the command that starts one."""
        return self.shown if self.is_server else f"mlflow ui --backend-store-uri {self.shown}"

    def page(self, experiment_id: str) -> str:
        """The address of an experiment's runs in MLflow's pages; without a server, where ``mlflow ui`` shows it. What
        it does not name is what MLflow showed last, at first its view of language agents."""
        home = self.shown.rstrip("/") if self.is_server else "http://127.0.0.1:5000"
        return f"{home}/#/experiments/{experiment_id}/runs?workflowType=machine_learning"

    @property
    def endpoint(self) -> tuple[str, int] | None:
        """Host and port of a database whose URI names one host; None for another store. Its settings may name another
        host, or a socket."""
        if (port := {"postgresql": 5432, "mysql": 3306}.get(self.scheme)) is None:
            return None
        parts = urlsplit(f"//{self._parts[3]}")
        if not parts.hostname or "," in parts.netloc or re.search("host|socket|service", parts.query):
            return None
        return parts.hostname, parts.port or port

    @cached_property
    def file(self) -> Path | None:
        """The file of an SQLite database; None for another store, for the default, and for a ``file:`` URI of
        SQLite's own, which is SQLite's to read."""
        name, _, settings = self.text.partition(":///")[2].partition("?")
        return Path(unquote(name)) if self.scheme == "sqlite" and "uri=true" not in settings else None

    @cached_property
    def _parts(self) -> tuple[str, str, str | None, str]:
        """What is in front of the user, user and password as they are written, and what follows them.

        A password with an unescaped "@" reaches to the last one in front of the settings.
        """
        scheme, colon, rest = self.text.partition("://")
        found = USERINFO.match(rest if colon else self.text)
        if found is None:
            return scheme + colon, "", None, rest
        start = len(scheme + colon) if colon else 0
        end = start + found.end()
        end = max(end, self.text.partition("?")[0].rfind("@") + 1)
        user, _, password = self.text[start : end - 1].partition(":")
        return self.text[:start], user, password if ":" in self.text[start:end] else None, self.text[end:]

    @cached_property
    def shown(self) -> str:
        """The URI with ``***`` in place of its secrets. The user of a database is none; that of a server alone, without
        a password, is a token."""
        before, user, password, rest = self._parts
        if self.is_server:
            rest = re.sub(r"(?s)[?#].+", f"?{HIDDEN}", rest)
        rest = SETTING.sub(lambda found: found[1] + HIDDEN if SECRET.search(unquote_plus(found[0])) else found[0], rest)
        if not user and password is None:
            return before + rest
        if password is None:
            return f"{before}{HIDDEN if self.is_server else user}@{rest}"
        return f"{before}{user}:{HIDDEN}@{rest}"

    @cached_property
    def secrets(self) -> list[str]:
        """What is hidden, as it is written and as it is meant, the longest first."""
        *_, password, rest = self._parts
        found = {password or "", unquote(password or "")}
        for setting in SETTING.finditer(rest):
            if SECRET.search(unquote_plus(setting[0])):
                meant = unquote_plus(setting[2])
                found |= {setting[2], meant, *INNER.findall(meant)}
        return sorted(found - {""}, key=len, reverse=True)

    def hide(self, text: str) -> str:
        """``text`` without the secrets of this URI.

        One that the shown URI contains anyway, as a password that is the user's name, is hidden in its place alone.
        """
        if self.text:
            text = text.replace(self.text, self.shown)
        for secret in self.secrets:
            word = rf"(?<!\w){re.escape(secret)}(?!\w)"
            text = text.replace(f":{secret}@", f":{HIDDEN}@")
            if not re.search(word, self.shown):
                text = re.sub(word, HIDDEN, text)
        return text

    def clean(self, error: BaseException) -> None:
        """Take the secrets out of the messages of an error and its causes, so that a traceback has none."""
        for cause in chain(error):
            cause.args = tuple(self.hide(part) if isinstance(part, str) else part for part in cause.args)

    @property
    def address(self) -> str:
        """What MLflow gets: of a server without user and password, which it takes from the environment
        (``give_credentials``) and so cannot quote."""
        before, _, _, rest = self._parts
        return before + rest if self.is_server else self.text

    def give_credentials(self) -> None:
        """Put the user and the password of a server where MLflow reads them. They replace what is there, as they do in
        a URI that requests gets."""
        _, user, password, _ = self._parts
        if self.is_server and password is not None:
            os.environ |= {"MLFLOW_TRACKING_USERNAME": unquote(user), "MLFLOW_TRACKING_PASSWORD": unquote(password)}

    def check(self) -> None:
        """Raise ConfigError for a URI that MLflow cannot use. Looks at the text alone."""
        if not self.text:
            return
        if self.scheme not in SCHEMES:
            raise self.error(f"expected sqlite:///FILE or http://HOST:PORT; {nearest(self.scheme, SCHEMES)}")
        strange = [
            c for c in self.text if category(c) == "Cc" or (self.is_server and (c == " " or not c.isprintable()))
        ]
        if strange:
            raise self.error(f"expected no {strange[0]!a} in it; percent-encode it or take it out")
        if self.file is None:
            self._check_user()
            self._check_host()

    def _check_user(self) -> None:
        """Raise ConfigError for a user or a password that libraries would not read as they are meant."""
        _, user, password, _ = self._parts
        wrong = "/?#@" if self.is_server else "@"
        if found := [c for c in f"{user}{password or ''}" if c in wrong]:
            raise self.error(f"expected %{ord(found[0]):02X} for {found[0]!r} in a user, a password or a path")
        if self.is_server and (user or password is not None) and not (user and password):
            raise self.error(f"expected {self.scheme}://USER:PASSWORD@HOST:PORT; a token goes to MLFLOW_TRACKING_TOKEN")

    def _check_host(self) -> None:
        """Raise ConfigError for a host or a port that cannot be one."""
        try:
            parts = urlsplit(f"//{self._parts[3]}")
        except ValueError:
            raise self.error("its host cannot be read; expected HOST:PORT, or [IPV6]:PORT") from None
        if self.is_server and not parts.hostname:
            raise self.error(f"names no host; expected {self.scheme}://HOST:PORT")
        if self.is_server and set(self.text) & set("?#"):
            raise self.error(f"expected {self.scheme}://HOST:PORT/PATH and nothing behind it, no '?' and no '#'")
        try:
            valid = "," in parts.netloc or parts.port is None or parts.port > 0
        except ValueError:
            valid = False
        if not valid:
            raise self.error("its port cannot be one; expected a number from 1 to 65535")

    def error(self, message: str) -> ConfigError:
        """What is wrong with this URI, in one line."""
        return ConfigError(VARIABLE, "", f"{self.shown!r}: {message}")
