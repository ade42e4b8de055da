"""A server that answers as the Hugging Face Hub does, and one on another port as the CDN of large files."""

import contextlib
import json
import uuid
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.answers import answering

PAGE = 3  # entries of a page of a listing
LARGE = 1000  # bytes, from which on the CDN has a file


class Hub:
    """A hub with the repository org/name.

    Attributes:
        commits: the files of each commit, and the commit of each branch.
        urls: the addresses of the hub and of the CDN.
        requests: the server, the method, the path and the token of each request.
        throttled: how many of the next requests get 429.
    """

    private_token, gated, throttled = None, False, 0

    def __init__(self, commits):
        self.commits, self.requests, self._signed = commits, [], {}

    def _seen(self, server, request):
        """The URL and the token of a request, which is recorded."""
        url = urlsplit(request.path)
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        self.requests.append((server, request.command, unquote(url.path), token))
        return url, token

    def answer_of_cdn(self, request):
        # as on S3 and CloudFront, a signed URL is for GET, and no other credentials may come with
        # it
        url, token = self._seen("cdn", request)
        data = self._signed.pop(url.query, None)
        if data is None or token or request.command != "GET":
            return request.send(400, b"")
        send_file(request, data)

    def answer(self, request):
        url, token = self._seen("hub", request)
        if self.throttled:
            self.throttled -= 1
            return request.send(429, b"", {"Retry-After": "1"})
        kind, *name, what, revision, key = [
            *url.path.removeprefix("/api").split("/", 6),
            "",
            "main",
            "",
        ][1:7]
        name, revision, key = "/".join(name), unquote(revision), unquote(key)
        commit = (
            revision
            if isinstance(self.commits.get(revision), dict)
            else self.commits.get(revision)
        )
        files = self.commits.get(commit, {})
        if name != "org/name" or token != (self.private_token or token):
            return refuse(request, 404 if token else 401, "RepoNotFound")
        if commit is None:
            return refuse(request, 404, "RevisionNotFound")
        if what == "tree":
            return self._send_page(request, files, key and f"{key}/", parse_qs(url.query))
        if what == "cached":
            return send_file(request, files[key])
        if what != "resolve":
            return request.send(200, json.dumps({"id": name, "sha": commit}).encode())
        if self.gated:
            return refuse(request, 403, "GatedRepo", b"Visit its page to ask for access.")
        if key not in files:
            return refuse(request, 404, "EntryNotFound")
        place = f"/api/{kind}/{name}/cached/{commit}/{quote(key)}"
        if len(files[key]) >= LARGE:
            self._signed[signature := f"Expires=1&Signature={uuid.uuid4()}"] = files[key]
            place = f"{self.urls[1]}/{uuid.uuid4()}?{signature}"
        request.send(302, b"", {"Location": place})

    def _send_page(self, request, files, folder, query):
        entries = [
            {"type": "file", "path": path, "size": len(files[path]), "oid": "0" * 40}
            for path in files
            if path.startswith(folder)
        ]
        if not entries:
            return refuse(request, 404, "EntryNotFound")
        start = int(query.get("cursor", "0")[0])
        listing = self.urls[0] + request.path.partition("&cursor")[0]
        following = f"{listing}&cursor={start + PAGE}"
        headers = (
            {"Link": f'<{following}>; rel="next"'} if start + PAGE < len(entries) else {}
        )
        request.send(200, json.dumps(entries[start : start + PAGE]).encode(), headers)


def refuse(request, status, code, body=b""):
    request.send(status, body, {"X-Error-Code": code})


def send_file(request, data):
    request.send_object(data, {"ETag": f'"{uuid.uuid4()}"'})


@contextlib.contextmanager
def serve_hub(commits):
    """A hub, and its CDN."""
    hub = Hub(commits)
    with answering(hub.answer) as url, answering(hub.answer_of_cdn) as cdn:
        hub.urls = url, cdn
        yield hub
