"""One thread for torch, here and in what the tests start: the models are tiny, and machines are shared."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
