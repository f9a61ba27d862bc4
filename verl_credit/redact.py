"""Hides credentials in what is printed or stored: those in addresses, and values whose key names a secret."""

import re

SECRET = re.compile("token(?!s|i)|key|passw|pwd|secret|credential|auth", re.IGNORECASE)
# The same for keys of a whole configuration and for the user's params. It matches fewer names: verl's prompt_key and
# max_token_len and a param called keywords hold no secret, and a run's files contain them.
STORED = re.compile(
    r"(api|access|private|secret)_?key|passw|pwd|secret|credential|bearer|(^|[._-])auth([._-]|orization|$)|token$",
    re.IGNORECASE,
)
# Matches in {api_key: secret, top: 3}.
IN_BRACES = re.compile(r"""([\w.-]+)(\s*:\s*)("[^"]*"|'[^']*'|[^\s,{}\[\]]+)""")
QUERY = re.compile(r"([?&]([\w.-]+)=)[^&\s'\"<>]+")


def redact(text) -> str:
    """``text`` with user and password of every URL hidden: "http://me:secret@host" becomes "http://***@host", and
    "?api_key=secret" becomes "?api_key=***"."""
    text = re.sub(r"://[^/@\s]*@", "://***@", str(text))
    return QUERY.sub(lambda found: f"{found[1]}***" if SECRET.search(found[2]) else found[0], text)


def redact_value(key: str, value):
    """``value`` for a message; hidden where the name of ``key`` marks a secret."""
    if SECRET.search(key) and value is not None:
        return "***"
    if isinstance(value, dict):
        return {name: redact_value(str(name), one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [redact_value("", one) for one in value]
    return redact(value) if isinstance(value, str) else value


def without_secrets(key: str, value):
    """``value`` of a configuration's ``key`` ("": the whole configuration) for a run's files, logs and trackers."""
    if isinstance(value, dict):
        return {name: without_secrets(f"{key}.{name}", one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(key, one) for one in value]
    if value is not None and STORED.search(key):
        return "***"
    return redact(value) if isinstance(value, str) else value


def override_without_secrets(text: str) -> str:
    """`without_secrets` for the "key=value" of a command line."""
    key, sign, value = text.partition("=")
    if value.startswith("{"):
        value = IN_BRACES.sub(
            lambda one: f"{one[1]}{one[2]}{without_secrets(f'{key}.{one[1]}', one[3])}", value
        )
    return f"{key}{sign}{without_secrets(key, value) if sign else ''}"
