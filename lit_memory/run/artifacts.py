"""The files that belong to the runs of a store. Does not import MLflow; ``tracking.Tracker`` gives it the client."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lit_memory.run import database
from lit_memory.util import files

NOT_STORED = "lit.artifacts"
"""Tag of a run of which a file could not be stored."""


class Artifacts:
    """Stores files with runs, and reads them again."""

    def __init__(self, client: Any, root: Path, folder: Path) -> None:
        """client: of MLflow. root: of the command. folder: of new experiments' artifacts."""
        self.client, self.root, self.folder = client, root, folder

    def store(self, run_id: str, write: Callable[[], Any]) -> None:
        """Write artifacts, or tag the run where that is not possible. Raises OSError for a full disk.

        What another root has put into this store lies below that root, and is left alone.
        """
        place = database.local_path(self.client.get_run(run_id).info.artifact_uri or "")
        try:
            if place is not None and not any(map(place.is_relative_to, (self.folder, self.root))):
                raise OSError(f"{place} lies outside of {self.root}")
            write()
        except OSError as error:
            if files.disk_full(error, self.root):
                raise
            self.client.set_tag(run_id, NOT_STORED, f"not stored: {error}")

    def add(self, run_id: str, path: Path) -> None:
        """Store one file with a run."""
        self.store(run_id, lambda: self.client.log_artifact(run_id, str(path)))

    def add_folder(self, run_id: str, folder: Path) -> None:
        """Store the files of a report below ``report/``; other reports lie in folders below its own."""

        def write() -> None:
            for path in sorted(folder.glob("[!.]*")):
                if path.is_file():
                    self.client.log_artifact(run_id, str(path), "report")

        self.store(run_id, write)

    def read(self, run_id: str, name: str) -> bytes:
        """A file of a run. Raises OSError, or what MLflow raises, where it cannot be had."""
        with TemporaryDirectory() as folder:
            return Path(self.client.download_artifacts(run_id, name, folder)).read_bytes()
