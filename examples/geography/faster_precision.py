"""Say which precision this processor multiplies faster: some compute bfloat16 in hardware, others by conversion."""

import statistics
import time

import torch


SIZES = (1024, 576, 1536)  # tokens of a forward, SmolLM2's hidden size, its feed-forward size
DTYPES = (torch.bfloat16, torch.float32)
REPEATS = 15


def main() -> None:
    rows, inner, columns = SIZES
    factors = {dtype: (torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)) for dtype in DTYPES}
    seconds: dict[torch.dtype, list[float]] = {dtype: [] for dtype in DTYPES}
    for _ in range(REPEATS):
        for dtype, (left, right) in factors.items():
            start = time.perf_counter()
            left @ right
            seconds[dtype].append(time.perf_counter() - start)
    print(str(min(DTYPES, key=lambda dtype: statistics.median(seconds[dtype]))).removeprefix("torch."))


if __name__ == "__main__":
    main()
