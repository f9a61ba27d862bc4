"""Registers the CPU platform in verl."""


def register() -> None:
    """Register `VERL_PLATFORM=cpu` in verl; a second call changes nothing.

    verl loads its plugins in the middle of its own import, so this module imports verl only in this function. The engine
    takes more than a second to import, so the platform registers it only in training processes (see
    `PlatformCPU.communication_backend_name`).
    """
    from verl_credit.host.cpu import platform  # noqa: F401  (the import registers the platform)
