"""Hides the credentials in addresses that are printed or stored."""

import re


def redact(text) -> str:
    """``text`` with user and password of every URL hidden: "http://me:secret@host" becomes "http://***@host"."""
    return re.sub(r"://[^/@\s]*@", "://***@", str(text))
