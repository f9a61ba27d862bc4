"""Enters the CPU platform and engine into verl's own registries."""


def register() -> None:
    """Make `VERL_PLATFORM=cpu` known to verl; a second call changes nothing.

    verl loads its plugins in the middle of its own import, so nothing of verl is imported before this
    function runs. The engine is left out: every process of a run would need more than a second to import it,
    and the platform registers it in those that train (see `PlatformCPU.communication_backend_name`).
    """
    from verl_credit.host.cpu import platform  # noqa: F401  (the import registers the platform)
