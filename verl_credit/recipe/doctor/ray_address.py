"""The Ray cluster that a run would join, and whether it answers."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from omegaconf import DictConfig, OmegaConf

ADDRESS = "ray_kwargs.ray_init.address"


def run_address(environment: Mapping[str, str], config: DictConfig | None) -> str:
    """HOST:PORT of the cluster that a run would join; "" when it would start its own."""
    given = given_address(config)
    if given in ("", "auto"):
        return cluster_address(environment)
    return "" if given == "local" else given


def given_address(config: DictConfig | None) -> str:
    """The recipe's own value: HOST:PORT, auto, local; "" when it leaves the choice to Ray."""
    return str((config is not None and OmegaConf.select(config, ADDRESS)) or "")


def unreachable(address: str) -> str:
    """The error of a connection to HOST:PORT (or ray://HOST:PORT); "" when it works."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host or "127.0.0.1", int(port)), timeout=5.0):
            return ""
    except (OSError, ValueError) as error:
        return str(error)


def cluster_address(environment: Mapping[str, str], file: str = "/tmp/ray/ray_current_cluster") -> str:
    """HOST:PORT from RAY_ADDRESS, else from the file that ``ray start`` writes; "" without a cluster."""
    named = environment.get("RAY_ADDRESS", "")
    if named and named != "auto":
        return "" if named == "local" else named
    try:
        with open(file, encoding="utf-8") as noted:
            return noted.read().strip()
    except OSError:
        return ""
