"""MLflow's system metrics: what the machine does while a run computes, if ``MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING`` is
set, as for MLflow's own runs.

MLflow's monitor writes to the store by itself. Here its measurements go into the journal like everything else, so that
a store that is away, or that another process writes to by now, does no harm.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from lit_memory.plan.errors import ConfigError
from lit_memory.plan.runspec import RunSpec
from lit_memory.run.journal import Journal
from lit_memory.util.provenance import gpus

ENABLE = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"
INTERVAL = "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL"
SECONDS = 10.0
"""Between two samples, as MLflow's default is."""
TAG = "system_metrics"
"""Of the runs that are measured: the seconds between two samples."""
VALUES = {"": False, "0": False, "false": False, "1": True, "true": True}
PACKAGES = {"psutil": "psutil", "pynvml": "nvidia-ml-py"}
"""What MLflow imports to measure a machine, and its GPU -> what one installs."""


def requested(specs: Sequence[RunSpec], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Tags of runs whose system metrics are logged; {} where nobody asks for them. Raises ConfigError for a variable
    that makes no sense and for packages that are missing."""
    text = environment.get(ENABLE, "").lower()
    if text not in VALUES:
        raise ConfigError(ENABLE, "", f"{environment[ENABLE]!r}: expected true or false")
    if not VALUES[text]:
        return {}
    needed = ["psutil", *(["pynvml"] if any(map(on_gpu, specs)) else [])]
    for name in needed:
        if find_spec(name) is None:
            install = f"pip install {PACKAGES[name]}, or unset {ENABLE}"
            raise ConfigError(ENABLE, "", f"MLflow's system metrics need the package {PACKAGES[name]}; {install}")
    return {TAG: f"{interval(environment):g}"}


def interval(environment: Mapping[str, str]) -> float:
    """Seconds between two samples. Raises ConfigError."""
    text = environment.get(INTERVAL) or str(SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(INTERVAL, "", f"{text!r}: expected a number of seconds above 0")
    return seconds


def on_gpu(spec: RunSpec) -> bool:
    """Whether a run computes on a GPU."""
    return spec.train["accelerator"] != "cpu" and gpus() > 0


class SystemMetrics:
    """Logs samples of the machine as ``system/*``, with the seconds since the run began as their step."""

    def __init__(self, journal: Journal, seconds: float, monitors: Sequence[Any]) -> None:
        """seconds: between two samples. monitors: MLflow's, of ``tracking.monitors``."""
        self.journal, self.seconds, self.monitors = journal, seconds, monitors
        self.sampled = time.monotonic()

    def sample(self) -> None:
        """Log a sample."""
        self.sampled, found = time.monotonic(), dict[str, float]()
        for monitor in self.monitors:
            monitor.collect_metrics()
            found |= {f"system/{name}": float(value) for name, value in monitor.aggregate_metrics().items()}
            monitor.clear_metrics()
        self.journal.log(found, int(time.time() - self.journal.began))

    def before(self, check: Callable[[], None]) -> Callable[[], None]:
        """``check``, which is called before every batch, with a sample wherever one is due."""

        def checked() -> None:
            check()
            if time.monotonic() - self.sampled >= self.seconds:
                self.sample()

        return checked
