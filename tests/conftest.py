"""One thread a test process: two OpenMP threads beside other work are many times slower than one."""

import torch

torch.set_num_threads(1)
