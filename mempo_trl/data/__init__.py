"""Questions to train and to test on."""

from mempo_trl.data.relay import Fact, RelayQuestion, RelayWorld, expert_trace


__all__ = ["Fact", "RelayQuestion", "RelayWorld", "expert_trace"]
