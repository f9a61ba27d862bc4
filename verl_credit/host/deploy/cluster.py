"""Puts the shards and the front on a running Ray cluster by Ray Serve, waits until they answer, and takes them away."""

import logging
import re
import socket
import time
from collections.abc import Sequence

import httpx
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.context import _get_global_client

from verl_credit.host.deploy.front import APP, FRONT, app_builder, shard_name
from verl_credit_retriever.http.batcher import HELD
from verl_credit_retriever.index.memory import gigabytes, plan_memory
from verl_credit_retriever.index.parts import Part, Shard, cut
from verl_credit_retriever.index.search import SearchIndex
from verl_credit_retriever.serve import CannotListen, url_of
from verl_credit_retriever.settings import ServeSettings

CONNECT_SECONDS = 10.0
POLL_SECONDS = 0.25
PACKAGE = re.compile(r"^[\w.]+\.(?=\w+: )")
"""Matches the module before the class of an error."""
HEALTH_SECONDS = 2.0


def connect(address: str) -> None:
    """Join the cluster at `address` ("auto": the one of this machine). Errors: ValueError when there is none."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        if ":" in address and "://" not in address:  # Ray itself tries for minutes
            socket.create_connection(address.rsplit(":", 1), CONNECT_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"--address={address}: no Ray cluster ({reason}); start one with `ray start --head`"
        ) from None


def deploy(settings: ServeSettings, *, shards: int, replicas: int, ready_seconds: float) -> None:
    """Serve `settings.index` by `shards` times `replicas` processes and `replicas` fronts; prints what runs where.

    Returns once every replica runs and a query was answered. Otherwise everything is taken away again. Errors:
    ValueError for a deployment that is there already, for more than the cluster has, and with a replica's own reason;
    CannotListen; TimeoutError.
    """
    index = SearchIndex.load(settings.index, backend="exact", mmap=True, verify="none")
    backend = "exact" if index.manifest["kind"] == "exact" else settings.backend
    parts = cut(index, shards, backend)
    _refuse_second()
    _require_cpus((shards + 1) * replicas * (settings.threads or 1))
    machines = _machines(settings.threads or 1)
    _start_serve(settings)
    options = {
        "num_replicas": replicas,
        # Replicas of one shard on different machines, as far as there are enough.
        "max_replicas_per_node": -(-replicas // machines),
        "ray_actor_options": {"num_cpus": settings.threads or 1},
        "health_check_period_s": HEALTH_SECONDS,
        "max_constructor_retry_count": replicas,  # at the start; a replica that is replaced later has no limit
    }
    try:
        serve.run_many(
            [serve.RunTarget(_application(settings, parts, backend, options), name=APP, route_prefix="/")],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        deadline = time.monotonic() + ready_seconds
        _await_replicas(deadline)
        url = url_of("127.0.0.1" if settings.host == "0.0.0.0" else settings.host, settings.port)
        _await_answer(url, settings.token, deadline)
    except BaseException:
        _remove()
        raise
    most = options["max_replicas_per_node"]
    print(f"{machines} machine(s), at most {most} replica(s) of a shard on each")
    _say(parts, index.manifest, backend)
    print(f"serving on {url} of every machine with a replica; fingerprint {index.fingerprint}", flush=True)


def undeploy() -> None:
    """Take the deployment away, and Ray Serve too if nothing else runs on it. Errors: ValueError when there is none."""
    if APP not in serve.status().applications:
        raise ValueError(f"nothing is deployed as {APP!r} on this cluster")
    _remove()


def _remove() -> None:
    if serve.status().applications.keys() - {APP}:
        serve.delete(APP)
    else:
        serve.shutdown()


def _refuse_second() -> None:
    if APP in serve.status().applications:
        raise ValueError(f"{APP!r} is deployed on this cluster already; take it away with `undeploy` first")


def _require_cpus(needed: int) -> None:
    there = ray.cluster_resources().get("CPU", 0)
    if needed > there:
        raise ValueError(
            f"(shards + 1) x replicas x threads = {needed} CPUs; the cluster has {there:g}; take fewer of them"
        )


def _machines(threads: int) -> int:
    """The number of machines that can hold a process; often the head node cannot. Errors: ValueError when none can."""
    cpus = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    if threads > max(cpus, default=0):
        raise ValueError(
            f"--threads={threads}; no machine of the cluster has more than {max(cpus, default=0):g} CPUs"
        )
    return sum(has >= threads for has in cpus)


def _start_serve(settings: ServeSettings) -> None:
    """Errors: CannotListen; ValueError when it runs already and listens elsewhere: that cannot be changed."""
    wanted = {"host": settings.host, "port": settings.port}
    try:
        serve.start(proxy_location="EveryNode", http_options=wanted)
    except RayError as error:
        _remove()
        reason = str(error).strip().splitlines()[-1]
        kind = CannotListen if "Failed to bind" in reason else ValueError
        raise kind(f"--host={settings.host} --port={settings.port}: {PACKAGE.sub('', reason)}") from None
    there = _get_global_client().get_serve_details()["http_options"]
    for name, value in wanted.items():
        if there[name] != value:
            raise ValueError(
                f"--{name}={value}: Ray Serve runs on this cluster already, with {name}={there[name]}; give that one, or "
                "end it with `serve shutdown`"
            )


def _application(settings: ServeSettings, parts: Sequence[Part], backend: str, options: dict):
    threads, replicas = settings.threads or 1, options["num_replicas"]
    shards = [
        serve.deployment(Shard, name=shard_name(part), max_ongoing_requests=replicas, **options).bind(
            str(settings.index), part, backend, threads
        )
        for part in parts
    ]
    if settings.device.startswith("cuda"):
        options = {**options, "ray_actor_options": {**options["ray_actor_options"], "num_gpus": 1}}
    front = serve.ingress(app_builder(settings, parts))()
    # More than the queue and the line before it hold, so that the batcher refuses and Ray's router, where no deadline runs,
    # does not fill first.
    most = 4 * max(HELD, settings.limits.max_queue_queries)
    return serve.deployment(
        front, name=FRONT, max_ongoing_requests=most, max_queued_requests=most, **options
    ).bind(*shards)


def _await_replicas(deadline: float) -> None:
    while True:
        app = serve.status().applications[APP]
        if app.status == "RUNNING":
            return
        if app.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise ValueError(_reason(app))
        if time.monotonic() > deadline:
            waiting = {name: dict(each.replica_states) for name, each in app.deployments.items()}
            raise TimeoutError(f"not all replicas run: {waiting}; are there enough free CPUs and memory?")
        time.sleep(POLL_SECONDS)


def _reason(app) -> str:
    """Returns the error of each deployment that failed, which is the last line of its replica's traceback."""
    failed = {
        name: each.message.strip() for name, each in app.deployments.items() if each.status != "HEALTHY"
    }
    lines = [
        f"{name}: {PACKAGE.sub('', message.splitlines()[-1])}" for name, message in failed.items() if message
    ]
    return "; ".join(lines) or app.message


