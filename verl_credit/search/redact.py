"""Addresses as they may be printed or stored."""

import re


def redact(text) -> str:
    """User and password of every URL in ``text`` hidden: "http://me:secret@host" becomes "http://***@host"."""
    return re.sub(r"://[^/@\s]*@", "://***@", str(text))
