"""Hides credentials in what is printed or stored: those in addresses, and values whose key names a secret."""

import re

SECRET = re.compile("token(?!s|i)|key|passw|pwd|secret|credential|auth", re.IGNORECASE)


QUERY = re.compile(r"([?&]([\w.-]+)=)[^&\s'\"<>]+")


def redact(text) -> str:
    """``text`` with user and password of every URL hidden: "http://me:secret@host" becomes "http://***@host", and
    "?api_key=secret" becomes "?api_key=***"."""
    text = re.sub(r"://[^/@\s]*@", "://***@", str(text))
    return QUERY.sub(lambda found: f"{found[1]}***" if SECRET.search(found[2]) else found[0], text)


def redact_value(key: str, value):
    """``value`` as a message may show it; hidden where the name of ``key`` says that it is a secret."""
    if SECRET.search(key) and value is not None:
        return "***"
    if isinstance(value, dict):
        return {name: redact_value(str(name), one) for name, one in value.items()}
    return redact(value) if isinstance(value, str) else value