def _await_answer(url: str, token: str | None, deadline: float) -> None:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    problem = "no answer"
    while time.monotonic() < deadline:
        try:
            answer = httpx.get(f"{url}/readyz", headers=headers, timeout=30, trust_env=False)
        except httpx.HTTPError as error:
            problem = f"{type(error).__name__}: {error}"
        else:
            if answer.status_code == 200:
                return
            problem = f"{answer.status_code}: {answer.text[:200]}"
        time.sleep(POLL_SECONDS)
    raise TimeoutError(f"{url}/readyz: {problem}; deploy asks where it runs: run it on the head node")


def _say(parts: Sequence[Part], manifest: dict, backend: str) -> None:
    deployments = _get_global_client().get_serve_details()["applications"][APP]["deployments"]

    def places(name: str) -> str:
        replicas = deployments[name]["replicas"]  # a replica that Ray is replacing has no place yet
        return ", ".join(f"{each.get('node_ip')} (pid {each.get('pid')})" for each in replicas)

    for part in parts:
        plan = plan_memory(
            {**manifest, "kind": "flat", "rows": part.last - part.first, "parameters": {}}, backend=backend
        )
        print(f"{part}, {gigabytes(plan.total)} each: {places(shard_name(part))}")
    print(f"front: {places(FRONT)}")
