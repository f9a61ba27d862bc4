"""One thread for torch, here and in what the tests start: the models are tiny, and machines are shared."""

import os
import re

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(config, items):
    """Tests of the real vLLM need an environment of their own: they run only where `-m` names them."""
    if "vllm" in re.findall(r"\w+", config.option.markexpr):
        return
    left_out = [item for item in items if item.get_closest_marker("vllm")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
