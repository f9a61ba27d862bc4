"""Enters the CPU platform and engine into verl's own registries."""

import os


def register() -> None:
    """Make `VERL_PLATFORM=cpu` and `strategy=fsdp2` on device "cpu" known to verl; a second call changes
    nothing.

    The engine is registered only where `VERL_PLATFORM=cpu` is set: importing verl's engines takes a second
    and reads the platform, which must then exist. verl loads its plugins in the middle of its own import, so
    nothing of verl is imported before this function runs.
    """
    from verl_credit.host.cpu import platform  # noqa: F401  (the import registers the platform)

    if is_selected():
        from verl_credit.host.cpu import engine  # noqa: F401  (the import registers the engine)


def is_selected() -> bool:
    """Whether this process was told to run verl on the CPU."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"
