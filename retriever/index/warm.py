"""Reads mapped files once, so that no query has to wait for the disk."""

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from verl_credit_retriever.index.memory import available_memory, gigabytes

READ = 8 << 20
log = logging.getLogger("verl_credit_retriever")


class Warming:
    """Brings `files` into the file cache in a thread; they are read as usual meanwhile.

    Files that are larger than the memory that is free are left: reading them would drop their own pages again.
    """

    def __init__(self, files: Sequence[Path]):
        self._files, self._read = files, 0
        self._total = sum(path.stat().st_size for path in files)
        self.thread: threading.Thread | None = None
        if self._total > (free := available_memory()):
            log.warning(
                "%s of mapped files are not warmed: %s of memory are free; queries read the disk",
                *(gigabytes(self._total), gigabytes(free)),
            )
            return
        self.thread = threading.Thread(target=self._warm, name="warming", daemon=True)
        self.thread.start()

    def text(self) -> str | None:
        """Such as "warming: 12.3 GB of 64.8 GB"; None when it is done, or was left."""
        if self.thread is None or not self.thread.is_alive():
            return None
        return f"warming: {gigabytes(self._read)} of {gigabytes(self._total)}"

    def _warm(self) -> None:
        buffer = bytearray(READ)
        try:
            for path in self._files:
                with open(path, "rb", buffering=0) as file:
                    while size := file.readinto(buffer):
                        self._read += size
        except OSError as error:
            log.warning("%s: warming ended: %s", path, error)
