"""Train long-horizon search agents that keep their own memory, with TRL.

`MemPOConfig`, `MemPOTrainer` and `MemoryAgent` are imported on first use: the torch-free modules (`mempo_trl.protocol`,
`mempo_trl.rewards`, `mempo_trl.search`, `mempo_trl.data`) load without torch.
"""

from typing import TYPE_CHECKING, Any

from ._compat import check_trl_version


check_trl_version()

if TYPE_CHECKING:
    from .agent import MemoryAgent
    from .mempo_config import MemPOConfig
    from .mempo_trainer import MemPOTrainer


__version__ = "0.1.0.dev0"
__all__ = ["MemPOConfig", "MemPOTrainer", "MemoryAgent"]


def __getattr__(name: str) -> Any:
    if name == "MemPOConfig":
        from .mempo_config import MemPOConfig

        return MemPOConfig
    if name == "MemPOTrainer":
        from .mempo_trainer import MemPOTrainer

        return MemPOTrainer
    if name == "MemoryAgent":
        from .agent import MemoryAgent

        return MemoryAgent
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
