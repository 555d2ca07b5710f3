"""Which launcher a command asks for, with its settings, checked before anything starts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from lit_memory.plan.errors import ConfigError
from lit_memory.run.launchers.base import Launcher
from lit_memory.run.launchers.remote import check_shared
from lit_memory.run.options import Options
from lit_memory.run.uri import StoreURI
from lit_memory.util.checks import nearest
from lit_memory.util.names import load

LAUNCHERS = {
    "local": "lit_memory.run.launchers.local:LocalLauncher",
    "slurm": "lit_memory.run.launchers.slurm:SlurmLauncher",
    "ray": "lit_memory.run.launchers.ray:RayLauncher",
}
PACKAGES = {"slurm": "submitit", "ray": "ray"}
"""Launcher -> the package that its extra, of its own name, installs."""


def settings_of(options: Options) -> dict[str, Any]:
    """The launcher's part of the file of ``--launch``. Raises ConfigError."""
    if options.launch is None:
        return {}
    path = Path(options.launch)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = str(getattr(error, "strerror", None) or error).splitlines()[0]
        raise ConfigError(str(path), "", f"{reason}; expected a YAML file like 'slurm: {{partition: gpu}}'") from None
    if not isinstance(content, Mapping) or not all(isinstance(part, Mapping) for part in content.values()):
        raise ConfigError(str(path), "", "expected launchers with their settings, like 'slurm: {partition: gpu}'")
    for name in content:
        if name not in PACKAGES:
            raise ConfigError(str(path), str(name), f"unknown launcher; {nearest(str(name), list(PACKAGES))}")
    if options.launcher not in content:
        raise ConfigError(str(path), "", f"has no settings for --launcher {options.launcher}; expected such a part")
    return dict(content[options.launcher])


@dataclass(frozen=True)
class Choice:
    """A launcher and its settings, checked."""

    name: str = "local"
    settings: Mapping[str, Any] = field(default_factory=dict)
    detach: bool = False
    """Whether runs go on without the command."""

    @classmethod
    def of(cls, options: Options, root: Path, uri: StoreURI) -> "Choice":
        """The launcher that a command asks for. Raises ConfigError for one that cannot be used."""
        name = options.launcher
        if name not in LAUNCHERS:
            raise ConfigError("command line", "--launcher", f"{name}: unknown; {nearest(name, list(LAUNCHERS))}")
        settings = settings_of(options)
        if name == "local":
            for flag in ("detach", "cancel"):
                if getattr(options, flag):
                    advice = "use nohup or tmux, or --launcher slurm or ray"
                    message = f"runs of this machine end with their command; {advice}"
                    raise ConfigError("command line", f"--{flag}", message)
            return cls(name, settings)
        if options.detach and options.jobs:
            message = "nobody is left to count them; limit them in the cluster (slurm_array_parallelism, num_cpus)"
            raise ConfigError("command line", "--jobs", f"--detach: {message}")
        if find_spec(PACKAGES[name]) is None:
            install = f"pip install 'lit-memory[{name}]'"
            raise ConfigError("command line", "--launcher", f"{name}: needs the package {PACKAGES[name]}; {install}")
        check_shared(root, uri, "--launcher")
        load(LAUNCHERS[name]).check(settings, options.launch or "command line", options.detach)
        return cls(name, settings, options.detach)

    @property
    def local(self) -> bool:
        """Whether runs are processes of this machine."""
        return self.name == "local"

    def launcher(self, *arguments: Any) -> Launcher:
        """The launcher of some runs. arguments: as in ``Launcher``."""
        launcher = load(LAUNCHERS[self.name])
        if self.local:
            return launcher(*arguments)
        return launcher(*arguments, settings=self.settings, detach=self.detach)


LOCAL = Choice()
