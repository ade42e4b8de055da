"""Files of a repository on the Hugging Face Hub, as shards."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from headrace._extras import require
from headrace._shards.discovery import Shard, expand_braces, glob_expression
from headrace._store.errors import CAUSES, HUB_REMEDY, Cause, describe_error
from headrace._store.head import Head
from headrace._store.redaction import secrets_in
from headrace._store.retry_policy import RetryPolicy
from headrace._store.store import Store
from headrace._version import __version__
from headrace.errors import EmptyListingError, StoreError

T = TypeVar("T")


_KINDS = {"datasets": "dataset", "spaces": "space", "models": "model"}


def hub(
    repository: str,
    files: str | Sequence[str],
    *,
    token: str | bool | None = None,
    timeout: float = 30.0,
    retry: RetryPolicy | int | None = None,
) -> tuple[Shard, ...]:
    """List files of a Hugging Face repository as shards.

    Needs ``headrace[hub]``.

    The result is for the `shards` of any dataset. `huggingface_hub` lists the files, with the token
    and settings of the environment (``hf auth login``, ``HF_TOKEN``, ``HF_ENDPOINT``). A `Store`
    reads the files.

    A branch or tag is resolved to its commit when the function is called. Later pushes change
    nothing, and files are checked by size only. A branch may move between the listings of
    two ranks, or between two starts: name a commit, or list on one rank and broadcast the result.
    The result includes the token. A state of another commit is a `StateError`.

    Each read makes two requests. The first goes to the hub and counts in the hub's rate limits. The
    second goes to the host of the redirect and never carries the token.

    The function blocks. In an async program, call the function by `asyncio.to_thread`.

    Args:
        repository: ``"datasets/owner/name"``, ``"spaces/…"`` or ``"models/…"``, optionally after
            ``hf://``. Append ``@`` and a branch, tag, commit or ``refs/…``. The default is the main
            branch.
        files: a path in the repository, or several, with braces and globs as for `TarDataset`.
        token: an access token. None takes the token of the environment, False sends none.
        timeout: as for `Store`.
        retry: as for `Store`. `huggingface_hub` retries the pages of the listing by itself.

    Returns:
        Shards in the order of the paths, without duplicates.

    Raises:
        EmptyListingError: no file matches.
        StoreError: the hub refused, failed or did not respond.
        ObjectNotFoundError: the hub has no such repository.
        ValueError: `repository` is not the name of a repository.

    Example:
        >>> import headrace as hr
        >>> shards = hr.hub("datasets/org/name@v1.0", "data/train-*.parquet")  # doctest: +SKIP
    """
    require("huggingface_hub", "reading the Hugging Face Hub", "huggingface_hub", "hub")
    from huggingface_hub import HfApi
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    name, _, revision = repository.removeprefix("hf://").partition("@")
    kind, _, name = name.strip("/").partition("/")
    if kind not in _KINDS or not name:
        raise ValueError(
            f"{repository!r} must be datasets/…, spaces/… or models/…, and files= the paths in it"
        )
    client: Any = {
        "token": token,
        "library_name": "headrace",
        "library_version": __version__,
    }
    api = HfApi(**client)
    page = f"{api.endpoint}/{'' if kind == 'models' else kind + '/'}{name}"
    headers = build_hf_headers(**client)
    store_options = {"default_headers": headers, "allow_redirects": True}

    def converted(request: Callable[[], T]) -> T:
        try:
            return request()
        except (HFValidationError, StoreError):
            raise
        # `huggingface_hub` raises its own errors, or errors of the HTTP client of its version.
        except Exception as error:
            status = getattr(getattr(error, "response", None), "status_code", None)
            text = describe_error(error, secrets_in(store_options)).rstrip(".")
        cause = Cause.UNREACHABLE if status is None else CAUSES.get(status, Cause.OTHER)
        remedy = (
            "Check the network, and HF_ENDPOINT"
            if status is None
            else HUB_REMEDY * (status in (401, 403, 404))
        )
        # Raised outside the handler: the request has the token and must not become the context.
        raise cause.error(f"listing: {text}. {remedy}".rstrip(), url=page, status=status)

    where: dict[str, Any] = {"repo_type": _KINDS[kind], "revision": revision or None}
    where["revision"] = commit = converted(
        lambda: api.repo_info(name, timeout=timeout, **where)
    ).sha
    url = f"{page}@{commit}"
    given = [files] if isinstance(files, str) else files
    patterns = [each for pattern in given for each in expand_braces(pattern)]

    def list_files() -> dict[str, Head]:
        """Return the matching files, by path."""
        fixed = [re.split(r"[*?\[]", pattern)[0] for pattern in patterns]
        # `commonprefix` compares characters, so cut the prefix at the last slash.
        folder = os.path.commonprefix(fixed).rpartition("/")[0]  # noqa: RUF071
        heads, found = dict[str, Head](), dict[str, Head]()
        with contextlib.suppress(EntryNotFoundError):
            for entry in api.list_repo_tree(
                name, folder or None, recursive=True, **where
            ):
                if hasattr(entry, "size"):
                    heads[entry.path] = Head(entry.path, entry.size, None)
        for pattern in patterns:
            matching = {
                path: heads[path]
                for path in filter(glob_expression(pattern).fullmatch, heads)
            }
            if not matching:
                raise EmptyListingError(
                    f"no file matches {pattern!r}; * and ? match within one directory",
                    url=url,
                )
            found |= matching
        return found

    store = Store(
        f"{page}/resolve/{commit}", options=store_options, timeout=timeout, retry=retry
    )
    return tuple(
        Shard(store, path, head) for path, head in sorted(converted(list_files).items())
    )
