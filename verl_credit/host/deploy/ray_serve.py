"""Puts the shards and the front on a running Ray cluster by Ray Serve, waits until they answer, and takes them away.

The front's replicas run the app of `serve` over an index that sends each search to every shard. Shards need no torch.
"""

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import httpx
import numpy as np
import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.context import _get_global_client
from starlette.exceptions import HTTPException

from verl_credit_retriever.http.batcher import HELD
from verl_credit_retriever.index.memory import gigabytes, plan_memory
from verl_credit_retriever.index.parts import Found, Part, Shard, ShardedIndex, cut
from verl_credit_retriever.index.search import SearchIndex
from verl_credit_retriever.serve import CannotListen, url_of
from verl_credit_retriever.settings import ServeSettings

APP, FRONT = "verl-credit-retriever", "front"
LOOK_SECONDS = 1.0
"""The living replicas of a shard are counted whenever this time passes without an answer."""
ANSWER_SECONDS = 60.0
"""The limit of a search; it is longer than Ray takes to detect a dead node."""
AGAIN_SECONDS = 0.1
CONNECT_SECONDS = 10.0
POLL_SECONDS = 0.25
HEALTH_SECONDS = 2.0


def connect(address: str) -> None:
    """Join the cluster at `address` ("auto": the one of this machine). Errors: ValueError when there is none."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        if ":" in address and "://" not in address:  # Ray itself tries for minutes
            socket.create_connection(address.rsplit(":", 1), CONNECT_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        use = f"no Ray cluster ({reason}); start one with `ray start --head`"
        raise ValueError(f"--address={address}: {use}") from None


def deploy(settings: ServeSettings, *, shards: int, replicas: int, ready_seconds: float) -> None:
    """Serve `settings.index` by `shards` times `replicas` processes and `replicas` fronts; prints what runs where.

    Returns once every replica runs and a query was answered; otherwise everything is taken away again. Errors: ValueError
    for a deployment that is there already, for more than the cluster has, and with a replica's own reason; CannotListen;
    TimeoutError.
    """
    index = SearchIndex.load(settings.index, backend="exact", mmap=True, verify="none")
    backend = "exact" if index.manifest["kind"] == "exact" else settings.backend
    parts = cut(index, shards, backend)
    if APP in serve.status().applications:
        raise ValueError(f"{APP!r} is deployed on this cluster already; take it away with `undeploy` first")
    machines = require_room(settings, shards, replicas)
    _start_serve(settings)
    most = -(-replicas // machines)  # replicas of one shard on different machines, as far as there are enough
    app = _application(settings, parts, backend, replicas, most)
    waits = ("ingress_deployment_creation", "applications_running")
    try:
        target = serve.RunTarget(app, name=APP, route_prefix="/")
        serve.run_many([target], **{f"wait_for_{what}": False for what in waits})
        deadline = time.monotonic() + ready_seconds
        _await_replicas(deadline)
        url = url_of("127.0.0.1" if settings.host == "0.0.0.0" else settings.host, settings.port)
        _await_answer(url, settings.token, deadline)
    except BaseException:
        _remove()
        raise
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


def require_room(settings: ServeSettings, shards: int, replicas: int) -> int:
    """The number of machines that can hold a process; often the head node cannot. Raises ValueError for more CPUs or GPUs
    than the cluster has."""
    threads, there = settings.threads or 1, ray.cluster_resources().get("CPU", 0)
    if (needed := (shards + 1) * replicas * threads) > there:
        asked = f"(shards + 1) x replicas x threads = {needed} CPUs"
        raise ValueError(f"{asked}; the cluster has {there:g}; take fewer of them")
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    holds = [int(node.get("CPU", 0) // threads) for node in nodes]
    if not any(holds):
        most = max((node.get("CPU", 0) for node in nodes), default=0)
        raise ValueError(f"--threads={threads}; no machine of the cluster has more than {most:g} CPUs")
    fronts = sum(min(int(node.get("GPU", 0)), most) for node, most in zip(nodes, holds, strict=True))
    if on_gpu(settings) and fronts < replicas:
        needs = f"each front needs a GPU with {threads} CPUs beside it; the cluster has room for {fronts}"
        asked = f"--device={settings.device} --replicas={replicas}"
        raise ValueError(f"{asked}: {needs}; take fewer replicas or --device=cpu")
    return sum(map(bool, holds))


def on_gpu(settings: ServeSettings) -> bool:
    return settings.device.startswith("cuda")


def _start_serve(settings: ServeSettings) -> None:
    """Errors: CannotListen; ValueError when it runs already and listens elsewhere: that cannot be changed."""
    wanted = {"host": settings.host, "port": settings.port}
    try:
        serve.start(proxy_location="EveryNode", http_options=wanted)
    except RayError as error:
        _remove()
        reason = str(error).strip().splitlines()[-1]
        kind = CannotListen if "Failed to bind" in reason else ValueError
        raise kind(f"--host={settings.host} --port={settings.port}: {reason}") from None
    there = _get_global_client().get_serve_details()["http_options"]
    for name, value in wanted.items():
        if there[name] != value:
            runs = f"Ray Serve runs on this cluster already, with {name}={there[name]}"
            raise ValueError(f"--{name}={value}: {runs}; give that one, or end it with `serve shutdown`")


def _application(settings: ServeSettings, parts: Sequence[Part], backend: str, replicas: int, most: int):
    """``most``: the replicas of a shard on one machine."""
    threads, shards = settings.threads or 1, []
    options = {
        "num_replicas": replicas,
        "max_replicas_per_node": most,
        "ray_actor_options": {"num_cpus": threads},
        "health_check_period_s": HEALTH_SECONDS,
        "max_constructor_retry_count": replicas,  # at the start; a replica that is replaced later has no limit
    }
    for part in parts:
        shard = serve.deployment(Shard, name=shard_name(part), max_ongoing_requests=replicas, **options)
        shards.append(shard.bind(str(settings.index), part, backend, threads))
    if on_gpu(settings):  # GPUs limit the fronts of a machine
        options |= {"max_replicas_per_node": None, "ray_actor_options": {"num_cpus": threads, "num_gpus": 1}}
    front = serve.ingress(lambda: _make_app(settings, parts))()
    # Above the batcher's capacity, so that it rejects overload; requests queued in Ray's router have no deadline.
    held = 4 * max(HELD, settings.limits.max_queue_queries)
    options |= {"max_ongoing_requests": held, "max_queued_requests": held}
    return serve.deployment(front, name=FRONT, **options).bind(*shards)


def _await_replicas(deadline: float) -> None:
    while True:
        app = serve.status().applications[APP]
        if app.status == "RUNNING":
            return
        if app.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            failed = {n: d.message.strip() for n, d in app.deployments.items() if d.status != "HEALTHY"}
            # The last line of a replica's traceback is the error.
            lines = [f"{name}: {text.splitlines()[-1]}" for name, text in failed.items() if text]
            raise ValueError("; ".join(lines) or app.message)
        if time.monotonic() > deadline:
            waiting = {name: dict(each.replica_states) for name, each in app.deployments.items()}
            raise TimeoutError(
                f"not all replicas run: {waiting}; are there enough free CPUs, GPUs and memory?"
            )
        time.sleep(POLL_SECONDS)


def _await_answer(url: str, token: str | None, deadline: float) -> None:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    problem = "no answer"
    while time.monotonic() < deadline:
        try:
            answer = httpx.get(f"{url}/readyz", headers=headers, timeout=30, trust_env=False)
            if answer.status_code == 200:
                return
            problem = f"{answer.status_code}: {answer.text[:200]}"
        except httpx.HTTPError as error:
            problem = f"{type(error).__name__}: {error}"
        time.sleep(POLL_SECONDS)
    raise TimeoutError(f"{url}/readyz: {problem}; deploy asks where it runs: run it on the head node")


def _say(parts: Sequence[Part], manifest: dict, backend: str) -> None:
    deployments = _get_global_client().get_serve_details()["applications"][APP]["deployments"]

    def places(name: str) -> str:
        replicas = deployments[name]["replicas"]  # a replica that Ray is replacing has no place yet
        return ", ".join(f"{each.get('node_ip')} (pid {each.get('pid')})" for each in replicas)

    for part in parts:
        held = {**manifest, "kind": "flat", "rows": part.last - part.first, "parameters": {}}
        plan = plan_memory(held, backend=backend)
        print(f"{part}, {gigabytes(plan.total)} each: {places(shard_name(part))}")
    print(f"front: {places(FRONT)}")


class Asking:
    """Sends a search to one replica of every shard and waits for all; for one thread at a time.

    `handles` are Serve's, one per part. `living(part)` counts a shard's running replicas; its RayError means unknown. When
    a replica ends while it searches, another one gets the search. Errors: HTTPException 503 names the shard that has no
    living replica, or has not answered within ANSWER_SECONDS; the shard's own error.
    """

    def __init__(self, parts: Sequence[Part], handles: Sequence, living: Callable[[Part], int]):
        self._parts, self._handles, self._living = parts, handles, living
        self._absent: Part | None = None

    def __call__(self, vectors_N_D: np.ndarray, k: int) -> list[Found]:
        if self._absent is not None:  # without this every search would wait for it again
            self._refuse_absent(self._absent)
        deadline = time.monotonic() + ANSWER_SECONDS
        asks = [
            partial(self._handles[n].search.remote, part, vectors_N_D, k)
            for n, part in enumerate(self._parts)
        ]
        replies = [ask() for ask in asks]
        try:
            return [self._receive(number, replies, asks[number], deadline) for number in range(len(asks))]
        except BaseException:
            for reply in replies:
                reply.cancel()
            raise

    def _receive(self, number: int, replies: list, again: Callable, deadline: float) -> Found:
        part = self._parts[number]
        while time.monotonic() < deadline:
            try:
                return replies[number].result(timeout_s=LOOK_SECONDS)
            except RayTaskError as error:
                raise error.cause from None
            except TimeoutError:
                self._refuse_absent(part)
            except RayError:  # the replica has ended, or its answer did not arrive
                time.sleep(AGAIN_SECONDS)
                replies[number] = again()
        raise unavailable(f"{part} has not answered within {ANSWER_SECONDS:g} s")

    def _refuse_absent(self, part: Part) -> None:
        self._absent = None
        with suppress(RayError):
            self._absent = part if self._living(part) == 0 else None
        if self._absent is not None:
            raise unavailable(f"{part} has no living replica")


def unavailable(why: str) -> HTTPException:
    return HTTPException(503, why, {"Retry-After": "5"})


def shard_name(part: Part) -> str:
    return f"shard-{part.number}"


def _make_app(settings: ServeSettings, parts: Sequence[Part]):
    import torch

    from verl_credit_retriever import engines
    from verl_credit_retriever.encoder import SentenceEncoder
    from verl_credit_retriever.http.server import create_app

    os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
    torch.set_num_threads(settings.threads or 1)
    handles = [serve.get_deployment_handle(shard_name(part), APP) for part in parts]
    index = ShardedIndex.open(settings.index, parts, Asking(parts, handles, _living))
    encoder = SentenceEncoder.for_index(settings.encoder, index.manifest, device=settings.device)
    print(engines.use(encoder, settings.encode_with), flush=True)  # into the replica's log
    return create_app(index, encoder, limits=settings.limits, token=settings.token, hosts=settings.hosts)


def _living(part: Part) -> int:
    deployments = serve.status().applications[APP].deployments
    return deployments[shard_name(part)].replica_states.get("RUNNING", 0)
