"""A server that answers as the Hugging Face Hub does, and one on another port as the CDN of large files."""

import contextlib
import json
import threading
import types
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit

PAGE = 3  # entries of a page of a listing
LARGE = 1000  # bytes, from which on the CDN has a file


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        hub, url = self.server.hub, urlsplit(self.path)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        on_cdn = self.server is hub.servers[1]
        hub.requests.append(("cdn" if on_cdn else "hub", self.command, unquote(url.path), token))
        # as on S3 and CloudFront, a signed URL is for GET, and no other credentials may come with
        # it
        if on_cdn:
            data = hub.signed.pop(url.query, None)
            refused = data is None or token or self.command != "GET"
            return self.answer(400) if refused else self.send_file(data)
        if hub.throttled:
            hub.throttled -= 1
            return self.answer(429, headers={"Retry-After": "1"})
        kind, *name, what, revision, key = [
            *url.path.removeprefix("/api").split("/", 6),
            "",
            "main",
            "",
        ][1:7]
        name, revision, key = "/".join(name), unquote(revision), unquote(key)
        commit = (
            revision if isinstance(hub.commits.get(revision), dict) else hub.commits.get(revision)
        )
        files = hub.commits.get(commit, {})
        if name != "org/name" or token != (hub.private_token or token):
            return self.answer(404 if token else 401, "RepoNotFound")
        if commit is None:
            return self.answer(404, "RevisionNotFound")
        if what == "tree":
            return self.send_page(files, key and f"{key}/", parse_qs(url.query))
        if what == "cached":
            return self.send_file(files[key])
        if what != "resolve":
            return self.answer(200, body=json.dumps({"id": name, "sha": commit}).encode())
        if hub.gated:
            return self.answer(403, "GatedRepo", b"Visit its page to ask for access.")
        if key not in files:
            return self.answer(404, "EntryNotFound")
        place = f"/api/{kind}/{name}/cached/{commit}/{quote(key)}"
        if len(files[key]) >= LARGE:
            hub.signed[signature := f"Expires=1&Signature={uuid.uuid4()}"] = files[key]
            place = f"{hub.urls[1]}/{uuid.uuid4()}?{signature}"
        self.answer(302, headers={"Location": place})

    do_HEAD = do_GET

    def send_page(self, files, folder, query):
        inside = [path for path in files if path.startswith(folder)]
        entries = [
            {"type": "file", "path": path, "size": len(files[path]), "oid": "0" * 40}
            for path in inside
        ]
        start = int(query.get("cursor", "0")[0])
        listing = self.server.hub.urls[0] + self.path.partition("&cursor")[0]
        following = f"{listing}&cursor={start + PAGE}"
        headers = {"Link": f'<{following}>; rel="next"'} if start + PAGE < len(entries) else {}
        page = json.dumps(entries[start : start + PAGE]).encode()
        self.answer(200, body=page, headers=headers) if inside else self.answer(
            404, "EntryNotFound"
        )

    def send_file(self, data):
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        body = data[first : last + 1]
        where = f"bytes {first}-{first + len(body) - 1}/{len(data)}"
        self.answer(206, body=body, headers={"Content-Range": where, "ETag": f'"{uuid.uuid4()}"'})

    def answer(self, status, code="", body=b"", headers=()):
        self.send_response(status)
        for name, value in {
            "Content-Length": len(body),
            "X-Error-Code": code,
            **dict(headers),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    log_message = lambda *args: None  # noqa: E731


@contextlib.contextmanager
def serve_hub(commits):
    """A hub with the repository org/name: the files of each commit, and the commit of each branch."""
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), _Handler) for _ in range(2)]
    hub = types.SimpleNamespace(commits=commits, servers=servers, signed={}, requests=[])
    # how many of the next requests get 429
    hub.private_token, hub.gated, hub.throttled = (None, False, 0)
    hub.urls = [f"http://127.0.0.1:{server.server_port}" for server in servers]
    for server in servers:
        server.hub = hub
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
    yield hub
    for server in servers:
        server.shutdown()
        server.server_close()
