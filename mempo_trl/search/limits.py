"""What a search server accepts, apart from the server, which needs packages that knowing its limits does not."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class ServerLimits:
    """What a search server accepts, at most. All are at least 1.

    Args:
        body_bytes: bytes of a request's body.
        queries: queries of a request. The rollouts of a whole training batch may search in one request.
        query_characters: characters of a query.
        topk: documents for a query.
        results: documents for all queries of a request together, `topk` times queries.
        batch: queries of one search of the backend.
        queue: queries that wait for a search; no fewer than `queries`. Requests beyond it are answered 503.
        timeout: seconds that a client may take for its request, and may take nothing of its answer.
    """

    body_bytes: int = 4 << 20
    queries: int = 4096
    query_characters: int = 8192
    topk: int = 1000
    results: int = 50_000
    batch: int = 256
    queue: int = 16_384
    timeout: float = 30.0

    def __post_init__(self):
        for field in fields(self):
            if not getattr(self, field.name) >= 1:
                raise ValueError(f"The limit `{field.name}` must be at least 1, got {getattr(self, field.name)!r}.")
        if self.queue < self.queries:
            raise ValueError(
                f"The limit `queue` ({self.queue}) must not be below the limit `queries` ({self.queries}): a request "
                "with that many queries would never be accepted."
            )
