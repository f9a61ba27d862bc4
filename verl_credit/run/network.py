"""Where a run listens: on loopback alone where it starts Ray itself, else where the nodes of its cluster do.

TransferQueue unpickles what reaches its sockets, and torch's store, gloo and NCCL ask for no credentials either.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, MutableMapping

import psutil
from omegaconf import DictConfig, OmegaConf

from verl_credit.machine.ray_address import run_address

# Ray's own switch for "no cluster, so loopback". Every process of a run reads it once, when it imports Ray.
RAY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
STORE = "DIST_INIT_METHOD"  # verl hands it to torch: how ranks find each other
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
INIT = "ray_kwargs.ray_init"


def ray_on_loopback(environment: MutableMapping[str, str]) -> None:
    """Call it before anything imports Ray. A run that turns out to join a cluster is not hindered by it."""
    environment.setdefault(RAY, "0")


def loopback_settings(environment: Mapping[str, str], config: DictConfig) -> dict[str, str]:
    """What the workers of a run with a Ray of its own are told beside; what the environment says already goes first."""
    if run_address(environment, config):
        return {}
    return {name: environment.get(name, value) for name, value in _loopback().items()}


def network_lines(environment: Mapping[str, str], config: DictConfig) -> list[str]:
    """What others can reach, and how; nothing where all is on loopback."""
    if address := run_address(environment, config):
        return [
            f"network: others can reach the nodes of the Ray cluster at {address}: Ray's ports (with the cluster's token) "
            "and, without credentials, those that TransferQueue, torch's store, gloo and NCCL choose. Who reaches "
            "TransferQueue can run code there: let only the nodes reach each other (docs/recipes.md#several-machines)"
        ]
    lines = []
    if found := _beyond_loopback(environment, config):
        told = ", ".join(found)
        lines.append(f"network: {told}: what this opens is not on loopback alone (docs/host.md#network)")
    if (engine := config.actor_rollout_ref.rollout.name) != "hf":
        lines.append(
            f"network: loopback, but for what the engines of rollout.name={engine} open on their own: vLLM's open a port "
            "for torch's store on all interfaces, without credentials (docs/host.md#network)"
        )
    return lines


def why_not_loopback(environment: Mapping[str, str], config: DictConfig, address: str) -> str:
    """Why Ray, which takes ``address`` for this machine's, would leave loopback though nobody asked for it; else ""."""
    if run_address(environment, config) or _opted_out(environment) or is_loopback(address):
        return ""
    return (
        f"Ray would listen on {address} and not on loopback: it was imported before {RAY}=0 was set, or does not read that "
        f"any more; set {RAY}=0 before Python starts, or {RAY}=1 if others may reach this run"
    )


def is_loopback(host: str) -> bool:
    """Of an address or a name, without asking anyone for the name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _loopback() -> dict[str, str]:
    interfaces = psutil.net_if_addrs().items()
    # lo on Linux, lo0 on macOS
    name = next((name for name, found in interfaces if any(is_loopback(a.address) for a in found)), "lo")
    # NCCL takes a name for a prefix, unless "=" stands before it.
    return {STORE: "loopback://", GLOO: name, NCCL: f"={name}"}


def _opted_out(environment: Mapping[str, str]) -> bool:
    return environment.get(RAY, "").lower() in ("1", "true")  # as Ray reads it


def _beyond_loopback(environment: Mapping[str, str], config: DictConfig) -> list[str]:
    """NAME=VALUE of what a person set against it."""
    init = OmegaConf.select(config, INIT) or {}
    given = OmegaConf.select(config, f"{INIT}.runtime_env.env_vars") or {}
    told = {**loopback_settings(environment, config), **given}
    found = [f"{RAY}={environment[RAY]}"] if _opted_out(environment) else []
    found += [
        f"{name}={told[name]}"
        for name, ours in _loopback().items()
        if str(told[name]).strip("=") != ours.strip("=")
    ]
    hosts = {name: init.get(name) for name in ("_node_ip_address", "dashboard_host")}
    return found + [f"{INIT}.{name}={host}" for name, host in hosts.items() if host and not is_loopback(host)]
