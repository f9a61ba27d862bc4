"""The replica of `rollout.name=hf`: it starts the server beside its training workers."""

import asyncio

import ray
from verl.workers.rollout.replica import RolloutReplica

from verl_credit.host.hf_rollout.server import HFServer
from verl_credit.host.hf_rollout.sync import server_name


class HFReplica(RolloutReplica):
    """Starts one server for `tensor_model_parallel_size` training ranks, on the node of the first. The model
    itself is not split.
    """

    async def launch_servers(self) -> None:
        if len(self.workers) != self.world_size:
            sizes = "rollout.tensor_model_parallel_size x data_parallel_size x pipeline_model_parallel_size"
            given = f"replica {self.replica_rank} got {len(self.workers)} workers"
            raise ValueError(f"{given}, but {sizes} is {self.world_size}")
        node_id = await self.workers[0].__ray_call__.remote(
            lambda worker: ray.get_runtime_context().get_node_id()
        )
        kind = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)
        options = {
            "name": server_name(self.replica_rank, kind, self.name_suffix),
            "scheduling_strategy": there,
            "max_concurrency": self.max_concurrency,
        }
        given = {"config": self.config, "model_config": self.model_config, "replica_rank": self.replica_rank}
        server = ray.remote(HFServer).options(**options).remote(**given)
        self.servers.append(server)
        self._server_handle = server
        self._server_address = await server.launch_server.remote()

    async def sleep(self) -> None:
        await asyncio.gather(*[server.wait_for_requests_to_drain.remote() for server in self.servers])
        await super().sleep()
