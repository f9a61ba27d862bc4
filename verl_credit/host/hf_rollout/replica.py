"""Starts one rollout server per replica, in place of vLLM's or SGLang's."""

import asyncio

import ray
from verl.workers.rollout.replica import RolloutReplica

from verl_credit.host.hf_rollout.server import HFServer


def server_name(replica_rank: int, kind: str = "", suffix: str = "") -> str:
    """The name under which Ray finds the server of a replica."""
    return f"hf_server_{kind}{replica_rank}{suffix}"


def _node_id(worker: object) -> str:
    return ray.get_runtime_context().get_node_id()


class HFReplica(RolloutReplica):
    """One server for `tensor_model_parallel_size` training ranks (the model itself is not split)."""

    async def launch_servers(self) -> None:
        if len(self.workers) != self.world_size:
            raise ValueError(
                f"replica {self.replica_rank} got {len(self.workers)} workers, but rollout."
                "tensor_model_parallel_size x data_parallel_size x pipeline_model_parallel_size is "
                f"{self.world_size}"
            )
        node_id = await self.workers[0].__ray_call__.remote(_node_id)
        kind = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        server = (
            ray.remote(HFServer)
            .options(
                name=server_name(self.replica_rank, kind, self.name_suffix),
                scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                    node_id, soft=False
                ),
                max_concurrency=self.max_concurrency,
            )
            .remote(config=self.config, model_config=self.model_config, replica_rank=self.replica_rank)
        )
        self.servers.append(server)
        self._server_handle = server
        self._server_address = await server.launch_server.remote()

    async def sleep(self) -> None:
        await asyncio.gather(*[server.wait_for_requests_to_drain.remote() for server in self.servers])
        await super().sleep()
