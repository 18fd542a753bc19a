"""What takes long to import, imported; and put out of the garbage collector's sight.

Torch, Dynamo and Inductor are 400,000 objects that live as long as the process. A compilation makes so many objects
that the collector runs again and again; with those to look at, too, it takes a fifth of the tests' time.
"""

import atexit
import gc
import logging

import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.experimental
import torch.distributed.tensor.parallel

import f8fx.backend
import f8fx.fsdp  # noqa: F401
import tests.distributed.harness  # noqa: F401

gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # so that extensions that count what is left find nothing

# What takes time in every compilation, and is of no use here. torch writes all its graphs to this logger if anybody listens;
# pytest 9.2 does, to all loggers that do not propagate.
logging.getLogger("torch.__trace").propagate = True
# Dynamo measures how long its guards take, with the processor's caches emptied before: 50 ms.
if hasattr(torch._dynamo.guards, "profile_guard_manager"):
    torch._dynamo.guards.profile_guard_manager = lambda *args: 0.0
