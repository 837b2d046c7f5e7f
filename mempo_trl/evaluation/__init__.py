"""Run an agent over questions, score what it answers, summarise a run, and compare two.

`evaluate` and `EvaluationCallback` are imported on first use: the rest loads without torch.
"""

from typing import TYPE_CHECKING, Any

from .comparison import compare, comparison_markdown, read_run
from .summary import score_record, summarize, to_markdown


if TYPE_CHECKING:
    from .callback import EvaluationCallback
    from .evaluator import Evaluation, evaluate


__all__ = ["Evaluation", "EvaluationCallback", "compare", "comparison_markdown", "evaluate", "read_run"]
__all__ += ["score_record", "summarize", "to_markdown"]


def __getattr__(name: str) -> Any:
    if name == "EvaluationCallback":
        from .callback import EvaluationCallback

        return EvaluationCallback
    if name in ("Evaluation", "evaluate"):
        from . import evaluator

        return getattr(evaluator, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
