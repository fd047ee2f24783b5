"""What a person may get wrong: one clear sentence in `docker compose logs`, and an exit code that is not 0."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.containers.stack import IMAGE, Stack, free_port, run


def refused(stack: Stack, service: str, sentence: str, code: int) -> None:
    """The service has given up with this code, and every time it tried it said this sentence and nothing worse."""
    assert stack.exit_codes(service, timeout_s=180.0) == dict.fromkeys(stack.containers(service), code)
    lines = stack.lines(service)
    said = [line for line in lines if line.startswith("shardline: ")]
    assert said
    assert all(re.search(sentence, line) for line in said), "\n".join(lines)
    assert "Traceback" not in "\n".join(lines)


def secret(folder: Path, name: str, *, mode: int = 0o444) -> Path:
    path = folder / name
    path.write_text(f"{name}-" * 8)
    path.chmod(mode)
    return path


def test_folder_of_the_job_that_is_not_there_is_named_before_anything_starts(tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    with Stack("mount", JOB_DIR=str(missing)) as stack:
        said = stack.up("chief", check=False)
        assert str(missing) in said
        assert "does not exist" in said
        assert not missing.exists()


@pytest.mark.long
def test_job_file_that_is_not_in_the_folder_is_named() -> None:
    with Stack("job", JOB_FILE="nothing.py", RESTARTS="1") as stack:
        stack.up("chief")
        refused(stack, "chief", r"job file /job/nothing\.py does not exist", 2)


@pytest.mark.long
def test_secret_that_the_tasks_may_not_read_is_named(tmp_path: Path) -> None:
    token = secret(tmp_path, "token", mode=0o400)
    with Stack("unreadable", "deploy/compose/token.yaml", TOKEN_FILE=str(token), RESTARTS="1") as stack:
        stack.up("chief")
        refused(stack, "chief", r"token-file.*/run/secrets/token.*(not readable|can't be read)", 2)


def fetch(url: str, **headers: str) -> tuple[int, str]:
    """Status and text of an answer, whatever it is."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as refusal:
        return refusal.code, refusal.read().decode()


def check_page(page: str, token: str) -> None:
    """The chief's page, from the machine outside: for those who have the token, and an unknown path is a sentence."""
    bearer = {"Authorization": f"Bearer {token}"}
    status, form = fetch(page)
    assert status == 401
    assert '<input id="token"' in form
    assert fetch(f"{page}/api/view")[0] == 401
    assert fetch(f"{page}/api/view", Authorization="Bearer another-another-another")[0] == 401
    status, text = fetch(f"{page}/api/view", **bearer)
    assert (status, json.loads(text)["job"]) == (200, "digits")
    assert "<title>Shardline</title>" in fetch(page, **bearer)[1]
    status, sentence = fetch(f"{page}/nothing", **bearer)
    assert status == 404
    assert "/nothing" in sentence
    assert len(sentence.splitlines()) == 1


def test_task_with_another_token_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    token, other = secret(tmp_path, "token"), secret(tmp_path, "another")
    override = tmp_path / "other.yaml"
    override.write_text(
        f"""
services:
  evaluator:
    secrets: [another]
    environment: {{ SHARDLINE_TOKEN_FILE: /run/secrets/another }}
secrets:
  another: {{ file: {other} }}
"""
    )
    files = ("deploy/compose/token.yaml", override)
    port = str(free_port())
    with Stack("token", *files, TOKEN_FILE=str(token), PAGE_PORT=port, RESTARTS="1", STEPS="100") as stack:
        # When compose is done the chief is healthy, and its workers have yet to import torch and to join.
        stack.up()
        check_page(f"http://127.0.0.1:{port}", token.read_text())
        refused(stack, "evaluator", r"refused Take: the call does not carry the token of this job; set --token-file", 2)
        assert set(stack.exit_codes("chief", "ps", "worker").values()) == {0}


@pytest.mark.long
def test_chief_under_a_name_that_nobody_has_is_waited_for_and_named(tmp_path: Path) -> None:
    override = tmp_path / "nowhere.yaml"
    override.write_text(
        """
services:
  evaluator:
    environment: { SHARDLINE_CLUSTER: '{"chief": ["nowhere:2222"], "ps": 2, "worker": 2}' }
"""
    )
    with Stack("host", override, RESTARTS="1", JOIN_TIMEOUT="5") as stack:
        stack.compose("up", "-d", "--no-build", "--no-deps", "evaluator")
        refused(stack, "evaluator", r"chief at nowhere:2222 .*the name 'nowhere' has no address", 3)


@pytest.mark.long
def test_gpu_that_is_not_there_is_named(tmp_path: Path) -> None:
    override = tmp_path / "cuda.yaml"
    override.write_text("services: { worker: { environment: { SHARDLINE_DEVICE: cuda } } }")
    with Stack("cuda", override, RESTARTS="1", WORKERS="1", PS="1") as stack:
        stack.compose("up", "-d", "--no-build", "chief", "ps", "worker")
        refused(
            stack, "worker", r"--device cuda: (this torch \(.*\) is a CPU build|torch sees 0 CUDA devices); .*cpu", 2
        )


@pytest.mark.long
def test_metrics_port_that_is_taken_is_named(tmp_path: Path) -> None:
    override = tmp_path / "port.yaml"
    # The chief's own services are there already.
    override.write_text('services: { chief: { environment: { SHARDLINE_METRICS_PORT: "2222" } } }')
    with Stack("port", override, RESTARTS="1") as stack:
        stack.up("chief")
        refused(stack, "chief", r"can't serve metrics at 0\.0\.0\.0:2222: Address already in use; use another", 2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("volume", "folder", "sentence"),
    [
        ("logs", "/out/logs", r"/out/logs/.* can't be written: Permission denied"),
        ("state", "/out", r"/out/chief.*Permission denied"),
    ],
)
def test_volume_that_may_not_be_written_to_is_named(volume: str, folder: str, sentence: str) -> None:
    with Stack(f"volume-{volume}", RESTARTS="1") as stack:
        # As one that root has filled: an empty volume would be given to the image's user.
        name = f"{stack.project}_{volume}"
        labels = (f"com.docker.compose.project={stack.project}", f"com.docker.compose.volume={volume}")
        run("docker", "volume", "create", "--label", labels[0], "--label", labels[1], name)
        fill = f"touch {folder}/x && chown 0:0 {folder}"
        run("docker", "run", "--rm", "-u", "0", "-v", f"{name}:{folder}", "--entrypoint", "sh", IMAGE, "-c", fill)
        stack.up("chief")
        refused(stack, "chief", sentence, 2)
