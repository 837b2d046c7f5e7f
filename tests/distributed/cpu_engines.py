"""What accelerate lacks to run on a CPU what is configured for GPUs."""

import os

from accelerate import DistributedType, PartialState
from accelerate.state import AcceleratorState


def allow_gpu_engines_on_cpu() -> None:
    """Let DistributedDataParallel, DeepSpeed and FSDP2 talk over gloo. To be called before anything else of accelerate.

    With `use_cpu=True`, which starts gloo as well, accelerate silently takes DistributedDataParallel for all of them.
    """

    def gloo(self, cpu=False, sagemaker_dp=False, backend=None):
        return "gloo", DistributedType.MULTI_CPU

    PartialState._prepare_backend = gloo
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        start = AcceleratorState.__init__

        def start_fsdp(self, *args, fsdp_plugin=None, **kwargs):
            start(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
            if fsdp_plugin is not None:
                self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
                self.fsdp_plugin = fsdp_plugin

        AcceleratorState.__init__ = start_fsdp
