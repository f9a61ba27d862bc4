"""An error of a full disk, or of a limit on a file's size, with the name of the file."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """The block writes `path`. Errors: an OSError that says only that there is no room names `path` as well."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in NO_ROOM:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
