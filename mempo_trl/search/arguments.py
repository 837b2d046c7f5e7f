"""Checks of what searches are asked for, and how."""

import os
from collections.abc import Sequence
from typing import Any


# The environment variable of a search server's token, for the server and for who asks it.
TOKEN_VARIABLE = "MEMPO_SERVER_TOKEN"


def distinct_queries(queries: Sequence[str], k: int) -> list[str]:
    """Check what a search is asked for.

    Args:
        queries: The texts to search for.
        k: The number of documents per query.

    Returns:
        The queries in their order, each once.

    Raises:
        TypeError: If `queries` is not a list of strings.
        ValueError: If `k` is not a whole number of at least 1.
    """
    if not isinstance(k, int) or k < 1:
        raise ValueError(f"k must be a whole number of at least 1, got {k!r}.")
    if isinstance(queries, str):
        raise TypeError(f"queries must be a list of strings, got the single string {queries!r}.")
    for query in queries:
        if not isinstance(query, str):
            raise TypeError(f"Every query must be a string, got {query!r}.")
    return list(dict.fromkeys(queries))


def check_counts(**counts: tuple[Any, int]) -> None:
    """Raise a `ValueError` for the first argument that is no whole number of at least as much as stands beside it."""
    for name, (value, least) in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"`{name}={value!r}` is not allowed: it must be a whole number, at least {least}.")


def clean_token(token: str | None) -> str | None:
    """A token without the white space around it, as the newline of a file that it was read from.

    Raises:
        ValueError: If nothing is left of it, or it is not printable ASCII.
    """
    if token is None:
        return None
    token = token.strip()
    if not (token and token.isascii() and token.isprintable()):
        raise ValueError(f"The token ({TOKEN_VARIABLE}) must be printable ASCII, and not be empty.")
    return token


def token_of_environment() -> str | None:
    """The token of a search server in the environment variable `TOKEN_VARIABLE`, if it is set; see `clean_token`."""
    return clean_token(os.environ.get(TOKEN_VARIABLE) or None)
