"""One replica of the front: the app of `serve` over an index that asks the shards. It encodes; they need no torch."""

import os
from collections.abc import Callable, Sequence

from ray import serve

from verl_credit_retriever.deploy.asking import Asking
from verl_credit_retriever.deploy.parts import Part, ShardedIndex
from verl_credit_retriever.serving.settings import ServeSettings

APP = "verl-credit-retriever"
FRONT = "front"


def shard_name(part: Part) -> str:
    return f"shard-{part.number}"


def app_builder(settings: ServeSettings, parts: Sequence[Part]) -> Callable:
    """A function without arguments that makes the app in a replica, as `serve.ingress` takes it."""

    def build():
        return _make_app(settings, parts)

    return build


def _make_app(settings: ServeSettings, parts: Sequence[Part]):
    import torch

    from verl_credit_retriever.encoder.encoder import SentenceEncoder
    from verl_credit_retriever.http.server import create_app

    os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
    torch.set_num_threads(settings.threads or 1)
    handles = [serve.get_deployment_handle(shard_name(part), APP) for part in parts]
    index = ShardedIndex.open(settings.index, parts, Asking(parts, handles, _living))
    encoder = SentenceEncoder.for_index(settings.encoder, index.manifest, device=settings.device)
    return create_app(index, encoder, limits=settings.limits, token=settings.token, hosts=settings.hosts)


def _living(part: Part) -> int:
    deployments = serve.status().applications[APP].deployments
    return deployments[shard_name(part)].replica_states.get("RUNNING", 0)
