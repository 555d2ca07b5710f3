"""Whether a server of MLflow answers, asked as MLflow will ask it: MLflow itself would try for minutes, and believe
whatever comes."""

import os
import socket
import threading
import warnings
from collections.abc import Callable
from http.client import HTTPException
from ssl import SSLCertVerificationError
from typing import Any

from lit_memory.plan.errors import ConfigError
from lit_memory.run.uri import VARIABLE, StoreURI
from lit_memory.util.files import chain, os_reason

TIMEOUT = 5.0
"""Seconds that a server has for its whole first answer."""
LONGEST = 10_000_000
"""Bytes of that answer, which MLflow would hold in memory: one experiment has a few hundred."""
FIRST_CALL = "/api/2.0/mlflow/experiments/search"
"""What MLflow asks first."""


def check_server(uri: StoreURI) -> None:
    """Raise ConfigError if nothing answers at the URI of a server, or what answers over HTTP is broken. Files pass.

    An answer such as 401 or 404 comes from a living server; MLflow has the user and the password. Proxies, redirects
    and certificates are those of the environment, as for MLflow. Of a database only the port is asked.
    """
    if not uri.is_server and not uri.endpoint:
        return
    from requests import RequestException

    status, reason = 0, ""
    try:
        if uri.is_server:
            status, reason = within(TIMEOUT, lambda: first_answer(uri.address))
        elif endpoint := uri.endpoint:
            within(TIMEOUT, lambda: socket.create_connection(endpoint, TIMEOUT).close())
    except (RequestException, OSError, ValueError) as error:
        raise ConfigError(VARIABLE, "", f"{uri}: {trouble(uri, error)}") from None
    if status >= 500:
        raise ConfigError(VARIABLE, "", f"{uri}: the server answers {status} {reason}; expected an MLflow server")


def first_answer(address: str) -> tuple[int, str]:
    """Status and reason of the answer to MLflow's first call, which is read to its end. Raises what requests does, and
    ValueError for an answer that is too long."""
    import requests

    insecure = os.environ.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() in ("true", "1")
    settings: dict[str, Any] = {
        "verify": os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH") or not insecure,
        "cert": os.environ.get("MLFLOW_TRACKING_CLIENT_CERT_PATH"),
        "timeout": TIMEOUT,
        "stream": True,
    }
    url, size = f"{address.removesuffix('/')}{FIRST_CALL}", 0
    with warnings.catch_warnings(), requests.Session() as session:
        warnings.simplefilter("ignore")  # of urllib3, that nobody checks the certificate: MLflow says it
        with session.post(url, json={"max_results": 1}, **settings) as response:
            for piece in response.iter_content(2**16):
                size += len(piece)
                if size > LONGEST:
                    raise ValueError(f"its answer has more than {LONGEST:,} bytes")
            return response.status_code, response.reason


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """The result of ``work``, or what it raises; TimeoutError if it takes longer. The limits of sockets are for single
    bytes, and a name server has none."""
    results: list[Any] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:  # raised below, in the thread that asked
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError("timed out")
    return results[0]


def trouble(uri: StoreURI, error: Exception) -> str:
    """What is wrong with a server after ``error``, and what to do."""
    causes = list(chain(error))
    spoken = (cause for cause in causes if isinstance(cause, HTTPException) and not isinstance(cause, OSError))
    cause = next(spoken, causes[-1])
    why = os_reason(cause) or type(cause).__name__
    if isinstance(cause, SSLCertVerificationError):
        advice = "set MLFLOW_TRACKING_SERVER_CERT_PATH or REQUESTS_CA_BUNDLE to a .pem file with it or its authority"
        return f"the server's certificate is not trusted ({cause.verify_message}); {advice}"
    if isinstance(cause, HTTPException) and not isinstance(cause, OSError):
        return f"what answers speaks no HTTP ({type(cause).__name__}: {why[:100]}); expected an MLflow server"
    what = "one with `mlflow server`" if uri.is_server else "it"
    return f"no server answers ({why}); start {what} or unset the variable"
