"""The Ray cluster that a run would join, and where a run listens: on the cluster's network, else on loopback only.

TransferQueue unpickles the data that reaches its sockets, and torch's store, gloo and NCCL need no credentials.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, MutableMapping

from omegaconf import DictConfig, OmegaConf

from verl_credit.config.engines import ENGINE, engine_of

# Ray's own switch for "no cluster, so loopback". Every process of a run reads it once, when it imports Ray.
RAY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
STORE = "DIST_INIT_METHOD"  # verl hands it to torch, whose ranks find each other by it
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
INIT = "ray_kwargs.ray_init"
ADDRESS = f"{INIT}.address"


def run_address(environment: Mapping[str, str], config: DictConfig | None) -> str:
    """Returns HOST:PORT of the cluster that a run would join; "" when the run would start its own."""
    given = given_address(config)
    if given in ("", "auto"):
        return cluster_address(environment)
    return "" if given == "local" else given


def given_address(config: DictConfig | None) -> str:
    """The address in the recipe: HOST:PORT, auto, local; "" when the recipe leaves the choice to Ray."""
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
    """Returns HOST:PORT from RAY_ADDRESS, else from the file that ``ray start`` writes; "" without a cluster."""
    named = environment.get("RAY_ADDRESS", "")
    if named and named != "auto":
        return "" if named == "local" else named
    try:
        with open(file, encoding="utf-8") as noted:
            return noted.read().strip()
    except OSError:
        return ""


def ray_on_loopback(environment: MutableMapping[str, str]) -> None:
    """Sets Ray's switch before anything imports Ray. It does not affect a run that joins a cluster."""
    environment.setdefault(RAY, "0")


def loopback_settings(environment: Mapping[str, str], config: DictConfig) -> dict[str, str]:
    """Returns variables for the workers of a run that starts Ray itself; variables already set keep their values."""
    if run_address(environment, config):
        return {}
    return {name: environment.get(name, value) for name, value in _loopback().items()}


def network_lines(environment: Mapping[str, str], config: DictConfig) -> list[str]:
    """Returns lines about the sockets that other machines can reach; no line where all are on loopback."""
    if address := run_address(environment, config):
        return [
            f"network: others can reach the nodes of the Ray cluster at {address}: Ray's ports (with the cluster's token) "
            "and, without credentials, those that TransferQueue, torch's store, gloo and NCCL choose. Anyone who reaches "
            "TransferQueue can run code there: let only the nodes reach each other (docs/recipes.md#several-machines)"
        ]
    lines = []
    opened = [f"{RAY}={environment[RAY]}"] if _opted_out(environment) else []
    for name, ours in _loopback().items():
        if (given := environment.get(name, ours)).strip("=") != ours.strip("="):
            opened.append(f"{name}={given}")
    if opened:
        lines.append(f"network: {', '.join(opened)}: this opens ports beyond loopback (docs/run.md#network)")
    if ports := engine_of(config).ports:
        opens = f"{ENGINE}={engine_of(config).name}: {ports}"
        lines.append(f"network: loopback, except for the ports of {opens} (docs/run.md#network)")
    return lines


def why_not_loopback(environment: Mapping[str, str], config: DictConfig, address: str) -> str:
    """The reason why Ray, which uses ``address`` for this machine, would leave loopback without a setting; else ""."""
    if run_address(environment, config) or _opted_out(environment) or is_loopback(address):
        return ""
    return (
        f"Ray would listen on {address} and not on loopback: it was imported before {RAY}=0 was set, or no longer reads "
        f"that; set {RAY}=0 before Python starts, or {RAY}=1 if others may reach this run"
    )


def is_loopback(host: str) -> bool:
    """Is an address or a name loopback? The name is not resolved."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _loopback() -> dict[str, str]:
    import psutil

    interfaces = psutil.net_if_addrs().items()
    # lo on Linux, lo0 on macOS
    name = next((n for n, found in interfaces if any(is_loopback(a.address) for a in found)), "lo")
    # NCCL treats a name as a prefix unless it starts with "=".
    return {STORE: "loopback://", GLOO: name, NCCL: f"={name}"}


def _opted_out(environment: Mapping[str, str]) -> bool:
    return environment.get(RAY, "").lower() in ("1", "true")  # as Ray reads it
